"""Shared by OpenAI's two APIs: how they refuse, and how they write texts and schemas."""

from collections.abc import Mapping
from typing import Any

from rolltap.addons.dialects.fields import Fields, Wording
from rolltap.addons.dialects.types import DialectError, dump_json

WORDING = Wording("'{place}' must be {what}.")


def encode_error(error: DialectError) -> bytes:
    """The body of an error reply."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return dump_json({"error": {"message": str(error), "type": kind, "param": None, "code": error.code}})


def content_text(fields: Fields, key: str, kinds: Mapping[str, str]) -> str:
    """The text of a content: none, a string, or parts of `kinds` (type -> the field that holds its text).

    Raises `DialectError`.
    """
    text = fields.maybe(key, str)
    if text is not None:
        return text
    return "".join(part_texts(fields, key, kinds, "a string or a list of parts"))


def part_texts(fields: Fields, key: str, kinds: Mapping[str, str], what: str = "a list of parts") -> list[str]:
    """The text of each part of a list. Raises `DialectError`."""
    texts = []
    for part in fields.objects(key, what):
        kind = part.text("type")
        if kind not in kinds:
            raise DialectError(f"'{part.place()}' has type {kind!r}; this model takes text only.")
        texts.append(part.text(kinds[kind]))
    return texts


def wanted_schema(form: Fields, described: Fields) -> dict[str, Any] | None:
    """The schema that the format of a reply asks for: None unless JSON, and `{}` where none is described."""
    return described.maybe("schema", dict) or {} if form["type"] in ("json_object", "json_schema") else None
