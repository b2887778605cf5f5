"""The agent's changes against the pristine workspace, and applying them to a fresh copy of it."""

import contextlib
import dataclasses
import difflib
import errno
import hashlib
import math
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rolltap.addons.errors import InputError
from rolltap.trainer.beneath import allow_owner, opened, opened_parent, remove
from rolltap.trainer.judges import folders
from rolltap.trainer.judges.folders import (
    MAX_FILE_BYTES,
    Entry,
    Refusal,
    TooMuchError,
    Tree,
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
_NO_NEWLINE = "\n\\ No newline at end of file\n"
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


class AgentFolders(NamedTuple):
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
        paths = {*self.changed, *self.deleted}
        for path in self.changed:
            paths.difference_update(parents(path))
        return sorted(paths)

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
        odd: set[str] = set()
        refused: list[str] = []
        for path, why in sorted(self.refused.items()):
            refused.append(f"{_shown(path)}: {why}")
            if why in _ODD:
                odd.add(path)
            if why in ("planted", "settings"):
                planted.add(path)
        return {
            "diff_sha256": hashlib.sha256(self.diff.encode()).hexdigest(),
            "changed_files": len(files),
            "changed": [_shown(path) for path in files[:_MAX_LISTED]],
            "changed_test_files": len(tests),
            "changed_tests": [_shown(path) for path in tests[:_MAX_LISTED]],
            "planted_files": self._unusual(planted),
            "odd_files": self._unusual(odd),
            "refused_files": len(refused),
            "refused": refused[:_MAX_LISTED],
        }

    def _unusual(self, paths: Set[str]) -> int:
        """Count the paths that installing packages and running tests do not leave."""
        environments: set[str] = set()
        for path in self.added:
            if path.endswith("/pyvenv.cfg"):
                environments.add(path.rpartition("/")[0])
        count = 0
        for path in paths:
            count += not _ORDINARY.search(path) and environments.isdisjoint(parents(path))
        return count


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
    half = _MAX_SHOWN // 2
    return text if len(text) <= _MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


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
    refused: dict[str, Refusal] = {}
    for path, why in after.refused.items():
        # compiled Python comes with every run of it
        if why not in ("cache", before.refused.get(path)):
            refused[path] = why
    changed: dict[str, Entry] = {}
    for path, entry in after.entries.items():
        if entry != before.entries.get(path) and entry.size <= MAX_FILE_BYTES:
            changed[path] = entry
    gone = before.entries.keys() - after.entries.keys() - after.refused.keys()
    deleted = tuple(sorted(gone, reverse=True))
    end = min(end, time.monotonic() + _MAX_DIFF_SECONDS)
    diff = _diff(
        start,
        workspace,
        before.entries,
        changed,
        deleted,
        end,
    )
    return Changes(
        changed,
        deleted,
        refused,
        diff,
        frozenset(changed.keys() - before.entries.keys()),
    )


def _require_bounded(before: Tree, after: Tree) -> None:
    """Raise `TooMuchError` for too many bytes in new files and files of another size. Files may
    have holes."""
    size = 0
    for path, entry in after.entries.items():
        old = before.entries.get(path)
        is_other = old is None or old.size != entry.size
        if is_other and entry.size <= MAX_FILE_BYTES:
            size += entry.size
    if size > MAX_CHANGED_BYTES:
        raise TooMuchError(f"the agent changed more than {MAX_CHANGED_BYTES >> 30} GiB of files")


def _hash_files(root: Path, tree: Tree, end: float = math.inf) -> None:
    """Set the digests of the files of a folder. `end` is of the clock `time.monotonic`."""
    for path, entry in list(tree.entries.items()):
        if entry.kind != "file" or entry.size > MAX_FILE_BYTES:
            continue
        if time.monotonic() > end:
            raise TooMuchError("comparing the workspace with the start took too long")
        try:
            digest = folders.file_digest(root, path, tree.rights)
            tree.entries[path] = dataclasses.replace(entry, digest=digest)
        except PermissionError:
            tree.refused[path] = "unreadable"
            del tree.entries[path]


def _read_start(start: Path) -> Tree:
    """Return what is in a start, with the digests of its files. Raises `InputError` and
    `OSError`."""
    try:
        tree = folders.scan(start)
    except TooMuchError as error:
        raise InputError(f"the task's start: {error}") from error
    _hash_files(start, tree)
    return tree


@lru_cache(maxsize=_KNOWN_STARTS)
def _known_start(start: Path, digest: str) -> Tree:
    """Read a start once for all that ask with this digest."""
    return _read_start(start)


def _diff(
    start: Path,
    workspace: Path,
    before: Mapping[str, Entry],
    changed: Mapping[str, Entry],
    deleted: Sequence[str],
    end: float,
) -> str:
    parts: list[str] = []
    left = _MAX_DIFF_BYTES
    for path in sorted([*changed, *deleted]):
        old = before.get(path)
        new = changed.get(path)
        name = printable(path).replace("\n", "\\n")
        summary = f"{name}: {_describe(old)} -> {_describe(new)}\n"
        part = summary
        old_lines = _lines(start, path, old)
        new_lines = _lines(workspace, path, new)
        if old_lines is not None and new_lines is not None:
            names = (f"a/{name}" if old else "/dev/null", f"b/{name}" if new else "/dev/null")
            part = "".join(difflib.unified_diff(old_lines, new_lines, *names))
            if old and new and old.executable != new.executable:
                part = summary + part
        left -= len(part.encode())
        if left < 0 or time.monotonic() > end:
            whole = hashlib.sha256(repr((sorted(changed.items()), deleted)).encode()).hexdigest()
            parts.append(f"The diff is cut off here. SHA-256 of all changes: {whole}\n")
            break
        parts.append(part)
    return "".join(parts)


def _describe(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    if entry.kind == "folder":
        return "folder"
    if entry.kind == "link":
        return f"link to {printable(entry.target)!r}"
    program = "executable " if entry.executable else ""
    return f"{program}file of {entry.size} bytes, SHA-256 {entry.digest or '?'}"


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
    last = lines.pop()
    texts = [f"{line}\n" for line in lines]
    if last:
        texts.append(f"{last}{_NO_NEWLINE}")
    return texts


def apply_changes(changes: Changes, source: Path | Mapping[str, bytes], fresh: Path) -> None:
    """Make the same changes in another copy of the start. `source` is the workspace, or path -> a
    file's content.

    Files have the modes 0755 or 0644 there and belong to this user. A folder stays if it is not
    empty. Raises `OSError`, also when a file is another one than `find_changes` found.
    """
    for path in changes.deleted:
        with contextlib.suppress(FileNotFoundError), opened_parent(fresh, path) as (folder, name):
            allow_owner(folder, stat.S_IRWXU)
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=folder)
    for path, entry in sorted(changes.changed.items()):
        if entry.kind == "folder":
            with opened(fresh, path, create=True):
                continue
        if entry.kind == "link":
            with opened_parent(fresh, path, create=True) as (folder, name):
                remove(folder, name)
                os.symlink(entry.target, name, dir_fd=folder)
            continue
        chunks = folders.read_chunks(source, path) if isinstance(source, Path) else [source[path]]
        digest = folders.write_file(fresh, path, chunks, executable=entry.executable)
        if entry.digest not in ("", digest):
            raise OSError(f"{printable(path)} was changed while it was copied")
