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
        if fault["type"] == "default_factory_not_called":  # another key is invalid
            continue
        path = _path(fault["loc"], unions)
        names = [part for part in path if isinstance(part, str)]
        found.setdefault(".".join(names), _describe_fault(fault, path, unions))
    return "; ".join(found.values())


def _describe_fault(
    fault: Any, path: Sequence[str | int], unions: Mapping[str, Sequence[str]]
) -> str:
    key = ".".join(map(str, path))
    why = fault["msg"].removeprefix("Value error, ")
    match fault["type"]:
        case "extra_forbidden":
            return f"unknown key {key!r}"
        case "missing":
            return f"{key!r} is missing"
        case "union_tag_invalid" | "union_tag_not_found":
            given = fault.get("ctx", {}).get("tag")
            kinds: Sequence[str] = ()
            tag = "kind"
            if path:
                kinds = unions.get(str(path[-1]), ())
                tag = f"{key}.kind"
            how = "is missing"
            if given is not None:
                how = f"is {reprlib.repr(given)}"
            return f"{tag!r} {how}: write one of {', '.join(kinds)}"
        case "json_invalid":
            return str(fault["msg"])
        case "value_error" if not key:  # a check of several keys, which its message names
            return str(why)
    where = repr(key) if key else "the line"
    return f"{where} is {reprlib.repr(fault['input'])}: {why}"


def _path(places: Sequence[str | int], unions: Mapping[str, Sequence[str]]) -> list[str | int]:
    """Return the keys that lead to a fault. pydantic puts the name of the model after the key of a
    union."""
    path: list[str | int] = []
    models: Sequence[str] = ()
    """Models of the union whose key came before."""
    for place in places:
        if place in models:
            models = ()
            continue
        path.append(place)
        models = unions.get(str(place), ())
    return path
