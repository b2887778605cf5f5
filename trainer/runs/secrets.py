"""Secrets in recorded text: keys, tokens and passwords of known forms. One of another form is not
found.

The forms of providers are those of detect-secrets. Beside them are here: keys of model providers, a
secret by the name that it is assigned to, and texts that hold one, such as a URL or a cookie. A
text is read as it was recorded, and then as a program would read it: without escapes, colours and
line ends in the middle of a token.
"""

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
    "BasicAuthDetector",
    "JwtTokenDetector",
    "PrivateKeyDetector",
    "CloudantDetector",
    "IbmCloudIamDetector",
    "IbmCosHmacDetector",
    "IPPublicDetector",
    "SoftlayerDetector",
}
"""Detectors that are not used. A form above is used in place of the first three. The others take as
long as all together, and their names are found as those of a value."""
_SHORTEST = 20
"""Characters of the shortest key or token."""

_INVISIBLE = re.compile(
    "(?:\x1b|\\\\u001b|\\\\x1b|\\\\033)\\[[0-9;]*[A-Za-z]|[\u00ad\u200b-\u200f\u2060\ufeff]"
)
"""Colours of a terminal, also as a program writes them, and characters without a width."""
_ESCAPE = re.compile(
    r"""\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(["'\\/nrtbf]))|%([0-9A-Fa-f]{2})"""
)
_MEANT = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "b": "\b",
    "f": "\f",
}
_LINE_END = re.compile(r"(?<=[\w+/=-]{4})[ \t]*\r?\n[ \t]*(?=[\w+/=.-]{4})")
_AROUND = 200
"""Characters on each side of what is replaced in a reading, between which a form is looked for
again."""
_MOST_ESCAPED = 3
"""Times that a text was escaped at most: arguments of a tool are JSON in JSON."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A text as it may be read, made of the recorded one by replacing parts."""

    text: str
    starts: Sequence[int]
    """Where the recorded text of each character starts."""
    ends: Sequence[int]
    """Where it ends."""
    seams: Sequence[int] = ()
    """Places in `text` before and after what was replaced last."""

    def replaced(self, pattern: re.Pattern[str]) -> "Reading":
        """Return the text with each match read as what it means; the same object without a
        match."""
        parts: list[str] = []
        starts = array("q")
        ends = array("q")
        seams: list[int] = []
        at = 0
        for match in pattern.finditer(self.text):
            start, end = match.span()
            parts.append(self.text[at:start])
            starts.extend(self.starts[at:start])
            ends.extend(self.ends[at:start])
            seams.append(len(starts))
            meant = _meant(match)
            parts.append(meant)
            starts.extend([self.starts[start]] * len(meant))
            ends.extend([self.ends[end - 1]] * len(meant))
            seams.append(len(starts))
            at = end
        if not at:
            return self
        parts.append(self.text[at:])
        starts.extend(self.starts[at:])
        ends.extend(self.ends[at:])
        return Reading("".join(parts), starts, ends, seams)

    def windows(self) -> list[tuple[int, int]]:
        """Return the parts around what is replaced: only there is a form that the text before has
        not."""
        if not self.seams:
            return [(0, len(self.text))]
        found: list[tuple[int, int]] = []
        for seam in self.seams:
            start = max(seam - _AROUND, 0)
            if found and start <= found[-1][1]:
                start, _ = found.pop()
            found.append((start, seam + _AROUND))
        return found


def readings(text: str) -> list[Reading]:
    """Return the ways to read a recorded text that differ: as it is, without escapes and colours,
    without line ends."""
    size = len(text)
    found = [Reading(text, range(size), range(1, size + 1))]
    for pattern in [_INVISIBLE, _ESCAPE] * _MOST_ESCAPED + [_LINE_END]:
        reading = found[-1].replaced(pattern)
        if reading is not found[-1]:
            found.append(reading)
    return found


