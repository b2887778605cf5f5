"""Google's JSON: protobuf messages in their JSON encoding, and schemas in the style of OpenAPI."""

import re
from collections.abc import Iterable
from typing import Any

from rolltap.addons.dialects.fields import Fields, Wording
from rolltap.addons.dialects.json_values import Object

_SNAKE = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_COUNT = re.compile(r"\d{1,19}")


def camel_case_fields(values: Object) -> Object:
    """Return the fields of a protobuf message by their camelCase names, without null fields.

    Protobuf's JSON encoding accepts each field name in camelCase and in snake_case.
    """
    fields: Object = {}
    for name, value in values.items():
        if value is not None:
            fields[_camel(name)] = value
    return fields


def message_field(fields: Fields, key: str) -> Fields:
    """Return the fields of a protobuf message. An absent message has no fields.

    Raises `DialectError`.
    """
    message = fields.object(key, {})
    return fields.at(key, camel_case_fields(message))


def repeated_field(
    fields: Fields,
    key: str,
    start: int = 0,
) -> Iterable[Fields]:
    """Yield the messages of a repeated field from `start` on.

    It may be a single message without a list. Raises `DialectError`.
    """
    if fields.maybe(key, dict) is not None:
        yield message_field(fields, key)
        return
    for element in fields.objects(key, start=start):
        yield element.replaced(camel_case_fields(element.values))


def schema_field(
    fields: Fields,
    as_json: str,
    as_openapi: str,
) -> Object | None:
    """Return the JSON schema in the first field, else that of the `Schema` in the second."""
    if fields[as_json] is not None:
        return fields.maybe(as_json, dict)
    schema: Object | None = json_schema(fields.maybe(as_openapi, dict))
    return schema


def json_schema(schema: Any) -> Any:
    """Convert a `Schema` of the Gemini API to a JSON schema.

    A `Schema` has upper-case type names, `nullable` and `propertyOrdering`. Its counts may be
    strings, because protobuf's JSON encoding writes 64-bit integers so. Other keywords, and values
    that are not objects, are kept.
    """
    if not isinstance(schema, dict):
        return schema
    ordering = schema.get("propertyOrdering", schema.get("property_ordering"))
    nullable = schema.get("nullable") is True
    converted: Object = {}
    for name, value in schema.items():
        keyword = _camel(name)
        match keyword, value:
            case (("nullable" | "propertyOrdering"), _):
                pass
            case "type", list():
                converted["type"] = [kind.lower() for kind in value if isinstance(kind, str)]
            case "type", _:
                kind = str(value).lower()
                if kind in _TYPES:  # leaves out TYPE_UNSPECIFIED
                    converted["type"] = kind
            case "properties", dict():
                converted["properties"] = _properties(value, ordering)
            case (("items" | "additionalProperties"), _):
                converted[keyword] = json_schema(value)
            case "anyOf", list():
                converted["anyOf"] = [json_schema(inner) for inner in value]
            case "format", "enum":
                pass  # redundant: `enum` is present
            case _, str() if keyword.startswith(("min", "max")) and _COUNT.fullmatch(value):
                converted[keyword] = int(value)
            case _:
                converted[keyword] = value
    if nullable:
        _allow_null(converted)
    return converted


def _properties(properties: Object, ordering: Any) -> Object:
    """Convert the schemas of properties, and put those that `ordering` names first."""
    converted: Object = {}
    names = list(properties)
    if isinstance(ordering, list):
        names = [*ordering, *properties]
    for name in names:
        if isinstance(name, str) and name in properties and name not in converted:
            converted[name] = json_schema(properties[name])
    return converted


def _allow_null(schema: Object) -> None:
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]


def _camel(name: str) -> str:
    if "_" not in name:
        return name
    return _SNAKE.sub(_upper, name)


def _upper(match: re.Match[str]) -> str:
    return match[1].upper()


def _snake(name: str) -> str:
    return _CAMEL.sub(r"_\1", name).lower()


WORDING = Wording("Invalid value at '{place}': it must be {expected}.", name=_snake)
"""Google's errors name fields in snake_case, as protobuf does."""
