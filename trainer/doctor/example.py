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
_DEEPEST = 16
"""References and nested values followed. Only a schema that has no finite value is deeper."""


def example(schema: Any, *, name: str = "", definitions: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
    """Return a small value of a JSON schema: only what is required, the first of several choices.

    `name` is the property that the value is for. `definitions` is the schema that local references (`#/...`) are
    resolved in; by default the schema itself. Patterns are not followed: a text that needs one may not match.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return WORD
    root = schema if definitions is None else definitions

    def within(part: Any, of: str = name) -> Any:
        return example(part, name=of, definitions=root, depth=depth + 1)

    for key in ("const", "default"):
        if schema.get(key) is not None:
            return schema[key]
    if choices := schema.get("enum"):
        return choices[0]
    if isinstance(reference := schema.get("$ref"), str):
        return within(_resolve(root, reference))
    for key in ("anyOf", "oneOf"):
        if choices := [choice for choice in schema.get(key) or () if _types(choice) != ["null"]]:
            return within({**schema, key: None, **choices[0]})
    if isinstance(parts := schema.get("allOf"), list) and parts:
        return within(_joined({**schema, "allOf": None}, parts, root))
    kind = next((kind for kind in _types(schema) if kind != "null"), "null")
    if kind == "object":
        properties = schema.get("properties") or {}
        return {key: within(properties.get(key), key) for key in schema.get("required") or ()}
    if kind == "array":
        return [within(schema.get("items"))] * int(schema.get("minItems") or 0)
    if kind in ("integer", "number"):
        return _number(schema, kind)
    return {"boolean": False, "null": None}.get(kind) if kind in ("boolean", "null") else _text(schema, name)


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
        if isinstance(bound := schema.get(key), int | float) and not isinstance(bound, bool):
            number = max(number, bound + step)
    for key, step in (("maximum", 0), ("exclusiveMaximum", 1)):
        if isinstance(bound := schema.get(key), int | float) and not isinstance(bound, bool):
            number = min(number, bound - step)
    return int(number) if kind == "integer" else number


def _text(schema: Mapping[str, Any], name: str) -> str:
    if text := _FORMATS.get(str(schema.get("format"))):
        return text
    text = "." if any(place in name.lower() for place in _PLACES) else WORD
    return text.ljust(int(schema.get("minLength") or 0), "o")[: int(schema.get("maxLength") or 10**9)]
