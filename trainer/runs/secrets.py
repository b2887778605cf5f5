"""Secrets in recorded text: keys, tokens and passwords of known forms. One of another form is not
found.

The forms of providers are those of detect-secrets. Beside them are here: keys of model providers, a
secret by the name that it is assigned to, and texts that hold one, such as a URL or a cookie. A
text is read as it was recorded, and then as a program would read it: without escapes, colours and
line ends in the middle of a token.
"""

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rolltap.addons.store.records import json_text
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.traces.reader import RecordedSession, iter_sessions
from rolltap.trainer.traces.tree import find_ends, link_calls

REDACTED = "[redacted]"
GIVEN = "given text"

_VALUE = re.compile(
    r"""(?:=>|:=|=|:)\s{0,4}\\?["']?([^\s"'`,;&<>(){}\[\]$\\=:]{8,1000})(?![(\[])"""
)
"""Group 1: a value that something is given. A call and a variable are none."""
_NAME = re.compile(r"""(?xi)
    (?: (?:api|access|account|auth|client|encryption|master|private|secret|service|shared|signing
        |ssh|storage) [-_. ]? key (?:[-_. ]? data)?
      | token | secret | passw(?:or)?d | pwd | passphrase | credentials?
    )
    ["'\]\\]{0,3} \s{0,4} $
    """)
"""The end of a name of secrets, before the sign that gives it a value."""
_NAME_LENGTH = 40
"""Characters before such a sign in which the name is looked for."""
_WORDS = re.compile(
    r"[A-Za-z]+(?:[-_.][A-Za-z]+)*|[a-z]+(?:[_.][a-z0-9]+)+|[\d.,:-]+|[A-Z]+(?:_[A-Z0-9]+)+"
)
"""A value that is the name of something, or a number."""
_LEAST_ENTROPY = 2.8
"""Bits per character of a random value. English words and repeated characters have less."""

_FORMS = {
    "Private Key": (
        r"-----BEGIN[ A-Z0-9]{0,30} PRIVATE KEY-----[\s\S]{1,20000}?(?:-----END[ A-Z0-9]{0,30}"
        r" KEY-----|\Z)"
    ),
    "JSON Web Token": r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}",
    "Authorization": r"(?i)authorization\W{1,12}(?:bearer|basic|token)\s+([\w.~+/=:-]{12,})",
    "Cookie": r"(?i)cookie[\"']?\s*[:=]\s*[\"']?((?:[\w.-]+=[^\s;\"'\\]*;?\s?){1,50})",
    "Value of an option": (
        r"--[\w-]*(?:key|token|secret|password)\s+([^\s\"'`,;&<>(){}\[\]$\\]{12,})"
    ),
    "Password of .netrc": r"machine\s+\S+\s+login\s+\S+\s+password\s+(\S+)",
    "Password in a URL": r"(?<=://)[^\s/:@\"'<>\\]{1,100}:[^\s/@\"'<>\\]{3,1000}(?=@[\w.\[-])",
}
"""Kind -> pattern, of forms that detect-secrets has not, or has without their end. A group is the
secret."""
_PREFIXES = (
    "sk- gsk_ xai- nvapi- r8_ pplx- fw_ tgp_v1_ lsv2_ hf_ AIza ya29. GOCSPX- github_pat_ glpat-"
    " dckr_pat_ dop_v1_ doo_v1_ dapi hvs. hvb. lin_api_ npm_ shpat_ shpca_ shppa_ shpss_ ghp_ gho_"
    " ghu_ ghs_ ghr_ xoxe-"
)
"""Beginnings of tokens that say by it whose they are."""
_NOT_USED = {
    *("BasicAuthDetector", "JwtTokenDetector", "PrivateKeyDetector"),
    *(
        "CloudantDetector",
        "IbmCloudIamDetector",
        "IbmCosHmacDetector",
        "IPPublicDetector",
        "SoftlayerDetector",
    ),
}
"""Detectors in place of which a form above is used, and others that take as long as all together,
for names that are those of a value too."""
_SHORTEST = 20
"""Characters of the shortest key or token."""

