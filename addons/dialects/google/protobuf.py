"""Google's JSON: protobuf messages written as JSON, and schemas in the manner of OpenAPI."""

import re
from collections.abc import Iterable
from typing import Any

from rolltap.addons.dialects.fields import Fields, Wording

_SNAKE = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})


def named(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a message by their camelCase names, those that are null left out.

    Protobuf's JSON takes each field in camelCase and in snake_case.
    """
    return {_camel(name): value for name, value in values.items() if value is not None}


def message(fields: Fields, key: str) -> Fields:
    """The fields of a message by their camelCase names; none of a message that is not there. Raises `DialectError`."""
    return fields.at(key, named(fields.optional(key, Fields.object) or {}))


def repeated(fields: Fields, key: str) -> Iterable[Fields]:
    """The messages of a repeated field; Google takes a single one without its list. Raises `DialectError`."""
    if fields.maybe(key, dict) is not None:
        return [message(fields, key)]
    return (element.replaced(named(element.values)) for element in fields.objects(key))


def nests_deeper(value: Any, levels: int) -> bool:
    """Whether `value` has objects and lists within each other more than `levels` deep."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(nests_deeper(element, levels - 1) for element in inner)


def json_schema(schema: Any) -> Any:
    """A `Schema` of the Gemini API as a JSON schema.

    It differs in the type names (upper case), `nullable`, `propertyOrdering`, and counts that may be written as text,
    as protobuf's JSON writes 64-bit integers. What is not an object, and keywords that mean the same, stay.
    """
    if not isinstance(schema, dict):
        return schema
    converted: dict[str, Any] = {}
    source = {_camel(keyword): value for keyword, value in schema.items()}
    nullable = source.pop("nullable", None) is True
    ordering = source.pop("propertyOrdering", None)
    for keyword, value in source.items():
        match keyword, value:
            case "type", list():
                converted["type"] = [kind.lower() for kind in value if isinstance(kind, str)]
            case "type", _:
                if (kind := str(value).lower()) in _TYPES:  # TYPE_UNSPECIFIED is no type
                    converted["type"] = kind
            case "properties", dict():
                converted["properties"] = _ordered(
                    {name: json_schema(inner) for name, inner in value.items()}, ordering
                )
            case (("items" | "additionalProperties"), _):
                converted[keyword] = json_schema(value)
            case "anyOf", list():
                converted["anyOf"] = [json_schema(inner) for inner in value]
            case "format", "enum":
                pass  # says only that `enum` is there
            case _, str() if keyword in _COUNTS and value.isdecimal():
                converted[keyword] = int(value)
            case _:
                converted[keyword] = value
    return _nullable(converted) if nullable else converted


def _ordered(properties: dict[str, Any], ordering: Any) -> dict[str, Any]:
    names = [name for name in ordering if isinstance(name, str)] if isinstance(ordering, list) else []
    return {name: properties[name] for name in [*names, *properties] if name in properties}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    match schema.get("type"):
        case str(kind):
            schema["type"] = [kind, "null"]
    for keyword, null in (("enum", None), ("anyOf", {"type": "null"})):
        match schema.get(keyword):
            case list(kinds):
                schema[keyword] = [*kinds, null]
    return schema


def _camel(name: str) -> str:
    return _SNAKE.sub(lambda match: match[1].upper(), name) if "_" in name else name


def _snake(name: str) -> str:
    return _CAMEL.sub(r"_\1", name).lower()


WORDING = Wording("Invalid value at '{place}': it must be {what}.", name=_snake)
"""The places of Google's errors have protobuf's own names."""
