"""JSON of requests and replies: its bounds, its text, and the part that a run folder may hold.

A few compressed bytes can be millions of values, in one call of C.

Options are free JSON. A harness may put a secret or a personal text anywhere in them, for instance
the `authorization` of an MCP server. Numbers, flags and short words are recorded.
"""

import json
import math
import re
from collections.abc import Collection
from functools import partial
from typing import Any

MOST_VALUES = 500_000
"""Maximum number of values of a JSON text, about. They take 0.1 s and 60 MB; the largest requests
of harnesses have some 10,000. Each value that is not the first follows one of `_BEFORE_A_VALUE`."""
MOST_WITHIN = 4_000_000
"""The same for a body and the JSON within its texts, such as arguments, together. Prose has a comma
in 20 bytes or more, so this refuses texts only that no context window holds."""
MOST_LEVELS = 100
"""Maximum number of levels in the JSON within a text. Chat templates and renderers recurse."""
MOST_LEVELS_OF_A_BODY = 128
"""The same for a body. It is more: bodies repeat the arguments of calls, which were sampled as
text, as objects."""

_BEFORE_A_VALUE = b"[{,:"

Object = dict[str, Any]
"""A JSON object."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile(
    r"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])", re.DOTALL
)
"""An escape of half a character, in a JSON text without escaped backslashes."""


class TooManyValues(ValueError):
    """A JSON text that would become too many values."""


def nests_deeper(value: Any, levels: int) -> bool:
    """Return True when objects and lists in `value` are nested more than `levels` deep."""
    level = [value]
    for _ in range(levels):
        level = _values_within(level)
        if not level:
            return False
    return any(isinstance(inner, dict | list) for inner in level)


def _values_within(outer: list[Any]) -> list[Any]:
    within: list[Any] = []
    for value in outer:
        if isinstance(value, dict):
            within += value.values()
        elif isinstance(value, list):
            within += value
    return within


def check_values(text: bytes) -> None:
    """Raise `TooManyValues` for a JSON text of more than `MOST_VALUES` values.

    With those in texts it may have `MOST_WITHIN`.
    Most requests have fewer bytes than that, and cost nothing.
    """
    if len(text) <= MOST_VALUES:
        return
    within = count_marks(text)
    if within > MOST_VALUES and _outside_of_texts(text) > MOST_VALUES:
        raise TooManyValues(f"it has more than {MOST_VALUES:,} values")
    # an escape such as \u002c hides a comma of the JSON within a text
    if len(text) > MOST_WITHIN and within + text.count(b"\\u00") > MOST_WITHIN:
        raise TooManyValues(f"it has more than {MOST_VALUES:,} values")


def count_marks(text: bytes) -> int:
    """Return about the number of values of a JSON text, and of the JSON within its texts."""
    return len(text) - len(text.translate(None, _BEFORE_A_VALUE))


def _outside_of_texts(text: bytes) -> int:
    """Return the number of marks outside of texts.

    Texts of which each could be a value are taken apart; more of them have too many marks anyway.
    """
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    pieces = plain.split(b'"', 2 * MOST_VALUES + 4)
    return count_marks(b"".join(pieces[::2]))


def _number(kind: type[float], text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is a number that JSON does not have")
    return kind(text)


_REAL = partial(_number, float)
JSON = json.JSONDecoder(parse_int=partial(_number, int), parse_float=_REAL, parse_constant=_REAL)
"""NaN, Infinity and numbers beyond the doubles are no JSON, unlike in Python: a run that holds one
has columns that others cannot read."""


def parse_json(text: str | bytes, most_levels: int = MOST_LEVELS) -> Any:
    """Return the value of a JSON text, which may be UTF-8, with all strings `well_formed`.

    Raises `ValueError`, `TooManyValues` (a kind of it) and `RecursionError`.
    """
    if isinstance(text, str):
        check_values(text.encode("utf-8", "surrogatepass"))
    else:
        check_values(text)
        text = text.decode()
    return bounded_value(JSON.decode(text), text, most_levels)


def bounded_value(value: Any, text: str, most_levels: int) -> Any:
    """Return the value that was parsed from `text`, with all strings `well_formed`.

    Raises `ValueError` when it is nested deeper.
    """
    if nests_deeper(value, most_levels):
        raise ValueError(f"it is nested more than {most_levels} levels deep")
    # `json.dumps` writes each emoji as a pair
    if _SURROGATE.search(text) and _LONE_SURROGATE.search(text.replace(r"\\", "  ")):
        written = json.dumps(value, ensure_ascii=False)
        return json.loads(well_formed(written))
    return value


def parse_arguments(text: str, most_levels: int = MOST_LEVELS) -> Any:
    """Return the value of arguments in JSON, or `text` unchanged if that is refused."""
    try:
        return parse_json(text, most_levels)
    except (ValueError, RecursionError):
        return text


def javascript_number(value: float) -> float:
    """Return `value` rounded to a double, JavaScript's only number type.

    An integral value is an int. An int outside the range of doubles is returned unchanged.
    """
    try:
        value = float(value)
        return int(value) if value.is_integer() else value
    except OverflowError:
        return value


def well_formed(text: str) -> str:
    """Return `text` with each lone surrogate replaced by U+FFFD.

    JavaScript harnesses send lone surrogates when they cut a text inside a character. They cannot
    be encoded as UTF-8, which tokenizers and Arrow strings require.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def dump_json(value: Any) -> bytes:
    """Return `value` as compact JSON in UTF-8, with `?` for each lone surrogate."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


_WORD = re.compile(r"[\w.:/+-]{0,32}", re.ASCII)
"""Names of an API, for instance `web_search_20250305`.

