"""TOML files as validated pydantic models."""

import reprlib
import tomllib
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from rolltap.addons.errors import InputError

Model = TypeVar("Model", bound=BaseModel)


def load_toml(file: Path | Traversable, kind: type[Model]) -> Model:
    """Read a TOML file into a model of type `kind`. Raises `InputError`, which names the file and each invalid key."""
    try:
        return kind.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        raise InputError(f"{file}: {describe(error)}") from error
    except ValueError as error:
        raise InputError(f"{file} is not TOML: {error}") from error


def describe(error: ValidationError) -> str:
    """Return a pydantic error as one line: each invalid key, its value, shortened, and what is wrong with it.

    Of a list with several invalid elements only the first is named: a list of token ids may have thousands.
    """
    faults: dict[str, str] = {}
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        match fault["type"]:
            case "extra_forbidden":
                what = f"unknown key {key!r}"
            case "missing":
                what = f"{key!r} is missing"
            case "json_invalid":
                what = fault["msg"]
            case "value_error" if not key:  # a check of several keys, which its message names
                what = fault["msg"].removeprefix("Value error, ")
            case _:
                what = f"{repr(key) if key else 'the line'} is {reprlib.repr(fault['input'])}: {fault['msg']}"
        faults.setdefault(".".join(part for part in fault["loc"] if isinstance(part, str)), what)
    return "; ".join(faults.values())
