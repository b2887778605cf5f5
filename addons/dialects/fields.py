"""Reading the fields of a request body that every dialect has."""

from typing import Any

from rolltap.addons.dialects.types import DialectError, parse_json


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body. Raises `DialectError`."""
    try:
        request = parse_json(body.decode())
    except (ValueError, RecursionError) as error:
        raise DialectError(f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(request, dict):
        raise DialectError("The request body must be a JSON object.")
    return request


def positive_integer(value: Any, name: str) -> int:
    """`value` when it is one. Raises `DialectError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DialectError(f"'{name}' must be a positive integer.")
    return value


def stop_texts(value: Any, name: str) -> list[str]:
    """The texts of a stop parameter: none, one, or a list. Raises `DialectError`."""
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DialectError(f"'{name}' must be a list of strings.")
    return [text for text in texts if text]
