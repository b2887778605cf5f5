"""A value that a JSON schema describes: for the arguments of a tool, and for a reply that must match a schema."""

from collections.abc import Mapping
from typing import Any

WORD = "hello"
"""A text that a schema says nothing of."""
_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "uri": "https://example.org/",
    "url": "https://example.org/",
    "email": "nobody@example.org",
    "uuid": "00000000-0000-0000-0000-000000000000",
}
_PLACES = ("path", "file", "dir", "folder", "cwd")
"""Parts of the name of a property that is a place in the workspace."""
_LONGEST = 4096
"""Characters of a text that a schema wants longer."""
_MOST = 256
"""Items of a list that a schema wants longer; fewer of one within another value."""
_LARGEST = 10**15
_DEEPEST = 16
"""References and nested values followed. Only a schema that has no finite value is deeper."""


def example(schema: Any, *, name: str = "", definitions: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
    """Return a small value of a JSON schema: only what is required, the first of several choices.

    `name` is the property that the value is for. `definitions` is the schema that local references (`#/...`) are
    resolved in; by default the schema itself. Patterns are not followed: a text that needs one may not match.
    What is no schema is passed over, so that every JSON value has an example.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return WORD
    root = schema if definitions is None else definitions

    def within(part: Any, of: str = name) -> Any:
        return example(part, name=of, definitions=root, depth=depth + 1)

    for key in ("const", "default"):
        if schema.get(key) is not None:
            return schema[key]
    if choices := _list(schema.get("enum")):
        return choices[0]
    if isinstance(reference := schema.get("$ref"), str):
        return within(_resolve(root, reference))
    for key in ("anyOf", "oneOf"):
        if choices := [choice for choice in _list(schema.get(key)) if isinstance(choice, Mapping)]:
            chosen = next((choice for choice in choices if _types(choice) != ["null"]), choices[0])
            return within({**schema, key: None, **chosen})
    if parts := _list(schema.get("allOf")):
        return within(_joined({**schema, "allOf": None}, parts, root))
    kind = next((kind for kind in _types(schema) if kind != "null"), "null")
    if kind == "object":
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = [key for key in _list(schema.get("required")) if isinstance(key, str)]
        return {key: within(properties.get(key), key) for key in required}
    if kind == "array":
        return [within(schema.get("items"))] * min(_size(schema, "minItems", 0), max(1, _MOST >> 2 * depth))
    if kind in ("integer", "number"):
        return _number(schema, kind)
    return {"boolean": False, "null": None}.get(kind) if kind in ("boolean", "null") else _text(schema, name)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _size(schema: Mapping[str, Any], key: str, default: int) -> int:
    """Return a number of items or characters, or `default` when the schema has none there."""
    size = schema.get(key)
    return size if isinstance(size, int) and not isinstance(size, bool) and size >= 0 else default


def _types(schema: Any) -> list[str]:
    """Return the types that a schema allows, as upper or lower case names them. Guessed when it does not say."""
    said = schema.get("type") if isinstance(schema, Mapping) else None
    if said is not None:
        return [str(kind).lower() for kind in (said if isinstance(said, list) else [said])]
    if isinstance(schema, Mapping) and ("properties" in schema or "required" in schema):
        return ["object"]
    return ["array"] if isinstance(schema, Mapping) and "items" in schema else ["string"]


def _resolve(root: Any, reference: str) -> Any:
    """Return the part of a schema that a local reference names, or None."""
    found = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if step and isinstance(found, Mapping) else found
    return found


def _joined(schema: Mapping[str, Any], parts: list[Any], root: Any) -> dict[str, Any]:
    """Return one schema for a value that matches all `parts`: their properties together."""
    joined = dict(schema)
    for part in parts:
        part = _resolve(root, part["$ref"]) if isinstance(part, Mapping) and "$ref" in part else part
        for key, value in (part if isinstance(part, Mapping) else {}).items():
            known = joined.get(key)
            if isinstance(value, Mapping) and isinstance(known, Mapping):
                joined[key] = {**known, **value}
            elif isinstance(value, list) and isinstance(known, list):
                joined[key] = [*known, *value]
            else:
                joined[key] = value
    return joined


def _number(schema: Mapping[str, Any], kind: str) -> int | float:
    """Return the number next to 1 within the bounds of a schema."""
    number: int | float = 1
    for key, step in (("minimum", 0), ("exclusiveMinimum", 1)):
        if (bound := _bound(schema, key)) is not None:
            number = max(number, bound + step)
    for key, step in (("maximum", 0), ("exclusiveMaximum", 1)):
        if (bound := _bound(schema, key)) is not None:
            number = min(number, bound - step)
    return int(number) if kind == "integer" else number


def _bound(schema: Mapping[str, Any], key: str) -> int | float | None:
    bound = schema.get(key)
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        return None
    return bound if -_LARGEST < bound < _LARGEST else None


def _text(schema: Mapping[str, Any], name: str) -> str:
    if text := _FORMATS.get(str(schema.get("format"))):
        return text
    text = "." if any(place in name.lower() for place in _PLACES) else WORD
    return text.ljust(min(_size(schema, "minLength", 0), _LONGEST), "o")[: _size(schema, "maxLength", _LONGEST)]
