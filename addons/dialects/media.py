"""Parts of a conversation that are no text: images, audio, files.

The model gets a text in their place.

A policy makes its harness send an image by accident, for instance by reading a PNG, and programs
end when that is an error. The text is the same in each request, so that the conversation is
continued.
"""

import re
from typing import Any

from rolltap.addons.dialects.call import DialectError

_MEDIA_TYPE = re.compile(r"(?:data:)?([a-z]{1,16}/[a-z0-9.+-]{1,80})(?=[;,]|\Z)", re.I)
"""A media type, alone or at the start of a `data:` URL."""


def placeholder(declared: Any, kind: str) -> str:
    """Return the text that the model gets for a part.

    `declared` is its media type or `data:` URL, `kind` a word for a part that has neither.
    """
    if isinstance(declared, str):
        found = _MEDIA_TYPE.match(declared)
        if found:
            kind = found[1]
    return f"[{kind}, not shown: this model reads text]"


def refuse_hidden(hidden: int) -> None:
    """Raise `DialectError` for a conversation with this number of images, audio parts and files,
    unless it is 0."""
    if hidden:
        others = f"The conversation has other parts (images, audio, files): {hidden}."
        raise DialectError(f"This model takes text only. {others}")
