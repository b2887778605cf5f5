"""Parts of a conversation that are no text: images, audio, files. The model gets a text in their place.

A policy makes its harness send an image by accident, for instance by reading a PNG, and programs end when that is an
error. The text is the same in each request, so that the conversation is continued.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rolltap.addons.dialects.call import DialectError

_MEDIA_TYPE = re.compile(r"(?:data:)?([a-z]{1,16}/[a-z0-9.+-]{1,80})(?=[;,]|\Z)", re.I)
"""A media type, alone or at the start of a `data:` URL."""


def placeholder(declared: Any, kind: str) -> str:
    """Return the text that the model gets for a part.

    `declared` is its media type or `data:` URL, `kind` a word for a part that has neither.
    """
    found = _MEDIA_TYPE.match(declared) if isinstance(declared, str) else None
    return f"[{found[1] if found else kind}, not shown: this model reads text]"


def hide(
    request: dict[str, Any],
    places: Sequence[Sequence[str]],
    text_for: Callable[[dict[str, Any]], str | None],
    text_type: str | None,
) -> int:
    """Replace, in `request`, the parts for which `text_for` returns a text. Return their number.

    A place is a chain of keys to a list of parts, or to a single one. Lists on the way are gone through. A text part
    has the `type` `text_type`, or no type.
    """
    hidden = 0
    for place in places:
        parts = [request]
        for key in place:
            found = [part.get(key) for part in parts]
            several = [inner if isinstance(inner, list) else [inner] for inner in found]
            parts = [part for inner in several for part in inner if isinstance(part, dict)]
        for part in parts:
            text = text_for(part)
            if text is not None:
                part.clear()
                part.update({"type": text_type} if text_type else {}, text=text)
                hidden += 1
    return hidden


def refuse_hidden(hidden: int) -> None:
    """Raise `DialectError` for a conversation with so many images, audio parts and files, unless it has none."""
    if hidden:
        raise DialectError(
            f"This model takes text only. The conversation has other parts (images, audio, files): {hidden}."
        )
