"""Dockerfiles whose effect is that of copying files: such an image needs no build."""

import json
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_NO_EFFECT = {"CMD", "EXPOSE", "LABEL", "MAINTAINER"}
"""Instructions without effect on files, folders and the environment of other commands."""
_PLAIN_SYSTEMS = {"alpine", "busybox", "debian", "python", "ubuntu"}


@dataclass(slots=True)
class Dockerfile:
    """Content of a Dockerfile.

    Attributes:
        base: Image of its FROM; None for `scratch`.
        workdir: Absolute path of its last WORKDIR; None without one.
        env: Its variables.
        files: Absolute path in the image -> file or folder of the build's folder. A folder's
            content is copied.
        unclear: First line that only a build can carry out, as `line N: TEXT`; None when the fields
            say it all.
    """

    base: str | None = None
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    unclear: str | None = None


def read_dockerfile(file: Path) -> Dockerfile:
    """Return what a Dockerfile says.

    With `unclear` the other fields are those of its other lines.
    """
    says = Dockerfile()
    if (file.parent / ".dockerignore").exists():
        says.unclear = "it has a .dockerignore"
    for number, line in _lines(file.read_text(encoding="utf-8")):
        if not _carry_out(line, says, file.parent):
            says.unclear = says.unclear or f"line {number}: {line[:100]}"
    return says


def is_plain_system(image: str) -> bool:
    """Return whether an image is an official one of an operating system or of Python, with nothing
    of a task."""
    name = image.removeprefix("docker.io/").removeprefix("library/")
    return re.split("[:@]", name)[0] in _PLAIN_SYSTEMS


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the instructions with the number of their first line, without comments, continued
    lines joined."""
    lines: list[tuple[int, str]] = []
    open_line: tuple[int, str] | None = None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("#") or (not line and open_line is None):
            continue
        first, before = open_line or (number, "")
        if line.endswith("\\"):
            open_line = (first, before + line[:-1] + " ")
        else:
            open_line = None
            lines.append((first, before + line))
    if open_line is not None:
        lines.append(open_line)
    return lines


def _carry_out(line: str, says: Dockerfile, folder: Path) -> bool:
    """Add an instruction to `says`. Return False when only a build can carry it out."""
    instruction, _, rest = line.partition(" ")
    instruction = instruction.upper()
    rest = rest.strip()
    if instruction in _NO_EFFECT:
        return True
    if "$" in rest or "<<" in rest:
        return False
    match instruction:
        case "FROM":
            is_first = says.base is None and says.workdir is None
            says.base = rest
            if rest == "scratch":
                says.base = None
            says.workdir = None
            return is_first and len(rest.split()) == 1
        case "WORKDIR":
            folder_name = rest.strip("\"'")
            says.workdir = posixpath.normpath(posixpath.join(says.workdir or "/", folder_name))
        case "ENV":
            return _set_env(rest, says)
        case "COPY":
            return _copy(rest, says, folder)
        case _:
            return False
    return True


def _set_env(rest: str, says: Dockerfile) -> bool:
    words = shlex.split(rest)
    if words and all("=" in word for word in words):
        for word in words:
            name, _, value = word.partition("=")
            says.env[name] = value
    elif len(words) >= 2:
        says.env[words[0]] = rest.split(None, 1)[1]
    else:
        return False
    return True


def _copy(rest: str, says: Dockerfile, folder: Path) -> bool:
    words = shlex.split(rest)
    if rest.startswith("["):
        words = json.loads(rest)
    if len(words) < 2:
        return False
    for word in words:
        if word.startswith("--") or set(word) & set("*?["):
            return False
    *sources, target = words
    into_folder = target.endswith(("/", ".")) or len(sources) > 1
    for name in sources:
        source = (folder / name.lstrip("/")).resolve()
        if not source.exists() or not source.is_relative_to(folder.resolve()):
            return False
        place = posixpath.normpath(posixpath.join(says.workdir or "/", target))
        if into_folder and source.is_file():
            place = posixpath.join(place, source.name)
        says.files[place] = source
    return True
