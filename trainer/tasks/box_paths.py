"""Paths inside the box of a session, which a task may choose.

A path becomes a part of the command line that makes the box, so each is checked once, where a task
is read. What a task says of its box comes from whoever may send tasks to a service.
"""

from typing import Annotated

from pydantic import AfterValidator

HOME = "/home/agent"
"""The home folder in a box that has files of its own."""
_SYSTEM = "bin boot dev etc home lib lib32 lib64 libx32 proc sbin sys usr var"
_HOLD_OTHERS = {"/"}.union(f"/{name}" for name in _SYSTEM.split())
"""Folders that hold those of the system: a task may have a folder below them, and none of them."""
_TAKEN = ("/dev", "/proc", "/sys", "/rolltap", "/.rolltap", "/etc/rolltap")
"""Folders below which a task has nothing: they are the kernel's, and rolltap's own."""


def box_path(text: str) -> str:
    """Return an absolute path of a box in its shortest form.

    Raises `ValueError` for one that is none of a task's.
    """
    parts = [part for part in text.split("/") if part not in ("", ".")]
    path = "/" + "/".join(parts)
    if not text.startswith("/") or ".." in parts or not text.isprintable():
        raise ValueError(f"{text!r} is no path of a box: write an absolute path without '..'")
    is_taken = path == HOME or any(f"{path}/".startswith(f"{top}/") for top in _TAKEN)
    if path in _HOLD_OTHERS or is_taken:
        raise ValueError(
            f"{text!r} is not the task's own in a box: choose another folder, such as /workspace",
        )
    return path


BoxPath = Annotated[str, AfterValidator(box_path)]
"""An absolute path of a box, in its shortest form."""
