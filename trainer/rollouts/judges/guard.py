"""The judge's own files in a workspace, while the agent's code runs there: its tests, and the script that it starts."""

import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from rolltap.trainer.rollouts.judges.folders import opened, scan
from rolltap.trainer.rollouts.judges.named import is_script
from rolltap.trainer.rollouts.judges.patterns import TEST_FILES, matches
from rolltap.trainer.rollouts.judges.select import OneJudge
from rolltap.trainer.rollouts.judges.spec import CommandJudge, PytestJudge
from rolltap.trainer.rollouts.runtimes.runtime import Mount

Stamp = tuple[int, int, int]
"""Inode, size, and time of the last change in nanoseconds, which no program can set."""

_CODE = (".py", ".js", ".ts", ".mjs", ".cjs", ".jsx", ".tsx", ".sh")
"""Ends of the names of files that no test writes; tests write data."""
_MAX_MOUNTS = 200


def judges_files(start: Path, workspace: Path, spec: OneJudge, laid: Collection[str], workdir: str) -> list[str]:
    """Return the paths of the judge's own files of code in a prepared workspace, the task's `laid` tests first.

    The start's tests are among them, unless the judge has mounts: it brings tests then, and may replace those.
    """
    if not isinstance(spec, PytestJudge | CommandJudge):
        return []
    brings_tests = isinstance(spec, CommandJudge) and bool(spec.mounts)
    entries = scan(workspace).entries
    first = sorted(path for path in laid if path in entries)
    named = [
        path
        for path in scan(start).entries
        if path in entries
        and path not in laid
        and (spec.paths is None or not matches(path, spec.paths))
        and (is_script(path, spec.command, workdir) or (not brings_tests and matches(path, TEST_FILES)))
    ]
    named.sort(key=lambda path: not is_script(path, spec.command, workdir))
    return [path for path in [*first, *named] if path.endswith(_CODE) and entries[path].kind == "file"]


def read_only(workspace: Path, workdir: str, paths: Iterable[str]) -> list[Mount]:
    """Return mounts that show files read-only in a box: the first 200, the others can be changed.

    Their folders are mounts too: the folder of a mount can be renamed, a mount cannot.
    """
    chosen = list(paths)[:_MAX_MOUNTS]
    folders = {parent for path in chosen for parent in _parents(path)}
    mounts = [Mount(workspace / folder, f"{workdir}/{folder}", writable=True) for folder in sorted(folders)]
    return mounts + [Mount(workspace / path, f"{workdir}/{path}") for path in chosen]


def stamps(workspace: Path, paths: Iterable[str]) -> dict[str, Stamp | None]:
    """Return the stamp of each file: see `stamp`."""
    return {path: stamp(workspace, path) for path in paths}


def stamp(workspace: Path, path: str) -> Stamp | None:
    """Return a file's stamp, which differs after every change of the file; None when it is gone."""
    parent, _, name = path.rpartition("/")
    try:
        with opened(workspace, parent) as folder:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_ctime_ns) if stat.S_ISREG(status.st_mode) else None


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]
