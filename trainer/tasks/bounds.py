"""Bounded numbers and texts of a task: what a machine can hold, what a program can be given, and
the names that it may have and reach."""

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from rolltap.addons.hosts import read_patterns

ARGUMENT_BYTES = 131_072
"""Size of one argument or variable of a program on Linux, with the NUL at its end (MAX_ARG_STRLEN,
execve(2))."""
COMMAND_BYTES = 1 << 20
"""Size of a command, and of all variables: half of what Linux takes for both together."""

Seconds = Annotated[
    float,
    Field(
        strict=True,
        gt=0,
        le=1e8,
        allow_inf_nan=False,
    ),
]
"""A time limit of at most three years."""
Cores = Annotated[
    float,
    Field(
        strict=True,
        ge=0.01,
        le=65_536,
        allow_inf_nan=False,
    ),
]
Gibibytes = Annotated[
    float,
    Field(
        strict=True,
        ge=1 / 1024,
        le=1 << 20,
        allow_inf_nan=False,
    ),
]
"""A size from a mebibyte, because an engine takes 0 for no limit, to a pebibyte."""
Processes = Annotated[int, Field(strict=True, ge=1, le=1 << 22)]
"""A number of processes, at most the kernel's own limit."""
Weight = Annotated[
    float,
    Field(
        strict=True,
        ge=1e-6,
        le=1e6,
        allow_inf_nan=False,
    ),
]


def plain_text(text: str) -> str:
    """Return a text that a program can be given. Raises `ValueError`."""
    if "\0" in text:
        raise ValueError("it has a NUL character, which no program can be given: remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "it has half of a surrogate pair, which is no character: remove it",
        ) from error
    return text


def _argument(text: str) -> str:
    size = len(plain_text(text).encode()) + 1
    if size > ARGUMENT_BYTES:
        raise ValueError(
            f"it has {size:,} bytes, and Linux takes {ARGUMENT_BYTES:,}: lay it into a file",
        )
    return text


def _command(arguments: list[str]) -> list[str]:
    size = sum(len(argument.encode()) + 9 for argument in arguments)  # with its NUL, and a pointer
    if size > COMMAND_BYTES:
        raise ValueError(
            f"it has {size:,} bytes, at most {COMMAND_BYTES:,} can be given: lay them into files",
        )
    return arguments


def _list_of_words(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        words = shlex.split(given)
    except ValueError:
        words = ["sh", "-c", given]
    raise ValueError(f"give a list of words: {json.dumps(words)}")


def _variables(variables: dict[str, str]) -> dict[str, str]:
    assigned = [_argument(f"{name}={value}") for name, value in variables.items()]
    _command(assigned)
    return variables


_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]+")


def _plain_id(name: str) -> str:
    if _NOT_IN_IDS.search(name) or not name.strip("."):
        advice = "use letters, digits, dot, dash and underscore, and not dots alone"
        example = _NOT_IN_IDS.sub("-", name).strip(".-")
        raise ValueError(f"{advice}: {example!r}" if example else advice)
    return name


def _inside(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts or ".git" in Path(name).parts:
        raise ValueError("give a path inside the workspace, relative to it")
    return name


def _host(text: str) -> str:
    read_patterns(text)
    return text


Text = Annotated[str, AfterValidator(plain_text)]
PlainId = Annotated[str, AfterValidator(_plain_id)]
"""A name that is a part of file names: letters, digits, dot, dash and underscore."""
PathInside = Annotated[str, AfterValidator(_inside)]
"""A path in the workspace, relative to it."""
Host = Annotated[str, Field(max_length=300), AfterValidator(_host)]
"""A host or a pattern of hosts, with or without a port, as `rolltap_allow` takes it."""
Hosts = Annotated[list[Host], Field(max_length=1000)]
Command = Annotated[
    list[Annotated[str, AfterValidator(_argument)]],
    BeforeValidator(_list_of_words),
    AfterValidator(_command),
]
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]
Variables = Annotated[dict[_Variable, str], AfterValidator(_variables)]
"""Environment variables. A name begins with a letter: programs take other ones for something
else."""
