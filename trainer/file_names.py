"""File names for ids of arbitrary text."""

from hashlib import blake2b
from urllib.parse import quote

MOST_CHARACTERS = 200
"""Maximum length of a name. File systems allow 255 bytes, and callers append a suffix."""


def file_name(text: str) -> str:
    """Return the file name, without a suffix, of an id: percent-encoded, and different for different `text`.

    A name over `MOST_CHARACTERS` is truncated, and a 128-bit hash of `text` appended.
    """
    name = quote(text, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > MOST_CHARACTERS:
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        name = f"{name[: MOST_CHARACTERS - len(digest) - 1]}-{digest}"
    return name