Keys and tokens that services issue are longer.
"""
_LONGEST = 4096
"""Characters of an option as JSON."""
_DEEPEST = 8
_MOST_TOOLS = 64
_APPLIED = frozenset({"schema", "responseSchema", "responseJsonSchema"})
"""Options with a JSON schema. One that is applied is recorded with the applied parameters."""
_TOOL_KEYS = ("type", "name", "server_label")
"""Fields of a hosted tool that hold no secret. Others may be keys, headers and addresses."""


def recordable(options: Object, names: Collection[str] = ()) -> Object:
    """Return options of a request as they are recorded. `names` may be recorded: the tools' names.

    Other texts than short words become their number of characters, as does an option of more than
    `_LONGEST`. JSON schemas are left out.
    """
    recorded: Object = {}
    for key, value in _cleaned(options, names).items():
        length = len(json.dumps(value))
        recorded[key] = value if length <= _LONGEST else f"({length} characters)"
    return recorded


def recordable_tools(tools: list[Object]) -> list[Any]:
    """Return hosted tools as they are recorded: by type and name.

    Of more than `_MOST_TOOLS` tools, the others become their number.
    """
    recorded: list[Any] = []
    for tool in tools[:_MOST_TOOLS]:
        fields = {key: tool[key] for key in _TOOL_KEYS if key in tool}
        recorded.append(recordable(fields))
    if len(tools) > _MOST_TOOLS:
        recorded.append(f"({len(tools) - _MOST_TOOLS} more)")
    return recorded


def is_word(text: str) -> bool:
    """Return True for a text that may be recorded from any place of a request."""
    return _WORD.fullmatch(text) is not None


def described(value: Any) -> str:
    """Return a value for an error message, which is recorded: a short word, or its kind."""
    match value:
        case str() if is_word(value):
            return repr(value)
        case str():
            return f"a text of {len(value)} characters"
        case dict():
            return "an object"
        case list():
            return "a list"
        case bool():
            return "a boolean"
        case None:
            return "null"
    return "a number"


def _cleaned(value: Any, names: Collection[str], depth: int = 0) -> Any:
    """Return a value without texts that are not short words."""
    if depth > _DEEPEST:
        return "(deeper)"
    if isinstance(value, str) and value not in names:
        return _short(value)
    if isinstance(value, list):
        return [_cleaned(inner, names, depth + 1) for inner in value]
    if not isinstance(value, dict):
        return value
    cleaned: Object = {}
    for key, inner in value.items():
        if key not in _APPLIED:
            cleaned[_short(key)] = _cleaned(inner, names, depth + 1)
    return cleaned


def _short(text: str) -> str:
    return text if is_word(text) else f"({len(text)} characters)"
