"""TOML files as validated pydantic models."""

import json
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rolltap.addons.errors import InputError

Model = TypeVar("Model", bound=BaseModel)


def load_toml(file: Path | Traversable, kind: type[Model]) -> Model:
    """Read a TOML file into a model of type `kind`. Raises `InputError`, which names the file and
    each invalid key.

    A number in quotes is no number. Texts are paths and arrays are tuples, as in pydantic's strict
    reading of JSON.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        return kind.model_validate_json(json.dumps(values, default=str), strict=True)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        raise InputError(f"{file}: {describe(error)}") from error
    except ValueError as error:
        raise InputError(f"{file} is not TOML: {error}") from error


def describe(
    error: ValidationError, unions: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> str:
    """Return a pydantic error as one line, as `describe_faults`."""
    return describe_faults(error.errors(), unions)


def describe_faults(
    faults: Sequence[Any], unions: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> str:
    """Return pydantic's faults as one line: each invalid key, its value, shortened, and what is
    wrong with it.

    Of a list with several invalid elements only the first is named: a list of token ids may have
    thousands. `unions` are keys whose value is one of several models, with the names of these: the
    values of their key `kind`.
    """
    found: dict[str, str] = {}
    for fault in faults:
        path = _path(fault["loc"], unions)
        key = ".".join(map(str, path))
        match fault["type"]:
            case "extra_forbidden":
                what = f"unknown key {key!r}"
            case "missing":
                what = f"{key!r} is missing"
            case "union_tag_invalid" | "union_tag_not_found":
                given = fault.get("ctx", {}).get("tag")
                how = "is missing" if given is None else f"is {reprlib.repr(given)}"
                tag = f"{key}.kind" if key else "kind"
                what = (
                    f"{tag!r} {how}: write one of"
                    f" {', '.join(unions.get(str(path[-1]) if path else '', ()))}"
                )
            case "default_factory_not_called":  # another key is invalid
                continue
            case "json_invalid":
                what = fault["msg"]
            case "value_error" if not key:  # a check of several keys, which its message names
                what = fault["msg"].removeprefix("Value error, ")
            case _:
                why = fault["msg"].removeprefix("Value error, ")
                what = (
                    f"{repr(key) if key else 'the line'} is {reprlib.repr(fault['input'])}: {why}"
                )
        found.setdefault(".".join(part for part in path if isinstance(part, str)), what)
    return "; ".join(found.values())


def _path(places: Sequence[str | int], unions: Mapping[str, Sequence[str]]) -> list[str | int]:
    """Return the keys that lead to a fault. pydantic puts the name of the model after the key of a
    union."""
    path: list[str | int] = []
    previous: str | int | None = None
    for place in places:
        if not (previous in unions and place in unions[str(previous)]):
            path.append(place)
        previous = None if previous in unions else place
    return path
