"""Typed access to the fields of a request body.

Errors name the field's place in the wording of the API.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from rolltap.addons.dialects.call import DialectError
from rolltap.addons.dialects.json_values import (
    MOST_LEVELS_OF_A_BODY,
    Object,
    TooManyValues,
    described,
    parse_json,
)

T = TypeVar("T")

_MOST_STOPS = 64
_LONGEST_STOPS = 4096
"""Characters of all stop texts together, which are searched for in each new text of a reply.

OpenAI takes 4 texts, Google 5.
"""
LONGEST_NAME = 256
"""Characters of a name, which each event of a stream repeats. The APIs take 64 or 128.

A model may sample a longer name of a tool, so calls are read with any name.
"""
LONGEST_ID = 1024


def parse_object(body: bytes) -> Object:
    """Parse a request body, which must be a JSON object. Raises `DialectError`."""
    try:
        request = parse_json(body, MOST_LEVELS_OF_A_BODY)
    except TooManyValues as error:
        why = f"The request body is too large: {error}."
        raise DialectError(why, status=413, code="request_too_large") from None
    except (ValueError, RecursionError) as error:
        raise DialectError(f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(request, dict):
        raise DialectError("The request body must be a JSON object.")
    return request


@dataclass(frozen=True, slots=True)
class Wording:
    """The wording of an API's errors about a field."""

    sentence: str
    """Template with `{place}` and `{expected}`."""
    index: str = "[{}]"
    """Template of a list index, which follows the place of the list."""
    name: Callable[[str], str] = str
    """Function from a key to its name in a place."""


