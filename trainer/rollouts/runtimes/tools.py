"""The files of this machine that a program needs in order to run where the rest is hidden."""

import os
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from rolltap.addons.errors import InputError

_SYSTEM = (Path("/usr"), Path("/bin"), Path("/sbin"), Path("/lib"), Path("/lib64"))
"""Folders that a box sees anyway."""
_SHEBANG_BYTES = 256
_ENVIRONMENT = ("pyvenv.cfg", "bin", "lib", "lib64", "include", "share", "etc")
"""Files and folders of a virtual environment: see venv and sysconfig."""


@lru_cache(maxsize=256)
def tool_folders(program: str, path: str) -> tuple[Path, ...]:
    """Return what of this machine `program` needs, as folders, files and symbolic links outside of the system's.

    `path` is the PATH that finds it. Known are virtual environments with their base Python, folders of Node packages,
    installations below one prefix (`bin` and `lib`), the interpreters that scripts name in their first line, and
    programs that are one file. Code that a program finds in another way is missing, for instance an editable install.
    Empty for a program that is not found.
    """
    found = shutil.which(program, path=path)
    if found is None:
        return ()
    needed: list[Path] = []
    start = Path(os.path.abspath(found))
    for file in dict.fromkeys([*_links(start), start.resolve()]):
        if file.is_relative_to("/usr") or file.parent in _SYSTEM:
            continue
        needed += _installation(file)
    needed += [part for name in _interpreter(start) for part in tool_folders(name, path)]
    return tuple(part for part in dict.fromkeys(needed) if not any(part.is_relative_to(top) for top in _SYSTEM))


def require_narrow(folder: Path, private: Path) -> None:
    """Raise `InputError` when a tool folder contains the folder `private`, or the user's home."""
    for inside in (private, Path.home()):
        if inside.resolve().is_relative_to(folder.resolve()):
            raise InputError(f"the tool folder {folder} contains {inside}: name the folders of the tools themselves")


def _links(path: Path) -> Iterator[Path]:
    """Yield a path and those that it leads to, link by link."""
    for _ in range(40):  # as many as the kernel follows
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent / path.readlink()))


def _installation(file: Path) -> list[Path]:
    """Return the smallest known installation that a program belongs to; the file alone where none is known."""
    parts = file.parts
    if "node_modules" in parts:
        return [Path(*parts[: parts.index("node_modules") + 1])]
    if parts[1] in ("opt", "nix") and len(parts) > 3:  # /opt/NAME, /nix/store
        return [Path(*parts[:3])]
    if file.parent.name == "shims":  # pyenv and its kind
        return [file.parent.parent]
    prefix = file.parent.parent
    if file.parent.name != "bin":
        return [file]
    libraries = [*prefix.glob("lib/python3*"), *prefix.glob("lib/node_modules")]
    if (prefix / "pyvenv.cfg").is_file():
        # not all of it: an environment may be made at the root of a project
        environment = [prefix / name for name in _ENVIRONMENT if (prefix / name).exists()]
        return [*environment, *_base_python(prefix / "pyvenv.cfg")]
    if not libraries:
        return [file]
    # programs of one user share ~/.local with other things
    personal = prefix == Path.home() or prefix.name == ".local"
    return [file, *libraries] if personal else [prefix]


def _base_python(settings: Path) -> list[Path]:
    """Return the installation of the Python that a virtual environment was made of."""
    for line in settings.read_text(errors="replace").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            base = Path(value.strip()) / "python3"
            return [part for file in dict.fromkeys([base, base.resolve()]) for part in _installation(file)]
    return []


def _interpreter(file: Path) -> list[str]:
    """Return the programs that the first line of a script names."""
    with file.open("rb") as script:
        first = script.read(_SHEBANG_BYTES).split(b"\n")[0].decode(errors="replace")
    if not first.startswith("#!"):
        return []
    words = first[2:].split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words[:1]
