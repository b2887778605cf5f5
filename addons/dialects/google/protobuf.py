"""Google's JSON: protobuf messages written as JSON, and schemas in the manner of OpenAPI."""

import re
from typing import Any

from rolltap.addons.dialects.types import DialectError

_SNAKE = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")
_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})


def message(value: Any, where: str) -> dict[str, Any]:
    """The fields of a message by their camelCase names, those that are null left out.

    Protobuf's JSON takes each field in camelCase and in snake_case. Raises `DialectError`.
    """
    if not isinstance(value, dict):
        raise DialectError(f"Invalid value at '{where}': it must be an object.")
    return {_camel(name): inner for name, inner in value.items() if inner is not None}


def repeated(value: Any, where: str) -> list[Any]:
    """The elements of a repeated field; Google takes a single element without its list. Raises `DialectError`."""
    if value is None:
        return []
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise DialectError(f"Invalid value at '{where}': it must be a list.")
    return value


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
        if keyword == "type":
            kinds = _types(value)
            if kinds is not None:
                converted["type"] = kinds
        elif keyword == "properties" and isinstance(value, dict):
            properties = {name: json_schema(inner) for name, inner in value.items()}
            converted["properties"] = _ordered(properties, ordering)
        elif keyword in ("items", "additionalProperties"):
            converted[keyword] = json_schema(value)
        elif keyword == "anyOf" and isinstance(value, list):
            converted["anyOf"] = [json_schema(inner) for inner in value]
        elif keyword in _COUNTS and isinstance(value, str) and value.isdecimal():
            converted[keyword] = int(value)
        elif (keyword, value) != ("format", "enum"):  # says only that `enum` is there
            converted[keyword] = value
    return _nullable(converted) if nullable else converted


def _types(value: Any) -> Any:
    if isinstance(value, list):
        return [kind.lower() for kind in value if isinstance(kind, str)]
    kind = value.lower() if isinstance(value, str) else None
    return kind if kind in _TYPES else None  # TYPE_UNSPECIFIED is no type


def _ordered(properties: dict[str, Any], ordering: Any) -> dict[str, Any]:
    names = [name for name in ordering if isinstance(name, str)] if isinstance(ordering, list) else []
    return {name: properties[name] for name in [*names, *properties] if name in properties}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return schema


def _camel(name: str) -> str:
    return _SNAKE.sub(lambda match: match[1].upper(), name)
