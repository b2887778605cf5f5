"""The agent's changes against the pristine workspace, and applying them to a fresh copy of it."""

import contextlib
import dataclasses
import difflib
import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rolltap.addons.errors import InputError
from rolltap.trainer.judges import folders
from rolltap.trainer.judges.folders import (
    MAX_FILE_BYTES,
    Entry,
    Refusal,
    TooMuchError,
    Tree,
    opened,
    parents,
)
from rolltap.trainer.tasks.content import RUNNER_FILES, STARTUP, TEST_FILES, matches

MAX_CHANGED_BYTES = 4 << 30
MAX_SECONDS = 300.0
"""Time for comparing a workspace with its start."""
_MAX_DIFF_SECONDS = 20.0
_MAX_DIFF_BYTES = 1 << 20
_MAX_DIFF_FILE_BYTES = 256 << 10
_MAX_DIFF_FILE_LINES = 4000
"""difflib's time grows with the square of the lines."""
_KNOWN_STARTS = 32
"""Starts whose digests are kept. One of 40,000 files takes some 20 MB."""
_MAX_LISTED = 100
_MAX_SHOWN = 300
"""Characters of a path in the evidence."""
_ODD = frozenset({"fifo", "socket", "device", "setuid", "symlink"})
_ORDINARY = re.compile(
    r"(^|/)(\.?venv|env|node_modules|site-packages|\.pytest_cache|\.coveragerc)(/|$)|"
    r"\.egg-info(/(PKG-INFO|SOURCES\.txt|(dependency_links|requires|top_level)\.txt|not-zip-safe))?$"
)
"""Files that installing packages and running tests leave."""
_OF_THE_MACHINE = frozenset(
    {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
"""Errors of reading that are not the agent's."""


class AgentResult(NamedTuple):
    """The folders of this machine that an agent left."""

    workspace: Path
    home: Path


@dataclass(frozen=True, slots=True)
class Changes:
    """The agent's changes against the pristine workspace. Paths are relative, with `/`.

    Attributes:
        changed: Path -> what is there now: new and changed files, links and folders.
        deleted: Paths of the start that are gone, each folder after what was in it.
        refused: Path -> why it is not applied, or not as it is. What the start has as well is no
            refusal.
        diff: Unified diff of the text files, with a line for each other change; at most 1 MiB.
        added: Paths of `changed` that the start does not have.
    """

    changed: Mapping[str, Entry] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    diff: str = ""
    added: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Return True if there is something to apply."""
        return bool(self.changed or self.deleted)

    @property
    def files(self) -> list[str]:
        """Paths of changed and deleted files and links, and of new empty folders, in order."""
        above = {parent for path in self.changed for parent in parents(path)}
        return sorted(({*self.changed} - above) | {*self.deleted})

    def without(self, refused: Mapping[str, Refusal]) -> "Changes":
        """Return the changes less those at some paths, which are among `refused` then."""
        return dataclasses.replace(
            self,
            changed={path: entry for path, entry in self.changed.items() if path not in refused},
            deleted=tuple(path for path in self.deleted if path not in refused),
            refused={**self.refused, **refused},
        )

    def evidence(self) -> dict[str, Any]:
        """Return the changes as JSON for the sessions table, with at most 100 paths of each kind,
        long ones cut.

        `changed_tests` are the test files of the start that were modified or deleted; `odd_files`
        counts what is no file, `planted_files` what a program would load by itself, without what
        installing packages leaves.
        """
        files = self.files
        tests = [path for path in files if path not in self.added and matches(path, TEST_FILES)]
        planted = set(filter(loads_by_itself, self.changed))
        planted |= {path for path, why in self.refused.items() if why in ("planted", "settings")}
        odd = {path for path, why in self.refused.items() if why in _ODD}
        environments = {
            path.rpartition("/")[0] for path in self.added if path.endswith("/pyvenv.cfg")
        }

        def unusual(paths: set[str]) -> int:
            told = (path for path in paths if not _ORDINARY.search(path))
            return sum(environments.isdisjoint(parents(path)) for path in told)

        return {
            "diff_sha256": hashlib.sha256(self.diff.encode()).hexdigest(),
            "changed_files": len(files),
            "changed": [_shown(path) for path in files[:_MAX_LISTED]],
            "changed_test_files": len(tests),
            "changed_tests": [_shown(path) for path in tests[:_MAX_LISTED]],
            "planted_files": unusual(planted),
            "odd_files": unusual(odd),
            "refused_files": len(self.refused),
            "refused": [
                f"{_shown(path)}: {why}" for path, why in sorted(self.refused.items())[:_MAX_LISTED]
            ],
        }


def loads_by_itself(path: str) -> bool:
    """Return True for a path that Python, a test runner or a build tool loads by itself."""
    return matches(path.lower(), (*STARTUP, *RUNNER_FILES))


def printable(path: str) -> str:
    """Return a path as text that every encoder takes: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_of_the_machine(error: OSError) -> bool:
    """Return True for an error of a folder that this machine is the cause of, not what an agent
    left there."""
    return error.errno in _OF_THE_MACHINE


def _shown(path: str) -> str:
    text = printable(path)
    return (
        text
        if len(text) <= _MAX_SHOWN
        else f"{text[: _MAX_SHOWN // 2]}...{text[-_MAX_SHOWN // 2 :]}"
    )


def find_changes(
    start: Path,
    workspace: Path,
    *,
    digest: str | None = None,
    seconds: float = MAX_SECONDS,
) -> Changes:
    """Compare the start with the workspace that an agent left. No process may run in it any more.

    The workspace is compared by content: an agent can set a file's times, and not every filesystem
    has a new one after a change through mapped memory. A repository's own files (`.git`) and
    compiled Python are not looked at. Sizes are added up before a file is read.

    `digest` is one of the start's content. With it the start is read once for many comparisons.

    Raises `TooMuchError` for a workspace that cannot be judged for what the agent left in it, or
    that takes longer than `seconds`; `InputError` for such a start; `OSError` for a fault of this
    machine.
    """
    before = _read_start(start) if digest is None else _known_start(start, digest)
    end = time.monotonic() + seconds
    try:
        after = folders.scan(workspace, stat.S_IRWXU)
        _require_bounded(before, after)
        _hash_files(workspace, after, end)
    except OSError as error:
        if is_of_the_machine(error):
            raise
        raise TooMuchError(f"the workspace cannot be read: {error}") from error
    # what the start has as well is no refusal, and compiled Python comes with every run of it
    refused = {
        path: why
        for path, why in after.refused.items()
        if why not in (before.refused.get(path), "cache")
    }
    changed = {
        path: entry
        for path, entry in after.entries.items()
        if before.entries.get(path) != entry and entry.size <= MAX_FILE_BYTES
    }
    gone = (
        path for path in before.entries if path not in after.entries and path not in after.refused
    )
    deleted = tuple(sorted(gone, reverse=True))
    added = frozenset(path for path in changed if path not in before.entries)
    diff = _diff(
        start,
        workspace,
        before.entries,
        changed,
        deleted,
        min(end, time.monotonic() + _MAX_DIFF_SECONDS),
    )
    return Changes(changed, deleted, refused, diff, added)


def _require_bounded(before: Tree, after: Tree) -> None:
    """Raise `TooMuchError` for too many bytes in new files and files of another size. Files may
    have holes."""
    sizes = (
        entry.size
        for path, entry in after.entries.items()
        if entry.size <= MAX_FILE_BYTES
        and ((old := before.entries.get(path)) is None or old.size != entry.size)
    )
    if sum(sizes) > MAX_CHANGED_BYTES:
        raise TooMuchError(f"the agent changed more than {MAX_CHANGED_BYTES >> 30} GiB of files")


def _hash_files(workspace: Path, after: Tree, end: float) -> None:
    """Set the digests of the files of a workspace. `end` is of the clock `time.monotonic`."""
    for path, entry in list(after.entries.items()):
        if entry.kind != "file" or entry.size > MAX_FILE_BYTES:
            continue
        if time.monotonic() > end:
            raise TooMuchError("comparing the workspace with the start took too long")
        try:
            digest = folders.file_digest(workspace, path, stat.S_IRUSR)
            after.entries[path] = dataclasses.replace(entry, digest=digest)
        except PermissionError:
            after.refused[path] = "unreadable"
            del after.entries[path]


def _read_start(start: Path) -> Tree:
    """Return what is in a start, with the digests of its files. Raises `InputError` and
    `OSError`."""
    try:
        tree = folders.scan(start)
    except TooMuchError as error:
        raise InputError(f"the task's start: {error}") from error
    for path, entry in list(tree.entries.items()):
        if entry.kind == "file" and entry.size <= MAX_FILE_BYTES:
            tree.entries[path] = dataclasses.replace(entry, digest=folders.file_digest(start, path))
    return tree


@lru_cache(maxsize=_KNOWN_STARTS)
def _known_start(start: Path, digest: str) -> Tree:
    """Do what `_read_start` does, once for a start with this digest."""
    return _read_start(start)


def _diff(
    start: Path,
    workspace: Path,
    before: Mapping[str, Entry],
    changed: Mapping[str, Entry],
    deleted: tuple[str, ...],
    end: float,
) -> str:
    parts: list[str] = []
    left = _MAX_DIFF_BYTES
    for path in sorted([*changed, *deleted]):
        old, new = before.get(path), changed.get(path)
        part = _file_diff(start, workspace, path, old, new)
        left -= len(part.encode())
        if left < 0 or time.monotonic() > end:
            whole = hashlib.sha256(repr((sorted(changed.items()), deleted)).encode()).hexdigest()
            parts.append(f"The diff is cut off here. SHA-256 of all changes: {whole}\n")
            break
        parts.append(part)
    return "".join(parts)


def _file_diff(
    start: Path, workspace: Path, path: str, old: Entry | None, new: Entry | None
) -> str:
    name = printable(path).replace("\n", "\\n")
    summary = f"{name}: {_describe(old)} -> {_describe(new)}\n"
    if {entry.kind for entry in (old, new) if entry is not None} != {"file"}:
        return summary
    texts = [_lines(start, path, old), _lines(workspace, path, new)]
    if texts[0] is None or texts[1] is None:
        return summary
    mode = summary if old and new and old.executable != new.executable else ""
    names = (f"a/{name}" if old else "/dev/null", f"b/{name}" if new else "/dev/null")
    lines = difflib.unified_diff(texts[0], texts[1], *names)
    ends = "\n\\ No newline at end of file\n"
    return mode + "".join(line if line.endswith("\n") else line + ends for line in lines)


def _describe(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    if entry.kind == "file":
        return (
            f"{'executable ' if entry.executable else ''}file of {entry.size} bytes, SHA-256"
            f" {entry.digest or '?'}"
        )
    return f"link to {printable(entry.target)!r}" if entry.kind == "link" else "folder"


def _lines(root: Path, path: str, entry: Entry | None) -> list[str] | None:
    """Return the lines of a text, None for what is no text or too long for a diff."""
    if entry is None:
        return []
    content = folders.read_file(root, path, _MAX_DIFF_FILE_BYTES)
    if content is None or len(content) > _MAX_DIFF_FILE_BYTES or b"\0" in content:
        return None
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError:
        return None
    if len(lines) > _MAX_DIFF_FILE_LINES:
        return None
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def apply_changes(changes: Changes, source: Path | Mapping[str, bytes], fresh: Path) -> None:
    """Make the same changes in another copy of the start. `source` is the workspace, or path -> a
    file's content.

    Files have the modes 0755 or 0644 there and belong to this user. A folder stays if it is not
    empty. Raises `OSError`, also when a file is another one than `find_changes` found.
    """
    for path in changes.deleted:
        parent, _, name = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError), opened(fresh, parent) as folder:
            folders.allow_owner(folder, stat.S_IRWXU)
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=folder)
    for path, entry in sorted(changes.changed.items()):
        parent, _, name = path.rpartition("/")
        if entry.kind == "folder":
            with opened(fresh, path, create=True):
                continue
        if entry.kind == "link":
            with opened(fresh, parent, create=True) as folder:
                folders.remove(folder, name)
                os.symlink(entry.target, name, dir_fd=folder)
            continue
        with contextlib.ExitStack() as stack:
            if isinstance(source, Path):
                chunks = folders.read_chunks(stack.enter_context(opened(source, parent)), name)
            else:
                chunks = iter([source[path]])
            digest = folders.write_file(fresh, path, chunks, executable=entry.executable)
        if digest != entry.digest:
            raise OSError(f"{printable(path)} was changed while it was copied")
