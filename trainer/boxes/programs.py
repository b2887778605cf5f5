"""The files of this machine that a program needs in order to run where the rest is hidden."""

import os
import shutil
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

SYSTEM = tuple(
    Path("/", name) for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
)
"""Folders that a sandbox shows, but for what is hidden in them."""
_OF_MANY = frozenset(
    {"", "usr", "local", "lib", "lib32", "lib64", "libexec", "share", "src", "games"}
)
"""Names of folders of the system in which others have theirs."""
_SHEBANG_BYTES = 256
_ENVIRONMENT = ("pyvenv.cfg", "bin", "lib/python3*", "lib/node_modules", "lib64")
"""Files and folders of a virtual environment: not all of it, for it may be made at the root of a
project."""
_PREFIX = ("bin", "lib", "lib64", "libexec", "share", "ssl", "opt", "Cellar")
"""Folders of an installation below one prefix, of conda, Homebrew and others too."""
_SHIMS = (*_PREFIX, "shims", "versions", "version", "installs", "plugins", "pyenv.d")
"""Files and folders of pyenv and its kind."""


@lru_cache(maxsize=256)
def tool_folders(program: str, path: str) -> tuple[Path, ...]:
    """Return what of this machine `program` needs, as folders, files and symbolic links.

    `path` is the PATH that finds it. Known are virtual environments with their base Python, folders
    of Node packages, installations below one prefix (`bin` and `lib`), the interpreters that
    scripts name in their first line, and programs that are one file. Code that a program finds in
    another way is missing, for instance an editable install. Empty for a program of the system that
    is in no environment, and for one that is not found by an absolute path.
    """
    found = shutil.which(program, path=path)
    if found is None or not os.path.isabs(found):
        return ()
    start = Path(os.path.abspath(found))
    needed: list[Path] = []
    for file in (*_links(start), start.resolve()):
        needed += _installation(file)
    interpreter = _interpreter(start)
    if interpreter is not None:
        needed += tool_folders(interpreter, path)
    return tuple(dict.fromkeys(needed))


def projects_around(tools: Iterable[Path]) -> list[Path]:
    """Return the folders of the system that surround the environments among tools: no program's,
    but a project's."""
    around = []
    for tool in tools:
        if tool.name == "pyvenv.cfg" and _is_of_system(tool):
            own = [folder for folder in tool.parents if folder.name not in _OF_MANY]
            around += own[-1:]
    return around


def _is_of_system(path: Path) -> bool:
    return any(path.is_relative_to(top) for top in SYSTEM)


def _links(path: Path) -> Iterator[Path]:
    """Yield a path and those that it leads to, link by link."""
    for _ in range(40):  # as many as the kernel follows
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent / path.readlink()))


def _installation(file: Path) -> list[Path]:
    """Return the smallest known installation of a program: its own entries, as the folder around
    may be a project's."""
    parts = file.parts
    folder = file.parent
    prefix = folder.parent
    settings = prefix / "pyvenv.cfg"
    if folder.name == "bin" and settings.is_file():
        return [*_entries(prefix, _ENVIRONMENT), *_base_python(settings)]
    if _is_of_system(file):
        return []
    if "node_modules" in parts:
        depth = parts.index("node_modules")
        return [Path(*parts[: depth + 1])]
    if parts[1] == "nix" and len(parts) > 4:  # /nix/store/NAME
        return [Path(*parts[:3])]
    if folder.name == "shims" and _entries(prefix, ("versions", "installs")):
        return _entries(prefix, _SHIMS)
    libraries = _entries(prefix, ("lib/python3*", "lib/node_modules"))
    if folder.name != "bin" or not (libraries or parts[1] == "opt"):
        return [file]
    if prefix == Path.home() or prefix.name == ".local":
        # programs of one user share the folder with other things
        return [file, *libraries]
    return _entries(prefix, _PREFIX)


def _entries(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        found += folder.glob(pattern)
    return found


def _base_python(settings: Path) -> list[Path]:
    """Return the installation of the Python that a virtual environment was made of."""
    for line in settings.read_text(errors="replace").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            base = Path(value.strip(), "python3")
            return [*_installation(base), *_installation(base.resolve())]
    return []


def _interpreter(file: Path) -> str | None:
    """Return the program that the first line of a script names."""
    with file.open("rb") as script:
        first = script.read(_SHEBANG_BYTES).split(b"\n")[0].decode(errors="replace")
    if not first.startswith("#!"):
        return None
    words = first[2:].split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return next(iter(words), None)
