"""The changes that an agent made to its workspace, and applying them to a fresh copy of the start."""

import contextlib
import dataclasses
import difflib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolltap.trainer.rollouts.judges.folders import (
    MAX_FILE_BYTES,
    Entry,
    Refusal,
    TooMuchError,
    opened,
    read_chunks,
    read_file,
    remove,
    scan,
    write_file,
)
from rolltap.trainer.rollouts.judges.patterns import TEST_FILES, matches

MAX_CHANGED_BYTES = 4 << 30
_MAX_DIFF_BYTES = 1 << 20
_MAX_DIFF_FILE_BYTES = 256 << 10
_MAX_DIFF_FILE_LINES = 4000
"""difflib's time grows with the square of the lines."""
_MAX_LISTED = 100


@dataclass(frozen=True, slots=True)
class Made:
    """The folders that an agent left, on this machine."""

    workspace: Path
    home: Path


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences between a start and the workspace that an agent left. Paths are relative, with `/`.

    Attributes:
        changed: Path -> what is there now: new and changed files, links and folders.
        deleted: Paths of the start that are gone, each folder after what was in it.
        refused: Path -> why it is not applied, or not as it is. What the start has as well is no refusal.
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
        folders = {parent for path in self.changed for parent in _parents(path)}
        return sorted(({*self.changed} - folders) | {*self.deleted})

    def without(self, refused: Mapping[str, Refusal]) -> "Changes":
        """Return the changes less those at some paths, which are among `refused` then."""
        return dataclasses.replace(
            self,
            changed={path: entry for path, entry in self.changed.items() if path not in refused},
            deleted=tuple(path for path in self.deleted if path not in refused),
            refused={**self.refused, **refused},
        )

    def evidence(self) -> dict[str, Any]:
        """Return the changes as JSON for the sessions table, with at most 100 paths of each kind.

        `changed_tests` are the test files of the start that were modified or deleted.
        """
        files = self.files
        tests = [path for path in files if path not in self.added and matches(path, TEST_FILES)]
        return {
            "diff_sha256": hashlib.sha256(self.diff.encode()).hexdigest(),
            "changed_files": len(files),
            "changed": [printable(path) for path in files[:_MAX_LISTED]],
            "changed_test_files": len(tests),
            "changed_tests": [printable(path) for path in tests[:_MAX_LISTED]],
            "refused_files": len(self.refused),
            "refused": [f"{printable(path)}: {why}" for path, why in sorted(self.refused.items())[:_MAX_LISTED]],
        }


def printable(path: str) -> str:
    """Return a path as text that every encoder takes: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def find_changes(start: Path, workspace: Path) -> Changes:
    """Compare the start with the workspace that an agent left. No process may run in it any more.

    Files are compared by content: times can be set. A repository's own files (`.git`) and compiled Python are not
    looked at. Raises `TooMuchError` for a workspace with too much to judge, and `OSError`.
    """
    before, after = scan(start), scan(workspace)
    refused = {path: why for path, why in after.refused.items() if not _is_of_start(path, why, before.refused)}
    changed = {path: entry for path, entry in after.entries.items() if before.entries.get(path) != entry}
    for path in [path for path, entry in changed.items() if entry.size > MAX_FILE_BYTES]:
        del changed[path]
    if sum(entry.size for entry in changed.values()) > MAX_CHANGED_BYTES:
        raise TooMuchError(f"the agent changed more than {MAX_CHANGED_BYTES >> 30} GiB of files")
    gone = (path for path in before.entries if path not in after.entries and path not in after.refused)
    deleted = tuple(sorted(gone, reverse=True))
    added = frozenset(path for path in changed if path not in before.entries)
    return Changes(changed, deleted, refused, _diff(start, workspace, before.entries, changed, deleted), added)


def _is_of_start(path: str, why: Refusal, before: Mapping[str, Refusal]) -> bool:
    """Return True for what the start has as well. Compiled Python comes with every run of it."""
    return before.get(path) == why or why == "cache"


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _diff(
    start: Path, workspace: Path, before: Mapping[str, Entry], changed: Mapping[str, Entry], deleted: tuple[str, ...]
) -> str:
    parts: list[str] = []
    left = _MAX_DIFF_BYTES
    for path in sorted([*changed, *deleted]):
        old, new = before.get(path), changed.get(path)
        part = _file_diff(start, workspace, path, old, new)
        left -= len(part.encode())
        if left < 0:
            whole = hashlib.sha256(repr((sorted(changed.items()), deleted)).encode()).hexdigest()
            parts.append(f"The diff is cut off here. SHA-256 of all changes: {whole}\n")
            break
        parts.append(part)
    return "".join(parts)


def _file_diff(start: Path, workspace: Path, path: str, old: Entry | None, new: Entry | None) -> str:
    name = printable(path).replace("\n", "\\n")
    if {entry.kind for entry in (old, new) if entry is not None} != {"file"}:
        return f"{name}: {_words(old)} -> {_words(new)}\n"
    texts = [_lines(start, path, old), _lines(workspace, path, new)]
    mode = f"{name}: {_words(old)} -> {_words(new)}\n" if old and new and old.executable != new.executable else ""
    if texts[0] is None or texts[1] is None:
        return mode or f"{name}: {_words(old)} -> {_words(new)}\n"
    names = (f"a/{name}" if old else "/dev/null", f"b/{name}" if new else "/dev/null")
    lines = difflib.unified_diff(texts[0], texts[1], *names)
    ends = "\n\\ No newline at end of file\n"
    return mode + "".join(line if line.endswith("\n") else line + ends for line in lines)


def _words(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    if entry.kind == "file":
        return f"{'executable ' if entry.executable else ''}file of {entry.size} bytes, SHA-256 {entry.digest or '?'}"
    return f"link to {printable(entry.target)!r}" if entry.kind == "link" else "folder"


def _lines(root: Path, path: str, entry: Entry | None) -> list[str] | None:
    """Return the lines of a text, None for what is no text or too long for a diff."""
    if entry is None:
        return []
    content = read_file(root, path, _MAX_DIFF_FILE_BYTES)
    if content is None or len(content) > _MAX_DIFF_FILE_BYTES or b"\0" in content:
        return None
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError:
        return None
    if len(lines) > _MAX_DIFF_FILE_LINES:
        return None
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def apply_changes(changes: Changes, workspace: Path, fresh: Path) -> None:
    """Make the same changes in another copy of the start.

    Files have the modes 0755 or 0644 there and belong to this user. A folder stays if it is not empty. Raises
    `OSError`, also when a file is another one than `find_changes` found.
    """
    for path in changes.deleted:
        parent, _, name = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError), opened(fresh, parent) as folder:
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
                remove(folder, name)
                os.symlink(entry.target, name, dir_fd=folder)
            continue
        with opened(workspace, parent) as source:
            digest = write_file(fresh, path, read_chunks(source, name), executable=entry.executable)
        if digest != entry.digest:
            raise OSError(f"{printable(path)} was changed while it was copied")
