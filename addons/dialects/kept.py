"""The part of a conversation that a session stores: what the model sees of it, and what names it.

Items and contents are free JSON. A program may put a secret into any field, as it may into options: see `recordable`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rolltap.addons.dialects.fields import LONGEST_ID, LONGEST_NAME
from rolltap.addons.dialects.recordable import is_word, recordable, recordable_tools
from rolltap.addons.dialects.types import signed_call

Keep = Callable[[Any], Any]
"""A function from a value to what is stored of it. None stands for nothing."""
Shape = Mapping[str, "Keep | Shape"]
"""The fields of an object that are stored, each with its function or, for an object or a list of objects, its shape."""


def kept(value: Any, shape: Shape, fields: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Any:
    """Return what is stored of an object of this shape, or of a list of them. A text is stored as it is.

    `fields` brings the names of an object's fields to those of the shape.
    """
    if isinstance(value, list):
        return [kept(element, shape, fields) for element in value]
    if not isinstance(value, dict):
        return text(value)
    found = {key: _kept(inner, shape[key], fields) for key, inner in fields(value).items() if key in shape}
    return {key: inner for key, inner in found.items() if inner is not None}


def _kept(value: Any, how: Keep | Shape, fields: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    return how(value) if callable(how) else kept(value, how, fields)


def text(value: Any) -> str | None:
    """Store a text that the model sees."""
    return value if isinstance(value, str) else None


def label(value: Any) -> str | None:
    """Store a name, which the model sees or a program lists."""
    return value if isinstance(value, str) and len(value) <= LONGEST_NAME else None


def identifier(value: Any) -> str | None:
    """Store an id."""
    return value if isinstance(value, str) and len(value) <= LONGEST_ID else None


def word(value: Any) -> str | None:
    """Store a word of an API."""
    return value if isinstance(value, str) and is_word(value) else None


def flag(value: Any) -> bool | None:
    """Store a flag."""
    return value if isinstance(value, bool) else None


def fields_of_a_tool(value: Any) -> dict[str, Any] | None:
    """Store an object that the model sees: a schema, arguments, a result."""
    return value if isinstance(value, dict) else None


def own_signature(value: Any) -> str | None:
    """Store a signature that was issued here. Those of others may be as long as a reply."""
    return value if isinstance(value, str) and signed_call(value) is not None else None


def hosted_tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    """Return a hosted tool in its recordable form, or None for one that is too long for it."""
    (recorded,) = recordable_tools([tool])
    return recorded if isinstance(recorded, dict) else None


def labels(value: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of an object in its recordable form."""
    recorded = recordable({"metadata": value})["metadata"]
    return recorded if isinstance(recorded, dict) else {}
