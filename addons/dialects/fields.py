"""One reader of request bodies: fields that know their place and are refused in their API's words."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from rolltap.addons.dialects.types import DialectError, parse_json

T = TypeVar("T")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body. Raises `DialectError`."""
    try:
        request = parse_json(body.decode())
    except (ValueError, RecursionError) as error:
        raise DialectError(f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(request, dict):
        raise DialectError("The request body must be a JSON object.")
    return request


@dataclass(frozen=True, slots=True)
class Wording:
    """How an API refuses a field."""

    sentence: str
    """With `{place}` and `{what}`, which should be there."""
    index: str = "[{}]"
    """An element, after the place of its list."""
    name: Callable[[str], str] = str
    """A key as places name it."""


class Fields:
    """The fields of an object in a request body, which knows where it stands.

    What a request does not hold is None. Every method that says so raises `DialectError`, which names the place and
    what should be there.
    """

    __slots__ = ("_above", "_wording", "values")

    def __init__(
        self, values: dict[str, Any], wording: Wording, above: "tuple[Fields, str, int | None] | None" = None
    ) -> None:
        self.values = values
        self._wording = wording
        self._above = above

    def __getitem__(self, key: str) -> Any:
        return self.values.get(key)

    def place(self, key: str | None = None, index: int | None = None) -> str:
        """Where the object, or a field of it, or an element of that, stands in the request, as the API writes it."""
        own = self._above[0].place(*self._above[1:]) if self._above else ""
        if key is None:
            return own
        field = f"{own}.{self._wording.name(key)}".removeprefix(".")
        return field if index is None else field + self._wording.index.format(index)

    def refusal(self, key: str, what: str, index: int | None = None) -> DialectError:
        """The error which says that `what` should be there."""
        return DialectError(self._wording.sentence.format(place=self.place(key, index), what=what))

    def at(self, key: str, values: dict[str, Any]) -> "Fields":
        """Other fields, in the place of the field `key`."""
        return Fields(values, self._wording, (self, key, None))

    def replaced(self, values: dict[str, Any]) -> "Fields":
        """Other fields in this place."""
        return Fields(values, self._wording, self._above)

    def inner(self, key: str) -> "Fields":
        """The fields of an object; none of what is not an object."""
        value = self.values.get(key)
        return Fields(value if isinstance(value, dict) else {}, self._wording, (self, key, None))

    def maybe(self, key: str, kind: type[T]) -> T | None:
        """A value of this type, None for anything else."""
        value = self.values.get(key)
        return value if isinstance(value, kind) else None

    def optional(self, key: str, read: "Callable[[Fields, str], T]") -> T | None:
        """A field as `read` returns it, None where there is none. Raises what `read` raises."""
        return None if self.values.get(key) is None else read(self, key)

    def text(self, key: str) -> str:
        """A string, which may be empty. Raises."""
        value = self.values.get(key)
        if isinstance(value, str):
            return value
        raise self.refusal(key, "a string")

    def name(self, key: str) -> str:
        """A string that is not empty. Raises."""
        value = self.values.get(key)
        if value and isinstance(value, str):
            return value
        raise self.refusal(key, "a non-empty string")

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of several strings. Raises."""
        value = self.values.get(key)
        if value in choices:
            return str(value)
        *others, last = map(repr, choices)
        raise self.refusal(key, f"{', '.join(others)} or {last}, not {value!r}")

    def positive_integer(self, key: str) -> int:
        """An integer of at least 1. Raises."""
        value = self.values.get(key)
        if isinstance(value, int) and value is not True and value > 0:
            return value
        raise self.refusal(key, "a positive integer")

    def object(self, key: str) -> dict[str, Any]:
        """An object as it is. Raises."""
        value = self.values.get(key)
        if isinstance(value, dict):
            return value
        raise self.refusal(key, "an object")

    def elements(self, key: str, what: str = "a list") -> list[Any]:
        """The elements of a list as they are, none where there is no list. Raises."""
        value = self.values.get(key)
        if isinstance(value, list | None):
            return value or []
        raise self.refusal(key, what)

    def objects(self, key: str, what: str = "a list") -> "Iterator[Fields]":
        """The elements of a list of objects, none where there is no list. Raises."""
        for i, element in enumerate(self.elements(key, what)):
            if not isinstance(element, dict):
                raise self.refusal(key, "an object", i)
            yield Fields(element, self._wording, (self, key, i))

    def texts(self, key: str) -> list[str]:
        """The texts, those that are empty left out, of a field that may hold none, one, or a list. Raises."""
        alone = self.maybe(key, str)
        texts = self.elements(key) if alone is None else [alone]
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise self.refusal(key, "a string", i)
        return [text for text in texts if text]

    def chosen(self, keys: Iterable[str]) -> dict[str, Any]:
        """The fields among `keys` that are there, as they are."""
        return {key: self.values[key] for key in keys if self.values.get(key) is not None}

    def texts_by_place(self, *keys: str) -> dict[str, str]:
        """Place -> text of those fields that are texts."""
        return {self.place(key): text for key in keys if (text := self.maybe(key, str)) is not None}
