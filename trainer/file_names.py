"""Names of files for ids that may be any text."""

from hashlib import blake2b
from urllib.parse import quote

MOST_CHARACTERS = 200
"""Of a name; file systems take 255 bytes, and a suffix follows."""


def file_name(text: str) -> str:
    """A name without a suffix, another for every `text`: percent-encoded; of a long one its beginning and its hash."""
    name = quote(text, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > MOST_CHARACTERS:
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        name = f"{name[: MOST_CHARACTERS - len(digest) - 1]}-{digest}"
    return name