_INVISIBLE = re.compile(
    "(?:\x1b|\\\\u001b|\\\\x1b|\\\\033)\\[[0-9;]*[A-Za-z]|[\u00ad\u200b-\u200f\u2060\ufeff]"
)
"""Colours of a terminal, also as a program writes them, and characters without a width."""
_ESCAPE = re.compile(
    r"""\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(["'\\/nrtbf]))|%([0-9A-Fa-f]{2})"""
)
_MEANT = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_LINE_END = re.compile(r"(?<=[\w+/=-]{4})[ \t]*\r?\n[ \t]*(?=[\w+/=.-]{4})")
_AROUND = 200
"""Characters on each side of what is replaced in a reading, between which a form is looked for
again."""
_MOST_ESCAPED = 3
"""Times that a text was escaped at most: arguments of a tool are JSON in JSON."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A text as it may be read, made of another one by replacing parts.

    Attributes:
        before: The other one; None for the recorded text.
        starts: Where the pieces start here.
        origins: Start and end of each piece in the text before.
    """

    text: str
    before: "Reading | None" = None
    starts: tuple[int, ...] = ()
    origins: tuple[tuple[int, int], ...] = ()

    def replaced(
        self, pattern: re.Pattern[str], meant: Callable[[re.Match[str]], str]
    ) -> "Reading":
        """Return the text with each match replaced; the same object without a match."""
        parts: list[str] = []
        starts: list[int] = []
        origins: list[tuple[int, int]] = []
        at = length = 0

        def add(part: str, start: int, end: int) -> None:
            nonlocal length
            if part:
                parts.append(part)
                starts.append(length)
                origins.append((start, end))
                length += len(part)

        for match in pattern.finditer(self.text):
            add(self.text[at : match.start()], at, match.start())
            add(meant(match), match.start(), match.end())
            at = match.end()
        if not at:
            return self
        add(self.text[at:], at, len(self.text))
        return Reading("".join(parts), self, tuple(starts), tuple(origins))

    def origin(self, start: int, end: int) -> tuple[int, int]:
        """Return the place in the recorded text of what is from `start` to `end` here."""
        if self.before is None:
            return start, end
        first = bisect_right(self.starts, start) - 1
        last = bisect_right(self.starts, end - 1) - 1
        return self.before.origin(self._place(first, start)[0], self._place(last, end - 1)[1])

    def windows(self) -> list[tuple[int, int]]:
        """Return the parts around what is replaced: only there is a form that the text before has
        not."""
        if self.before is None:
            return [(0, len(self.text))]
        found: list[tuple[int, int]] = []
        for at in self.starts[1:]:
            start, end = max(at - _AROUND, 0), at + _AROUND
            if found and start <= found[-1][1]:
                start = found.pop()[0]
            found.append((start, end))
        return found

    def _place(self, number: int, at: int) -> tuple[int, int]:
        """Return start and end, in the text before, of the character `at`, which is in a piece."""
        start, end = self.origins[number]
        here = self.starts[number]
        after = self.starts[number + 1] if number + 1 < len(self.starts) else len(self.text)
        if end - start != after - here:
            return start, end
        return start + at - here, start + at - here + 1


def readings(text: str) -> list[Reading]:
    """Return the ways to read a recorded text that differ: as it is, without escapes and colours,
    without line ends."""
    found = [Reading(text)]
    for pattern in (*(_INVISIBLE, _ESCAPE) * _MOST_ESCAPED, _LINE_END):
        meant = found[-1].replaced(pattern, _meant)
        if meant is not found[-1]:
            found.append(meant)
    return found


def _meant(match: re.Match[str]) -> str:
    """Return what stands for an escape: a character, and nothing for what is no escape."""
    if match.re is not _ESCAPE:
        return ""
    four, two, one, percent = match.groups()
    return _MEANT.get(one, one) if one else chr(int(four or two or percent, 16))


@cache
def _forms() -> list[tuple[str, re.Pattern[str], int]]:
    """Return kinds, patterns, and the group that is the secret.

    Kept, because looking for the detectors takes a quarter of a second.
    """
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector

    found: list[tuple[str, re.Pattern[str], int]] = []
    for kind, form in _FORMS.items():
        pattern = re.compile(form)
        found.append((kind, pattern, pattern.groups))
    for prefix in _PREFIXES.split():
        begin = re.escape(prefix)
        # a pattern that begins with a text is found ten times as fast, so the look behind comes
        # after it
        pattern = re.compile(rf"{begin}(?<![A-Za-z0-9]{begin})(?P<rest>[\w-]{{{_SHORTEST},}})")
        found.append((f"token ({prefix}...)", pattern, 0))
    detectors: dict[str, Any] = get_mapping_from_secret_type_to_class()
    for kind, detector in sorted(detectors.items()):
        if issubclass(detector, RegexBasedDetector) and detector.__name__ not in _NOT_USED:
            found += [(kind, pattern, 0) for pattern in detector.denylist]
    return found


