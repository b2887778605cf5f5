"""Starts a judge's script, or a function, as the only one who can write to the verdict's pipe. For
every Python 3.

    python launch.py PIPE SCRIPT|-m MODULE [ARGUMENTS]
    python launch.py PIPE --function MODULE:FUNCTION [FOLDER]

The pipe is opened before anything of the task is imported. Processes that a script starts do not
have the descriptor (close-on-exec, and closed after a fork). They cannot open it in /proc or reach
this memory (PR_SET_DUMPABLE in prctl(2)). A script finds it in ROLLTAP_REWARD_FD; a function
returns its reward, and is only imported without FOLDER.

Behind the script's reward, and a zero byte, come the names of the limits that this process had not
at its begin: where no filter forbids it, programs of the same user can set them (prlimit(2)).
"""

import ctypes
import functools
import importlib
import json
import os
import pathlib
import resource
import runpy
import sys
import traceback
from contextlib import suppress
from typing import Any

PR_SET_DUMPABLE = 4


def take(pipe: str) -> int:
    """Open a pipe for this process alone, and return the descriptor. Raises `OSError`."""
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("this process cannot be closed to others (PR_SET_DUMPABLE)")
    descriptor = os.open(pipe, os.O_WRONLY)
    os.register_at_fork(after_in_child=functools.partial(os.close, descriptor))
    with suppress(OSError):  # in a box it is mounted, and who else opens it is counted
        os.unlink(pipe)
    return descriptor


def limits() -> Any:
    """Return the limits of this process by their names."""
    found = {}
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            found[name] = resource.getrlimit(getattr(resource, name))
    return found


def start(program: str, *arguments: str) -> None:
    """Run a script or module as Python does."""
    # not with the option -I or -P
    is_own_folder_first = sys.path[0] == os.path.dirname(os.path.abspath(__file__))
    if program == "-m":
        sys.argv = [*arguments]
        if is_own_folder_first:
            sys.path[0] = os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *arguments]
        if is_own_folder_first:
            sys.path[0] = os.path.dirname(os.path.realpath(program))
        runpy.run_path(os.path.abspath(program), run_name="__main__")


def call(pipe: int, function: str, folder: str = "") -> int:
    """Call a function with a folder, write its result as JSON, and return the exit status: 3
    without a result."""
    module, _, name = function.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if folder:
            text = json.dumps(found(pathlib.Path(folder)), default=float)  # numbers of NumPy
            os.write(pipe, text.encode())
    except Exception:
        traceback.print_exc()
        return 3
    return 0


if __name__ == "__main__":
    taken = -1
    if sys.argv[1]:
        taken = take(sys.argv[1])
    if sys.argv[2] == "--function":
        sys.exit(call(taken, *sys.argv[3:]))
    os.environ["ROLLTAP_REWARD_FD"] = str(taken)
    own = os.dup(taken)  # the script may close its descriptor
    os.register_at_fork(after_in_child=functools.partial(os.close, own))
    before = limits()
    try:
        start(*sys.argv[2:])
    finally:
        changed = []
        for name, limit in limits().items():
            if limit != before[name]:
                changed.append(name)
        if changed:
            os.write(own, b"\0" + " ".join(changed).encode())