def _meant(match: re.Match[str]) -> str:
    """Return what stands for an escape: a character, and nothing for what is no escape."""
    if match.re is not _ESCAPE:
        return ""
    four, two, one, percent = match.groups()
    if one:
        return _MEANT.get(one, one)
    return chr(int(four or two or percent, 16))


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
            for pattern in detector.denylist:
                found.append((kind, pattern, 0))
    return found


def _is_random(value: str) -> bool:
    """Return True for a value that nobody would read as words: a path, a name or a number is
    none."""
    if _WORDS.fullmatch(value) or not re.search(r"\d", value) or not re.search(r"[A-Za-z]", value):
        return False
    entropy = 0.0
    for number in Counter(value).values():
        share = number / len(value)
        entropy -= share * math.log2(share)
    return entropy >= _LEAST_ENTROPY


class Secrets:
    """Finds the known forms of secrets, and the texts that are given."""

    def __init__(self, texts: Collection[str] = ()) -> None:
        given = sorted(filter(None, texts), key=len, reverse=True)
        self._given = re.compile("|".join(map(re.escape, given)) or r"(?!)")

    def find(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Yield the kind, start and end of what is found in a text, in order. No two have a
        character in common."""
        found: set[tuple[int, int, str]] = set()
        for reading in readings(text):
            for window in reading.windows():
                for kind, first, last in self._in(reading.text, *window):
                    found.add((reading.starts[first], -reading.ends[last - 1], kind))
        kind = ""
        begin = 0
        until = 0
        # of those that start at one place, the longest is first
        for start, negative_end, other in sorted(found):
            if start >= until:
                if until:
                    yield kind, begin, until
                kind = other
                begin = start
            until = max(until, -negative_end)
        if until:
            yield kind, begin, until

    def _in(self, text: str, start: int, end: int) -> Iterator[tuple[str, int, int]]:
        for kind, pattern, group in _forms():
            for match in pattern.finditer(text, start, end):
                if "rest" not in pattern.groupindex or _is_random(match["rest"]):
                    yield kind, *match.span(group)
        for match in _VALUE.finditer(text, start, end):
            before = text[max(0, match.start() - _NAME_LENGTH) : match.start()]
            if _is_random(match[1]) and _NAME.search(before):
                yield "Value of a secret's name", *match.span(1)
        for match in self._given.finditer(text, start, end):
            yield GIVEN, *match.span()

    def redact(self, text: str) -> str:
        """Return the text with a note in place of each secret."""
        parts: list[str] = []
        at = 0
        for _, start, end in self.find(text):
            parts += [text[at:start], REDACTED]
            at = end
        parts.append(text[at:])
        return "".join(parts)

    def redact_values(self, value: Any) -> Any:
        """Return JSON values with their texts redacted, and the keys of objects that are not short
        words."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, list):
            return [self.redact_values(part) for part in value]
        if not isinstance(value, dict):
            return value
        redacted: dict[str, Any] = {}
        for name, part in value.items():
            is_short_word = name.isidentifier() and len(name) < _SHORTEST
            if not is_short_word:
                name = self.redact(name)
            redacted[name] = self.redact_values(part)
        return redacted

    def kinds(self, texts: Iterable[str | None]) -> set[str]:
        """Return the kinds of the secrets in texts."""
        found: set[str] = set()
        for text in texts:
            found.update(kind for kind, _, _ in self.find(text or ""))
        return found


def find_in_run(run: Path, decode: Callable[[list[int]], str] | None) -> dict[str | None, set[str]]:
    """Return session id -> kinds of secrets, for sessions that have one; None for events of nobody.

    Without `decode`, the text of token ids, the tokens are not looked at. Raises `RunError`.
    """
    secrets = Secrets()
    found: defaultdict[str | None, set[str]] = defaultdict(set)
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
    session = recorded.session
    if session is not None:
        yield session.error
        yield json_text(session.evidence)
    if decode is None:
        return
    # all other calls are a part of one at an end of the call tree
    parents, _ = link_calls(calls)
    for end in find_ends(parents, range(len(calls))):
        yield decode([*calls[end].prompt_ids, *calls[end].completion_ids])
