"""The differences between the blocks of the pages and the tests: blocks that are not run, files,
and substitutions."""

from tests.conftest import ROOT
from tests.readme.blocks import blocks_of

EXAMPLE = [
    path.read_text()
    for path in (ROOT / "recipes" / "harnesses" / "own-agent").rglob("*")
    if path.suffix in (".py", ".toml", ".jsonl")
]
"""Files that `rolltap init` writes, as the page of an own agent shows them."""

SKIPPED = {
    "recipes/quickstart/run.sh": "these commands are the quickstart and the test suite itself",
    "python3 -m venv tap && tap/bin/pip install '.[record]'": (
        "tests/wheel/test_extras.py installs it and runs doctor"
    ),
    "python: ready. 3 calls captured, 2 continued token for token.": "output of the doctor",
    "python3 -m venv engine && engine/bin/pip install '.[vllm]'": (
        "downloads gigabytes of CUDA libraries"
    ),
    "tap/bin/rolltap serve /models/Qwen3-4B --vllm engine/bin/vllm --lora-rank 16 -- --gpu-memory-utilization 0.8": (
        "needs a GPU; the fixture `engine` starts the server of this command on the CPU"
    ),
    "export ROLLTAP_ENGINE_KEY_FILE=~/.rolltap-engine.key": (
        "runs until it is stopped; the fixture `engine` stands for it"
    ),
    "recipes/gpu/check.sh": "takes minutes; tests/recipes/test_gpu.py runs its small form",
    "python recipes/swe/mini/make.py runs/mini": (
        "tests/recipes/test_swe_mini.py runs these tasks in more ways"
    ),
    "CUDA_VISIBLE_DEVICES=0 rolltap serve Qwen/Qwen3-4B --port 8000 --lora-rank 16 &": (
        "needs four GPUs"
    ),
    "HEAD=$(hostname) NODE=0": (
        "needs two nodes; tests/trainer/training/test_nodes.py trains so on one machine"
    ),
    "TRAINERS=2 MODEL=models/Qwen3-8B sbatch --nodes=4 recipes/slurm/train.sbatch recipe.toml --out runs/grpo": (
        "needs Slurm; tests/recipes/test_slurm.py runs the files with stand-ins"
    ),
    "rolltap train recipe.toml --from runs/first --out runs/offline": (
        "the shortened rollout has one session a task, and so no group to compare"
    ),
    "(umask 077 && openssl rand -hex 32 > recorder.secret)": (
        "listens on the address of Docker's network"
    ),
    "rolltap env --proxy http://172.17.0.1:8080 --secret-file recorder.secret --session box-1 --harness codex \\": (
        "needs Docker and an image"
    ),
    "ssh me@cpu.example.com 'python3 -m venv boxes && boxes/bin/pip install psutil pydantic'": (
        "needs another machine; tests/trainer/boxes/remote/test_ssh.py has an sshd"
    ),
    "pip install '.[record,otel]'": "needs a collector; tests/trainer/test_phases.py has one",
    "python3.12 -m venv harbor && harbor/bin/pip install 'harbor[daytona]==0.25.0'": (
        "needs an account; tests/trainer/boxes/test_harbor.py runs such a rollout"
    ),
    "rolltap doctor --harness my-agent.toml": "there is no such program",
    "pip install '.[record,service]'": "runs until it is stopped; tests/trainer/service starts it",
    "pip install '.[record,ray]'": "needs other machines; tests/trainer/nodes has nodes on one",
    "rolltap view runs/try": "runs until it is stopped; tests/trainer/viewer opens the page",
    "rolltap rerun runs/try record-1a2b -- python my_agent.py": (
        "tests/trainer/cli/test_rerun.py has such a session"
    ),
    "rolltap fork runs/first SESSION --at 4 -n 8 --tasks tasks.jsonl --model Qwen/Qwen3-4B --out runs/forks": (
        "tests/trainer/cli/test_fork.py has such a session"
    ),
    "rolltap serve runs/quickstart/model --lora-rank 8": (
        "tests/recipes/test_service.py trains with both pages"
    ),
    "from rolltap import Client, open_run": "tests/trainer/service/test_client.py has these calls",
}
"""First line of a block, without its comment -> why it is not run. The options of `rolltap` in it
are checked."""

SKIPPED |= {
    f"$ rolltap train recipes/swe/{name}.toml --out runs/swe --dry-run": (
        "tests/recipes/test_swe.py compares the output"
    )
    for name in (
        "one-gpu-lora",
        "eight-gpus-lora",
        "eight-gpus-full",
        "long-lora",
        "sharded-full",
        "sharded-experts",
    )
}

SKIPPED |= {
    block.first_line: "most of it needs a GPU; tests/recipes/test_gpu.py reads its commands"
    for block in blocks_of(ROOT / "recipes" / "gpu" / "README.md")
}

SKIPPED |= {
    text.partition("\n")[0].partition("  #")[0]: "tests/trainer/cli/test_init.py writes and runs it"
    for text in EXAMPLE
}

FILES = {
    '{"id": "count"': "tasks.jsonl",
    'model = "/models/Qwen3-4B"': "recipe.toml",
    'name = "my-agent"': "my-agent.toml",
    "[evaluation]": "evaluation.toml",
    "[forks]": "forks.toml",
    '{"id": "t", "instruction": "...", "allow"': "hosts.jsonl",
}
"""Start of a block that shows a file -> the file's name. The shell blocks use these files."""

SERVERS = ('mitmdump -s "$(rolltap addon)"',)
"""Starts of the blocks that run until they are stopped. The blocks after them run beside them."""

SUBSTITUTIONS = {
    # the engine and the proxy of the tests, and a model that the quickstart has taught
    r"http://127\.0\.0\.1:8000": "{engine}",
    r"http://127\.0\.0\.1:8001 --as": "{engine} --as",
    r"http://127\.0\.0\.1:8080": "{proxy}",
    r"try-1:x@127\.0\.0\.1:8080": "try-1:x@{proxy_address}",
    r"Qwen/Qwen3-4B|/models/Qwen3-4B": "{model}",
    # the tiny model can drive mini-swe-agent alone
    r"--harness claude-code -- -p": "--harness mini-swe-agent -- --yolo --exit-immediately --task",
    r"\bcodex\b": "mini-swe-agent",
    # names that the reader fills in
    r"\bSESSION\b": "{session}",
    r"\bCALL\b": "{call}",
    r"ORG/NAME": "org/rollouts",
    # fewer sessions, one step, and adapters of the rank that the fixture `engine` accepts
    r"-n 8\b": "-n 1",
    r"sessions=8": "sessions=1",
    r"\bsteps = 100": "steps = 1",
    r"groups_per_step = 4": "groups_per_step = 1",
    r"sessions = 8": "sessions = 2",
    r"replace_zero_variance = 2": "replace_zero_variance = 0",
    r"\br = 16": "r = 8",
    # a quarter of the sessions succeed
    r"--min-reward 1\b": "--min-reward 0",
    # TRL's defaults are for a GPU
    r"GRPOConfig\(": "GRPOConfig(use_cpu=True, ",
}
"""Pattern -> replacement, applied in this order to blocks that are run and to `FILES`. `{name}` is
an attribute of the `Workshop`."""
