"""Google's JSON: protobuf messages in their JSON encoding, and schemas in the style of OpenAPI."""

import re
from collections.abc import Iterable
from typing import Any

from rolltap.addons.dialects.fields import Fields, Wording

_SNAKE = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})


def camel_case_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a protobuf message by their camelCase names, without null fields.

    Protobuf's JSON encoding accepts each field name in camelCase and in snake_case.
    """
    return {_camel(name): value for name, value in values.items() if value is not None}


def message_field(fields: Fields, key: str) -> Fields:
    """Return the fields of a protobuf message. An absent message has no fields. Raises `DialectError`."""
    return fields.at(key, camel_case_fields(fields.optional(key, Fields.object) or {}))


def repeated_field(fields: Fields, key: str) -> Iterable[Fields]:
    """Return the messages of a repeated field, which may be a single message without a list. Raises `DialectError`."""
    if fields.maybe(key, dict) is not None:
        return [message_field(fields, key)]
    return (element.replaced(camel_case_fields(element.values)) for element in fields.objects(key))


def json_schema(schema: Any) -> Any:
    """Convert a `Schema` of the Gemini API to a JSON schema.

    A `Schema` has upper-case type names, `nullable` and `propertyOrdering`. Its counts may be strings, because
    protobuf's JSON encoding writes 64-bit integers so. Other keywords, and values that are not objects, are kept.
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
                if (kind := str(value).lower()) in _TYPES:  # leaves out TYPE_UNSPECIFIED
                    converted["type"] = kind
            case "properties", dict():
                first = [name for name in ordering if isinstance(name, str)] if isinstance(ordering, list) else []
                names = dict.fromkeys(name for name in (*first, *value) if name in value)
                converted[keyword] = {name: json_schema(value[name]) for name in names}
            case (("items" | "additionalProperties"), _):
                converted[keyword] = json_schema(value)
            case "anyOf", list():
                converted["anyOf"] = [json_schema(inner) for inner in value]
            case "format", "enum":
                pass  # redundant: `enum` is present
            case _, str() if keyword in _COUNTS and value.isdecimal():
                converted[keyword] = int(value)
            case _:
                converted[keyword] = value
    return _nullable(converted) if nullable else converted


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


WORDING = Wording("Invalid value at '{place}': it must be {expected}.", name=_snake)
"""Google's errors name fields in snake_case, as protobuf does."""
