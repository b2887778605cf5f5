"""Functions that OpenAI's two APIs share: errors, content as text, and reply formats."""

from collections.abc import Collection, Iterable
from typing import Any

from rolltap.addons.dialects.call import DialectError, Part, dump_json
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.fields import Fields, Wording
from rolltap.addons.dialects.json_values import described
from rolltap.addons.dialects.media import placeholder

WORDING = Wording("'{place}' must be {expected}.")

_KINDS = {
    **dict.fromkeys(("image_url", "input_image"), "image"),
    **dict.fromkeys(("file", "input_file"), "file"),
    "input_audio": "audio",
    "video_url": "video",
}
"""Type of a part that is no text -> a word for it. The last one is an extension of vLLM and others."""


class OpenAIDialect(Dialect):
    """An API of OpenAI's."""

    def encode_error(self, error: DialectError) -> bytes:
        return dump_json(error_body(error, error.code))


def error_body(error: DialectError, code: str | int) -> dict[str, Any]:
    """Return the body of an error reply."""
    kind = "invalid_request_error"
    if error.code == "insufficient_quota":
        kind = error.code  # LiteLLM retries an error of the type invalid_request_error
    elif error.status >= 500:
        kind = "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


def _text_for(part: dict[str, Any]) -> str | None:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        return None
    inner = part.get(kind)
    source = inner if isinstance(inner, dict) else part
    if kind == "input_audio":
        return placeholder(f"audio/{source.get('format')}", "audio")
    data = next((source[key] for key in ("url", "image_url", "file_data") if source.get(key)), None)
    return placeholder(data, _KINDS[kind])


_TEXT_KEYS = {
    **dict.fromkeys(("text", "input_text", "output_text", "summary_text"), "text"),
    "refusal": "refusal",
}
"""Type of a part that is a text -> the field that has it, for both APIs."""


def read_content(fields: Fields, key: str, element: Part) -> str:
    """Return the text of a content, which is absent, a string, or a list of parts: see `read_texts`."""
    text = fields.maybe(key, str)
    if text is not None:
        return text
    return "".join(read_texts(fields, key, element, "a string or a list of parts"))


def read_texts(fields: Fields, key: str, element: Part, expected: str = "a list of parts") -> list[str]:
    """Return the text of each part of a list. Images, audio and files have a text in their place.

    They are counted in `element.hidden`. Raises `DialectError` for other parts.
    """
    texts = []
    for part in fields.objects(key, expected):
        kind = part.text("type")
        hidden = _text_for(part.values)
        if hidden is not None:
            element.hidden += 1
            texts.append(hidden)
        elif kind in _TEXT_KEYS:
            texts.append(part.text(_TEXT_KEYS[kind]))
        else:
            why = f"'{part.place()}' has type {described(kind)}; this model takes text only."
            raise DialectError(why)
    return texts


def refuse_unsupported(fields: Fields, keys: Iterable[str], instead: str = "") -> None:
    """Raise `DialectError`, in OpenAI's words, for the first of these fields that is neither absent nor empty.

    They change what a reply is, so a reply without them would be wrong. `instead` is a sentence that says what to do.
    """
    for key in keys:
        if fields[key]:
            why = f"Unsupported parameter: '{fields.place(key)}' is not supported with this model. {instead}".strip()
            raise DialectError(why, code="unsupported_parameter")


def require_offered(choice: Fields, offered: Collection[str]) -> None:
    """Raise `DialectError` for a `tool_choice` that names a tool which is not `offered`."""

    def of_type(tool: Fields) -> tuple[str, Fields]:
        kind = tool.maybe("type", str) or ""
        return kind, tool.inner(kind) if kind in tool.values else tool  # the former in Chat Completions

    chosen = of_type(choice)
    named = map(of_type, chosen[1].objects("tools")) if chosen[0] == "allowed_tools" else [chosen]
    for kind, tool in named:
        name = tool.maybe("name", str)
        if kind in ("function", "custom") and name is not None and name not in offered:
            raise DialectError(f"Tool choice {described(name)} not found in 'tools' parameter.")


def wanted_schema(form: Fields, described: Fields) -> dict[str, Any] | None:
    """Return the JSON schema of a reply format: None when the format is not JSON, `{}` when it has no schema."""
    return described.maybe("schema", dict) or {} if form["type"] in ("json_object", "json_schema") else None
