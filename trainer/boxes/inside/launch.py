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

import contextlib
import ctypes
import importlib
import json
import os
import pathlib
import resource
import runpy
import sys
import traceback
from typing import Any

PR_SET_DUMPABLE = 4


def take(pipe: str) -> int:
    """Open a pipe for this process alone, and return the descriptor. Raises `OSError`."""
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("this process cannot be closed to others (PR_SET_DUMPABLE)")
    descriptor = os.open(pipe, os.O_WRONLY)
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))
    with contextlib.suppress(OSError):  # in a box it is mounted, and who else opens it is counted
        os.unlink(pipe)
    return descriptor


def limits() -> Any:
    """Return the limits of this process by their names."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def start(program: str, *arguments: str) -> None:
    """Run a script or module as Python does."""
    by_module = program == "-m"
    name = arguments[0] if by_module else program
    sys.argv = [name, *arguments[by_module:]]
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # not with the option -I or -P
        sys.path[0] = os.getcwd() if by_module else os.path.dirname(os.path.realpath(name))
    if by_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(name), run_name="__main__")


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
    given = sys.argv[1:]
    taken = take(given[0]) if given[0] else -1
    if given[1] == "--function":
        sys.exit(call(taken, *given[2:]))
    os.environ["ROLLTAP_REWARD_FD"] = str(taken)
    own = os.dup(taken)  # the script may close its descriptor
    os.register_at_fork(after_in_child=lambda: os.close(own))
    before = limits()
    try:
        start(*given[1:])
    finally:
        changed = [name for name, _ in limits().items() - before.items()]
        if changed:
            os.write(own, b"\0" + " ".join(changed).encode())
