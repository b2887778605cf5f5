"""Text from the wire that a run can hold and a terminal can show."""

LONGEST = 500
"""Maximum number of characters of a text in an event or a log line."""


def printable(text: str, longest: int | None = LONGEST) -> str:
    r"""Return `text` with escapes such as `\x1b` for all that is not printable, cut to `longest` characters.

    Not printable are control characters, line ends, directions of writing, and the surrogates that mitmproxy decodes
    bytes to which are not UTF-8. With `longest` None the text is not cut.
    """
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}... ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
