"""The judgement of a session, and strict reading of a reward.

A reward is one number that was meant as one, or a JSON object with one.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rolltap.trainer.tasks.task import Bound, CommandJudge, Judge, PythonJudge, SeveralJudges
from rolltap.trainer.toml import describe

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MAX_REASON = 2000

Skips = frozenset[tuple[Any, str]]
"""Tests of a report, each with its outcome, that were skipped or failed as expected without a mark
that says so."""


class UnjudgedError(Exception):
    """A judge has no verdict.

    `broke` is False when that cannot be the agent's doing: a key that is not set, a patch that does
    not fit, a provider that does not answer. Else the agent's changes may have caused it, with a
    time limit, a signal, a report that is missing, words that are no reward: a judge that has a
    verdict on the untouched start was broken by them. `lacks` names a program that is not there.
    `evidence` goes with the judgement.
    """

    def __init__(
        self,
        reason: str,
        *,
        broke: bool = True,
        lacks: str = "",
        **evidence: Any,
    ) -> None:
        super().__init__(reason)
        self.broke = broke
        self.lacks = lacks
        self.evidence = evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The judgement of a session, or of an untouched start.

    Attributes:
        reward: Finite; None when the judge could not judge.
        unjudged: Why there is no reward; None when there is one.
        parts: Name -> finite number.
        evidence: JSON values: tests, their results, what was not applied, the digest of the
            changes.
        skips: Of a report.
        broke: The agent's changes may be why there is no reward: see `UnjudgedError`.
        lacks: A program or module that the judge needs and did not find.
    """

    reward: float | None = None
    unjudged: str | None = None
    parts: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)
    skips: Skips = frozenset()
    broke: bool = False
    lacks: str = ""

    @classmethod
    def without(cls, error: UnjudgedError) -> "Judged":
        """Return the judgement of a judge that has no verdict."""
        return cls(
            unjudged=str(error),
            evidence=error.evidence,
            broke=error.broke,
            lacks=error.lacks,
        )

    def and_evidence(self, **evidence: Any) -> "Judged":
        """Return the judgement with further evidence, which replaces evidence of the same names."""
        return replace(self, evidence={**self.evidence, **evidence})


def worst_reward(spec: Judge) -> float:
    """Return the least reward that a judge gives: for a judge that was broken, or a report that was
    forged."""
    if isinstance(spec, SeveralJudges):
        return weighted_mean(spec, [worst_reward(one.judge) for one in spec.judges])
    return spec.range[0] if isinstance(spec, PythonJudge | CommandJudge) else 0.0


def best_reward(spec: Judge) -> float:
    """Return the reward of a solved task."""
    if isinstance(spec, SeveralJudges):
        return weighted_mean(spec, [best_reward(one.judge) for one in spec.judges])
    return spec.range[1] if isinstance(spec, PythonJudge | CommandJudge) else 1.0


def weighted_mean(spec: SeveralJudges, rewards: Sequence[float]) -> float:
    """Return the mean of the judges' rewards by their weights."""
    return fmean(rewards, [one.weight for one in spec.judges])


class Reward(BaseModel):
    """A reward in JSON: finite, with its parts by name and the judge's words for it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reward: Bound
    parts: dict[str, Bound] = Field(default={}, max_length=1000)
    reason: str = ""

    def judged(self, **evidence: Any) -> Judged:
        """Return the judgement that gives this reward."""
        if self.reason:
            evidence["reason"] = self.reason[:_MAX_REASON]
        return Judged(
            reward=self.reward,
            parts=self.parts,
            evidence=evidence,
        )


def parse_json(text: str) -> Reward:
    """Return the reward of a JSON object: `{"reward": NUMBER, "parts": {NAME: NUMBER}, "reason":
    TEXT}`.

    `parts` and `reason` may be missing. Raises `UnjudgedError` for all else: further keys, a key
    that is there twice, numbers that are not finite, booleans.
    """
    try:
        return Reward.model_validate(json.loads(text, object_pairs_hook=_unique))
    except ValidationError as error:
        raise UnjudgedError(f"{_short(text)} is no reward: {describe(error)[:300]}") from error
    except (ValueError, RecursionError) as error:
        raise UnjudgedError(f"{_short(text)} is not the JSON of a reward: {error}") from error


def parse_text(text: str) -> Reward:
    """Return the reward that a text is: JSON, or one number in ASCII digits. Raises
    `UnjudgedError`."""
    text = text.strip(" \t\r\n")
    if _NUMBER.fullmatch(text):
        text = f'{{"reward": {float(text)!r}}}'
    elif not text.startswith("{"):
        raise UnjudgedError(f"{_short(text)} is not one number")
    return parse_json(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    return found


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 80 else text[:77] + "...")
