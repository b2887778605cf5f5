"""The result of judging."""

from dataclasses import dataclass, field
from typing import Any


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
