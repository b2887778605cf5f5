"""The shell scripts that `boxes/remote/harbor_box.py` runs in an environment of Harbor.

Of the image they need `bash`, which Harbor runs, `tar`, `gzip`, `grep`, and coreutils or busybox.

They run as root, and so do the programs that they start: nothing in a box is hidden from its
programs.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence

FOLDER = "/tmp/rolltap"
"""Folder of ours in a box, which each run makes anew: every environment lets Harbor write to
/tmp."""
LOG = "log"
"""File in `FOLDER`: the output of the program."""
TO_BOX = f"{FOLDER}.in.tar.gz"
FROM_BOX = f"{FOLDER}.out.tar.gz"
GRACE_SECONDS = 5
"""Time between SIGTERM and SIGKILL."""
UNPACK = f"tar -xzf {TO_BOX} -C / --no-same-owner && rm {TO_BOX}"
"""Command that unpacks what was taken to the box."""

_MARK = "ROLLTAP_BOX"
"""Variable by which the processes of a program are found.

One that removes it gets away until the box ends.
"""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

_RUN = """\
exec 2>&1 </dev/null
rm -f "$0"
rm -rf {folder} {archive} && mkdir -p {folder} {workdir} && cd {workdir} || exit 1
{pipes}
how=ended
( {exports}
command -v {program} >/dev/null ) || how=absent
( {exports}
export {mark}={token}
exec {command}
) >{folder}/{log} 2>&1 & program=$!
( export {mark}={token}
sleep {timeout:.3f}
: >{folder}/timeout
kill $program
sleep {grace}
kill -KILL $program
) >/dev/null 2>&1 & watch=$!
wait $program
status=$?
kill -KILL $watch
tries=0
while [ $tries -lt 100 ]; do
  left=$(grep -lF {mark}={token} /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3)
  [ -n "$left" ] || break
  kill -KILL $left
  tries=$((tries + 1))
  sleep 0.05
done >/dev/null
cd /
mkdir -p {workdir}
[ ! -e {folder}/timeout ] || how=timeout
if [ $(wc -c <{folder}/{log}) -gt {log_bytes} ]; then
  head -c {log_bytes} {folder}/{log} >{folder}/cut
  printf '\\n[rolltap: the output is cut here, at {log_bytes} bytes]\\n' >>{folder}/cut
  mv {folder}/cut {folder}/{log}
fi
{pack} >/dev/null
[ $(wc -c <{archive}) -le {most_bytes} ] || {{ {pack_ours}; }} >/dev/null
echo "{token} $status $how"
"""


def run_script(
    token: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout: float,
    workdir: str,
    pipes: Sequence[str],
    log_bytes: int,
    most_bytes: int,
) -> str:
    """Return the script that runs a program in the folder `workdir`, kills what it left, and packs
    what comes back.

    It prints `token`, the exit status, and `ended`, `timeout` or `absent`. The output is in the
    file `LOG`, without what comes after `log_bytes`. `pipes` are paths that the program writes to;
    they lead to the files `verdict(0)` and so on. An archive of more than `most_bytes` is made
    again, without the workspace.

    Raises `OSError` for a variable whose name no shell knows.
    """
    exports = []
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise OSError(
                f"the environment variable {name!r} has no name that a shell knows: rename it"
            )
        before = '"${PATH:+$PATH:}"' if name == "PATH" else ""
        exports.append(f"export {name}={before}{shlex.quote(value)}")
    makes = []
    for number, path in enumerate(pipes):
        parent = shlex.quote(os.path.dirname(path))
        place = f"{FOLDER}/{verdict(number)}"
        # a launcher removes the path when it has opened it: the link goes, and the file stays
        makes.append(f": >{place} && mkdir -p {parent} && ln -sfn {place} {shlex.quote(path)}")
    return _RUN.format(
        folder=FOLDER,
        archive=FROM_BOX,
        workdir=shlex.quote(workdir),
        pipes="\n".join(makes),
        exports="\n".join(exports),
        program=shlex.quote(command[0]),
        command=shlex.join(command),
        mark=_MARK,
        token=token,
        log=LOG,
        log_bytes=log_bytes,
        timeout=timeout,
        grace=GRACE_SECONDS,
        pack=pack_command(workdir),
        pack_ours=pack_command(),
        most_bytes=most_bytes,
    )


def verdict(number: int) -> str:
    """Return the name of the file in `FOLDER` with what was written at one of the pipes."""
    return f"verdict-{number}"


def pack_command(*folders: str) -> str:
    """Return the command that packs `FOLDER` and other folders.

    Hard links are files of their own there.
    """
    names = [shlex.quote(folder.strip("/")) for folder in (FOLDER, *folders)]
    whole = "$(tar --hard-dereference --version >/dev/null 2>&1 && echo --hard-dereference)"
    return f"mkdir -p {FOLDER} && tar {whole} -czf {FROM_BOX} -C / {' '.join(names)}"
