"""OpenAI's two APIs share their errors, the parts of a content, and the formats of replies."""

from collections.abc import Collection, Iterable

from rolltap.addons.dialects.call import DialectError, Part
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.fields import Fields, Wording
from rolltap.addons.dialects.json_values import Object, described, dump_json

WORDING = Wording("'{place}' must be {expected}.")

_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""Type of a part that is a text, in either API -> the field that has it."""
_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "file": "file",
    "input_file": "file",
    "input_audio": "audio",
    "video_url": "video",
}
"""Type of a part that is no text -> a word for it. The last is an extension of vLLM and others."""


class OpenAIDialect(Dialect):
    """An API of OpenAI's."""

    def encode_error(self, error: DialectError) -> bytes:
        return dump_json(error_body(error, error.code))


def error_body(error: DialectError, code: str | int) -> Object:
    """Return the body of an error reply."""
    kind = "invalid_request_error"
    if error.code == "insufficient_quota":
        kind = error.code  # LiteLLM retries an error of the type invalid_request_error
    elif error.status >= 500:
        kind = "server_error"
    body = {
        "message": str(error),
        "type": kind,
        "param": None,
        "code": code,
    }
    return {"error": body}


def read_content(fields: Fields, key: str, element: Part) -> str:
    """Return the text of a content: absent, a string, or a list of parts (see `read_texts`)."""
    content = fields.values.get(key)
    if isinstance(content, str):
        return content
    return "".join(read_texts(fields, key, element, "a string or a list of parts"))


def read_texts(
    fields: Fields,
    key: str,
    element: Part,
    expected: str = "a list of parts",
) -> list[str]:
    """Return the text of each part of a list. Images, audio and files have a text in their place.

    They are counted in `element.hidden_parts`. Raises `DialectError` for other parts.
    """
    texts = []
    for part in fields.objects(key, expected):
        kind = part.text("type")
        if kind in _MEDIA:
            source = part.inner(kind).values or part.values  # the former in Chat Completions
            declared = source.get("url") or source.get("image_url") or source.get("file_data")
            if kind == "input_audio":
                declared = f"audio/{source.get('format')}"
            texts.append(element.hide(declared, _MEDIA[kind]))
        elif kind in _TEXT_KEYS:
            texts.append(part.text(_TEXT_KEYS[kind]))
        else:
            why = f"has type {described(kind)}; this model takes text only"
            raise DialectError(f"'{part.place()}' {why}.")
    return texts


def refuse_unsupported(
    fields: Fields,
    keys: Iterable[str],
    instead: str = "",
) -> None:
    """Raise `DialectError` for the first of these fields that is neither absent nor empty.

    They change the kind of the reply, so a reply without them would be wrong. `instead` is a
    sentence about the remedy.
    """
    for key in keys:
        if fields.values.get(key):
            parameter = f"Unsupported parameter: '{fields.place(key)}'"
            why = f"{parameter} is not supported with this model. {instead}".strip()
            raise DialectError(why, code="unsupported_parameter")


def require_offered(choice: Fields, offered: Collection[str]) -> None:
    """Raise `DialectError` for a `tool_choice` that names a tool which is not `offered`."""
    if not choice.values:
        return
    choices = [_flat(choice)]
    if choices[0]["type"] == "allowed_tools":
        choices = [_flat(tool) for tool in choices[0].objects("tools")]
    for tool in choices:
        name = tool.maybe("name", str)
        if tool["type"] not in ("function", "custom") or name is None:
            continue
        if name not in offered:
            raise DialectError(f"Tool choice {described(name)} not found in 'tools' parameter.")


def _flat(tool: Fields) -> Fields:
    """Return a tool with its fields beside its type. In Chat Completions they are below it."""
    kind = tool.maybe("type", str) or ""
    return tool.replaced({**tool.values, **tool.inner(kind).values})


def wanted_schema(form: Fields, holder: Fields) -> Object | None:
    """Return the JSON schema of a reply format, which is in the field `schema` of `holder`.

    Returns None when the format is not JSON, `{}` when it has no schema.
    """
    if form["type"] not in ("json_object", "json_schema"):
        return None
    return holder.maybe("schema", dict) or {}
