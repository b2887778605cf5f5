"""The recorder's secret: how a process gets it, and how it keeps it from the other processes of its user."""

import ctypes
import os
import re
import stat
from pathlib import Path

from rolltap.addons.errors import InputError

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_PR_SET_DUMPABLE = 4
"""See prctl(2)."""


def read_secret(path: str | Path) -> str:
    """Return the secret that a file or pipe holds, without surrounding whitespace.

    `/dev/fd/NUMBER` is an open descriptor of this process; it is closed. Raises `InputError` when nothing can be read,
    and for a file that other users can read.
    """
    given = _DESCRIPTOR.fullmatch(str(path))
    try:
        # a socket cannot be opened by its path, and a descriptor that is closed cannot be read a second time
        with open(int(given[1]) if given else Path(path).expanduser(), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
                mode = stat.filemode(status.st_mode)
                raise InputError(f"other users may read the secret in {path} ({mode}): chmod 600 {path}")
            secret = file.read().decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the secret in {path}: {error}") from error
    if not secret:
        raise InputError(f"{path} is empty: write a secret to it")
    return secret


def hide_process() -> None:
    """Hide the memory, environment and descriptors of this process from the other processes of its user, except root.

    They cannot trace it either, and it dumps no core (`PR_SET_DUMPABLE` of prctl(2)). Programs that it starts are not
    hidden.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
