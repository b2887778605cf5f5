"""Folders that tasks name: the kinds of files they may have, their copies and digests, and patterns
of their paths."""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.git import head_commit


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Start:
    """The pristine workspace that the sessions of a task start from.

    Attributes:
        folder: Nothing but what makes the start writes it.
        digest: SHA-256 of its content, in hexadecimal; see `content_digest`.
    """

    folder: Path
    digest: str

    def copy_to(self, target: Path) -> None:
        """Make or fill the folder `target`.

        Symlinks stay symlinks; no file shares its content with the start.
        """
        shutil.copytree(self.folder, target, symlinks=True, dirs_exist_ok=True)


@lru_cache(maxsize=1024)
def _expression(pattern: str) -> re.Pattern[str]:
    tokens = {
        "**/": "(?:.*/)?",
        "**": ".*",
        "*": "[^/]*",
        "?": "[^/]",
    }
    expression = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern.rstrip("/")):
        expression += tokens.get(part) or re.escape(part)
    return re.compile(f"{expression}(?:/.*)?", re.DOTALL)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Return True if a glob pattern names the path, relative and with `/`, or a folder above it.

    `*` and `?` match within a part, `**` matches any number of parts. Upper and lower case differ.
    """
    return any(_expression(pattern).fullmatch(path) for pattern in patterns)


TEST_FILES = (
    "**/test_*.py",
    "**/*_test.py",
    "**/tests.py",
    "**/conftest.py",
    "**/tests/**",
    "**/__tests__/**",
    "**/*.test.js",
    "**/*.test.ts",
)
"""Files that are tests by the usual names. A folder `test` may be source code: Django's is."""

STARTUP = (
    "**/sitecustomize",
    "**/sitecustomize.*",
    "**/usercustomize",
    "**/usercustomize.*",
    "**/*.pth",
    "**/*.dist-info",
    "**/*.egg-info",
    "**/*.egg",
    "**/node_modules",
)
"""Files and folders, in lower case, that run code in every Python or that programs load libraries
and plugins from."""

_RUNNER_FILES = """conftest.py pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini tox.toml
    noxfile.py .coveragerc makefile gnumakefile justfile rakefile .rspec build.rs go.mod go.work
    .mocharc* .babelrc* .npmrc jest.config.* vitest.config.* vite.config.* babel.config.*
    ava.config.* playwright.config.* karma.conf.* .cargo/** .pytest_cache/**"""
RUNNER_FILES = tuple(f"**/{name}" for name in _RUNNER_FILES.split())
"""Files, in lower case, that test runners and build tools read by themselves: settings, plugins,
targets."""


_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/opt/")  # every runtime has them


def copy_content(source: Path, target: Path, *, any_links: bool = False) -> list[Path]:
    """Copy a folder without its git repositories.

    Return the folders with a `.git`, relative to `source`.

    Modes keep their permissions, without setuid and setgid. Symlinks stay symlinks, hard links
    become files of their own. Raises `InputError` for what a workspace cannot start with: FIFOs,
    sockets, devices, unreadable files, bare repositories, and symlinks to places outside the folder
    that are not system folders, unless `any_links` is true.
    """
    checkouts: list[Path] = []
    root = source.resolve()
    _copy_folder(root, target, root, any_links, checkouts)
    return checkouts


def _copy_folder(
    source: Path,
    target: Path,
    root: Path,
    any_links: bool,
    checkouts: list[Path],
) -> None:
    try:
        with os.scandir(source) as entries:
            names = {entry.name: entry for entry in entries}
        target.mkdir(parents=True, exist_ok=True)
        for name, entry in names.items():
            if name == ".git":
                checkouts.append(source.relative_to(root))
            elif entry.is_symlink():
                if not any_links:
                    _check_link(Path(entry.path), root)
                os.symlink(os.readlink(entry.path), target / name)
            elif entry.is_dir():
                _copy_folder(source / name, target / name, root, any_links, checkouts)
            elif entry.is_file():
                shutil.copy2(entry.path, target / name)
                (target / name).chmod(entry.stat().st_mode & 0o777)
            else:
                kind = _kind(entry.stat(follow_symlinks=False).st_mode)
                only = "a workspace starts with files, folders and symlinks only"
                raise InputError(f"{entry.path} is a {kind}: {only}")
        shutil.copystat(source, target)
        target.chmod(source.stat().st_mode & 0o777)
    except OSError as error:
        raise InputError(
            f"cannot copy {error.filename or source}: {error.strerror or error}",
        ) from error
    if ".git" not in names and is_bare(source):
        advice = "which shows later history: remove it from the workspace"
        raise InputError(f"{source} is a bare git repository, {advice}")


def is_bare(folder: Path) -> bool:
    """Return whether a folder is a bare git repository with objects."""
    objects = folder / "objects"
    if not (folder / "HEAD").is_file() or not (folder / "refs").is_dir() or not objects.is_dir():
        return False
    return any(objects.glob("[0-9a-f][0-9a-f]/*")) or any(objects.glob("pack/*.pack"))


def _check_link(link: Path, root: Path) -> None:
    """Raise `InputError` for a link out of `root`: by its text, or through other links."""
    target = os.readlink(link)
    if target.startswith(_SYSTEM):
        return
    place = os.path.normpath(link.parent.relative_to(root) / target)
    inside = Path(os.path.realpath(link)).is_relative_to(root)
    if not inside or place == ".." or place.startswith(("/", "../")):
        raise InputError(
            f"{link} is a symlink to {target}, outside the workspace: replace it by a copy",
        )


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "FIFO"
    return "socket" if stat.S_ISSOCK(mode) else "device"


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file or folder, in hexadecimal: of names, kinds, executable bits,
    contents, link texts.

    Of a git repository in it only the commit that is checked out counts. Raises `InputError` for
    what cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for name, file in _entries(path, ""):
            status = file.lstat()
            value = ""
            if stat.S_ISLNK(status.st_mode):
                kind = "link"
                value = os.readlink(file)
            elif file.name == ".git":
                kind = "git"
                value = head_commit(file.parent) or "unborn"
            elif stat.S_ISDIR(status.st_mode):
                kind = "folder"
            elif stat.S_ISREG(status.st_mode):
                kind = "program" if status.st_mode & 0o100 else "file"
                with file.open("rb") as content:
                    value = hashlib.file_digest(content, "sha256").hexdigest()
            else:
                kind = _kind(status.st_mode)
            for part in (name, kind, value):
                digest.update(os.fsencode(part) + b"\0")
    except OSError as error:
        raise InputError(
            f"cannot read {error.filename or path}: {error.strerror or error}",
        ) from error
    return digest.hexdigest()


def _entries(path: Path, name: str) -> Iterator[tuple[str, Path]]:
    yield name, path
    if path.is_dir() and not path.is_symlink() and path.name != ".git":
        for child in sorted(path.iterdir()):
            yield from _entries(child, f"{name}/{child.name}")
