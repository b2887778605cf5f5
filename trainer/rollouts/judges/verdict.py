"""The judgement of a session, and strict reading of a reward.

A reward is one number within `MAX_REWARD` that was meant as one, or a JSON object with one.
"""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from rolltap.addons.errors import InputError
from rolltap.addons.store.rewards import finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The judgement of a session.

    Attributes:
        reward: Finite; None when the judge could not judge.
        unjudged: Why there is no reward; None when there is one.
        parts: Name -> finite number.
        evidence: JSON values: tests, their results, what was not applied, the digest of the changes.
    """

    reward: float | None = None
    unjudged: str | None = None
    parts: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)

    def and_evidence(self, **evidence: Any) -> "Judged":
        """Return the judgement with further evidence."""
        return replace(self, evidence={**self.evidence, **evidence})

    def forged(self, why: str) -> "Judged":
        """Return the judgement with the reward 0, for a report that is not the judge's own."""
        return replace(self.and_evidence(forged_report=why), reward=0.0)


class UnjudgedError(Exception):
    """A judge has no verdict.

    `broke` is False when that cannot be the agent's doing: a key that is not set, a patch that does not fit, a provider
    that does not answer. Else the agent's changes may have caused it, with a time limit, a signal, a report that is
    missing, words that are no reward: a judge that has a verdict on the untouched start was broken by them.
    """

    def __init__(self, reason: str, *, broke: bool = True, evidence: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.broke = broke
        self.evidence = evidence or {}


_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NEARLY = re.compile(
    r"""(?:[\w .-]{0,60}[:=])?        # a label, as in `score: 0.3`
        [\s'"(\[]*
        (?:[+-]?(?:\d[\d_.,]*(?:[eE][+-]?\d+)?|\.\d+|nan|inf|infinity|none|null|true|false)[\s,;/%|'")\]]*)+""",
    re.VERBOSE | re.IGNORECASE,
)
"""A line that may have been meant as a reward: only numbers and the like, after a label or none."""
_MAX_LINE = 10_000
MAX_REWARD = 1e6
"""Largest reward or part, and with a minus the smallest: one session must not outweigh all others of a training."""
_MAX_PARTS = 1000


class Reward(NamedTuple):
    """A finite reward, its parts by name, and the judge's words for it, if it has any."""

    reward: float
    parts: dict[str, float]
    reason: str = ""


def parse_number(text: str) -> float:
    """Return the finite number that a text is, in ASCII digits, with blanks around it. Raises `UnjudgedError`."""
    if not _NUMBER.fullmatch(text.strip(" \t\r\n")):
        raise UnjudgedError(f"{_short(text)} is not one number")
    return _bounded(float(text), "the number")


def parse_json(text: str) -> Reward:
    """Return the reward of a JSON object: `{"reward": NUMBER, "parts": {NAME: NUMBER}, "reason": TEXT}`.

    `parts` and `reason` may be missing. Raises `UnjudgedError` for all else: further keys, a key that is there twice,
    numbers that are not finite, booleans.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UnjudgedError(f"{_short(text)} is not the JSON of a reward: {error}") from error
    return read_object(value)


def read_object(value: Any) -> Reward:
    """Return the reward of a Python object, as `parse_json` of its text."""
    if not isinstance(value, dict):
        raise UnjudgedError(f"{_short(repr(value))} is not an object with the key 'reward'")
    if unknown := [key for key in value if key not in ("reward", "parts", "reason")]:
        raise UnjudgedError(f"the reward has the unknown key {_short(repr(unknown[0]))}")
    parts = value.get("parts", {})
    if not isinstance(parts, dict) or len(parts) > _MAX_PARTS or not all(isinstance(name, str) for name in parts):
        raise UnjudgedError("the reward's 'parts' are not an object of numbers")
    reason = value.get("reason", "")
    if not isinstance(reason, str):
        raise UnjudgedError("the reward's 'reason' is not a text")
    if "reward" not in value:
        raise UnjudgedError("the object has no key 'reward'")
    numbers = {name: _bounded(part, f"the part {name!r}") for name, part in parts.items()}
    return Reward(_bounded(value["reward"], "the reward"), numbers, reason)


def parse_output(output: str, how: Literal["number", "json"] | None) -> Reward | None:
    """Return the reward on the last line of an output, or None when `how` is None and that line is no reward.

    With `how` None, a line that looks as if it were meant as a reward but is none is an error: `nan`, `score: 0.3`,
    `0.3 0.4`, `50%`, an object that cannot be read. Raises `UnjudgedError`.
    """
    line = (output.strip().splitlines() or [""])[-1].strip()
    if how == "json" or (how is None and line.startswith("{")):
        return parse_json(line)
    if how == "number" or _NUMBER.fullmatch(line):
        return Reward(parse_number(line), {})
    if line and len(line) <= _MAX_LINE and _NEARLY.fullmatch(line):
        raise UnjudgedError(
            f"the last line of the output, {_short(line)}, is not one finite number: print the number alone, "
            'or set "result" to "status"'
        )
    return None


def parse_text(text: str) -> Reward:
    """Return the reward that a file holds: a JSON object, or one number alone. Raises `UnjudgedError`."""
    return parse_json(text) if text.lstrip().startswith("{") else Reward(parse_number(text), {})


def _bounded(value: Any, what: str) -> float:
    try:
        number = finite(value, what)
    except InputError as error:
        raise UnjudgedError(str(error)) from None
    if abs(number) > MAX_REWARD:
        raise UnjudgedError(f"{what} is {number:g}, and rewards are between -{MAX_REWARD:,.0f} and {MAX_REWARD:,.0f}")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not finite")


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 80 else text[:77] + "...")