class Fields:
    """The fields of an object in a request body, and the object's place in the request.

    An absent field reads as None. "Raises" in a method's docstring means a `DialectError` that
    names the place and the expected value.
    """

    __slots__ = ("_place", "_wording", "values")

    def __init__(
        self,
        values: Object,
        wording: Wording,
        place: str = "",
    ) -> None:
        self.values = values
        self._wording = wording
        self._place = place

    def __getitem__(self, key: str) -> Any:
        return self.values.get(key)

    def place(self, key: str | None = None, index: int | None = None) -> str:
        """Return the place of the object, of its field `key`, or of an element of that field."""
        place = self._place
        if key is not None:
            name = self._wording.name(key)
            place = f"{place}.{name}".removeprefix(".")
        if index is not None:
            place += self._wording.index.format(index)
        return place

    def refusal(
        self,
        key: str,
        expected: str,
        index: int | None = None,
    ) -> DialectError:
        """Return the error that the field, or its element `index`, must be `expected`."""
        place = self.place(key, index)
        return DialectError(self._wording.sentence.format(place=place, expected=expected))

    def at(self, key: str, values: Object) -> "Fields":
        """Return `values` as fields whose place is that of the field `key`."""
        return Fields(values, self._wording, self.place(key))

    def replaced(self, values: Object) -> "Fields":
        """Return `values` as fields whose place is that of this object."""
        return Fields(values, self._wording, self._place)

    def inner(self, key: str) -> "Fields":
        """Return the fields of an object. A value that is not an object has no fields."""
        return self.at(key, self.maybe(key, dict) or {})

    def maybe(self, key: str, kind: type[T]) -> T | None:
        """Return a value of this type, or None for any other value."""
        value = self.values.get(key)
        return value if isinstance(value, kind) else None

    def optional(self, key: str, read: "Callable[[Fields, str], T]") -> T | None:
        """Return `read(self, key)`, or None for an absent field. Raises what `read` raises."""
        if self[key] is None:
            return None
        return read(self, key)

    def text(
        self,
        key: str,
        absent: str | None = None,
        longest: int | None = None,
    ) -> str:
        """Return a string of at most `longest` characters, which may be empty.

        `absent` is returned for an absent field, unless it is None. Raises.
        """
        text = self._required(key, str, "a string", absent)
        if longest is not None and len(text) > longest:
            raise self.refusal(key, f"a string of at most {longest:,} characters")
        return text

    def name(self, key: str) -> str:
        """Return a non-empty string. Raises."""
        expected = "a non-empty string"
        text = self._required(key, str, expected)
        if not text:
            raise self.refusal(key, expected)
        return text

    def tool_name(self, key: str) -> str:
        """Return a non-empty string of at most `LONGEST_NAME` characters. Raises."""
        self.name(key)
        return self.label(key)

    def identifier(self, key: str, absent: str | None = None) -> str:
        """Return a `text` of at most `LONGEST_ID` characters. Raises."""
        return self.text(key, absent, LONGEST_ID)

    def label(self, key: str, absent: str | None = None) -> str:
        """Return a `text` of at most `LONGEST_NAME` characters. Raises."""
        return self.text(key, absent, LONGEST_NAME)

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Return one of the strings in `choices`. Raises."""
        value = self[key]
        if value in choices:
            return str(value)
        *others, last = map(repr, choices)
        raise self.refusal(key, f"{', '.join(others)} or {last}, not {described(value)}")

    def positive_integer(self, key: str) -> int:
        """Return an integer of at least 1. Raises."""
        value = self[key]
        if isinstance(value, int) and value is not True and value > 0:
            return value
        raise self.refusal(key, "a positive integer")

    def object(self, key: str, absent: Object | None = None) -> Object:
        """Return an object as a plain dict. `absent` as in `text`. Raises."""
        return self._required(key, dict, "an object", absent)

    def elements(self, key: str, expected: str = "a list") -> list[Any]:
        """Return the elements of a list. An absent field is an empty list. Raises."""
        return self._required(key, list, expected, [])

    def objects(
        self,
        key: str,
        expected: str = "a list",
        start: int = 0,
    ) -> "Iterator[Fields]":
        """Yield the elements of a list of objects from `start` on. Raises.

        An absent field is an empty list.
        """
        elements = self.elements(key, expected)
        for index, element in enumerate(elements[start:], start):
            yield self.element(key, index, element)

    def element(self, key: str, index: int, value: Any) -> "Fields":
        """Return `value` as fields whose place is the element `index` of a list. Raises."""
        if not isinstance(value, dict):
            raise self.refusal(key, "an object", index)
        return Fields(value, self._wording, self.place(key, index))

    def texts(self, key: str) -> list[str]:
        """Return the non-empty strings of a field: absent, a string, or a list of strings.

        Raises.
        """
        texts = [self[key]]
        if not isinstance(self[key], str):
            texts = self.elements(key)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise self.refusal(key, "a string", index)
        return [text for text in texts if text]

    def stop_texts(self, key: str) -> list[str]:
        """Return the `texts` of a field with stop texts.

        Raises, also if they are too many or long.
        """
        texts = self.texts(key)
        length = sum(map(len, texts))
        if len(texts) > _MOST_STOPS or length > _LONGEST_STOPS:
            most = f"at most {_MOST_STOPS} texts of {_LONGEST_STOPS} characters in total"
            raise self.refusal(key, most)
        return texts

    def chosen(self, keys: Iterable[str]) -> Object:
        """Return the fields among `keys` that are present, unchanged."""
        chosen: Object = {}
        for key in keys:
            if self.values.get(key) is not None:
                chosen[key] = self.values[key]
        return chosen

    def texts_by_place(self, *keys: str) -> dict[str, str]:
        """Return place -> string for those fields among `keys` that are strings."""
        texts: dict[str, str] = {}
        for key in keys:
            if isinstance(self[key], str):
                texts[self.place(key)] = self[key]
        return texts

    def _required(
        self,
        key: str,
        kind: type[T],
        expected: str,
        absent: T | None = None,
    ) -> T:
        value = self.values.get(key)
        if value is None:
            value = absent
        if isinstance(value, kind):
            return value
        raise self.refusal(key, expected)