def _is_random(value: str) -> bool:
    """Return True for a value that nobody would read as words: a path, a name or a number is
    none."""
    if _WORDS.fullmatch(value) or not (re.search(r"\d", value) and re.search(r"[A-Za-z]", value)):
        return False
    counts = Counter(value).values()
    return -math.fsum(n / len(value) * math.log2(n / len(value)) for n in counts) >= _LEAST_ENTROPY


class Secrets:
    """Finds the known forms of secrets, and the texts that are given."""

    def __init__(self, texts: Collection[str] = ()) -> None:
        given = sorted(filter(None, texts), key=len, reverse=True)
        self._given = re.compile("|".join(map(re.escape, given)) or r"(?!)")

    def find(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Yield the kind, start and end of what is found in a text, in order. No two have a
        character in common."""
        found = set()
        for reading in readings(text):
            for window in reading.windows():
                for kind, start, end in self._in(reading.text, *window):
                    found.add((*reading.origin(start, end), kind))
        last: tuple[str, int, int] | None = None
        for start, end, kind in sorted(found, key=lambda each: (each[0], -each[1], each[2])):
            if last is not None and start < last[2]:
                last = (last[0], last[1], max(last[2], end))
            else:
                if last is not None:
                    yield last
                last = (kind, start, end)
        if last is not None:
            yield last

    def _in(self, text: str, *window: int) -> Iterator[tuple[str, int, int]]:
        for kind, pattern, group in _forms():
            for match in pattern.finditer(text, *window):
                if "rest" not in pattern.groupindex or _is_random(match["rest"]):
                    yield kind, *match.span(group)
        for match in _VALUE.finditer(text, *window):
            before = text[max(0, match.start() - _NAME_LENGTH) : match.start()]
            if _is_random(match[1]) and _NAME.search(before):
                yield "Value of a secret's name", *match.span(1)
        for match in self._given.finditer(text, *window):
            yield GIVEN, *match.span()

    def redact(self, text: str) -> str:
        """Return the text with a note in place of each secret."""
        parts = []
        at = 0
        for _, start, end in self.find(text):
            parts += [text[at:start], REDACTED]
            at = end
        return "".join([*parts, text[at:]])

    def redact_values(self, value: Any) -> Any:
        """Return JSON values with their texts redacted, and the keys of objects that are not short
        words."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, list):
            return [self.redact_values(part) for part in value]
        if isinstance(value, dict):
            return {
                (
                    name if name.isidentifier() and len(name) < _SHORTEST else self.redact(name)
                ): self.redact_values(part)
                for name, part in value.items()
            }
        return value

    def kinds(self, texts: Iterable[str | None]) -> set[str]:
        """Return the kinds of the secrets in texts."""
        return {kind for text in texts if text for kind, _, _ in self.find(text)}


def find_in_run(run: Path, decode: Callable[[list[int]], str] | None) -> dict[str | None, set[str]]:
    """Return session id -> kinds of secrets, for sessions that have one; None for events of nobody.

    Without `decode`, the text of token ids, the tokens are not looked at. Raises `RunError`.
    """
    secrets, found = Secrets(), defaultdict[str | None, set[str]](set)
    for recorded in iter_sessions(run):
        found[recorded.session_id] |= secrets.kinds(_texts(recorded, decode))
    for event in read_rows(run, "events"):
        found[event["session_id"]] |= secrets.kinds([event["detail"]])
    return {session_id: kinds for session_id, kinds in found.items() if kinds}


def _texts(
    recorded: RecordedSession, decode: Callable[[list[int]], str] | None
) -> Iterator[str | None]:
    """Yield the texts that a session recorded. JSON stays as it is: a form is found within it
    too."""
    calls = recorded.calls
    for call in calls:
        yield from (call.messages, call.reply, call.tools, call.sampling, call.error, call.path)
    if (session := recorded.session) is not None:
        yield from (session.error, json_text(session.evidence))
    if decode is not None:  # all other calls are a part of one at an end of the call tree
        for end in find_ends(link_calls(calls)[0], range(len(calls))):
            yield decode([*calls[end].prompt_ids, *calls[end].completion_ids])
