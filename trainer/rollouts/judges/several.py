"""Several judges: the weighted mean of their rewards."""

from collections.abc import Sequence
from typing import Any

from rolltap.trainer.rollouts.judges.judged import Judged
from rolltap.trainer.rollouts.judges.spec import WeightedJudge


def combine(judges: Sequence[WeightedJudge], judged: Sequence[Judged]) -> Judged:
    """Return the weighted mean of several judgements; unjudged when one of them is.

    Each reward is a part with the name of its judge, and its parts follow as `NAME.PART`.
    """
    parts: dict[str, float] = {}
    evidence: dict[str, Any] = {"judge": "several", "judges": {}}
    for one, result in zip(judges, judged, strict=True):
        evidence["judges"][one.name] = result.evidence
        if "forged_report" in result.evidence:
            evidence["forged_report"] = result.evidence["forged_report"]
        if result.reward is not None:
            parts[one.name] = result.reward
            parts.update((f"{one.name}.{name}", part) for name, part in result.parts.items())
    missing = [f"{one.name}: {result.unjudged}" for one, result in zip(judges, judged, strict=True) if result.unjudged]
    if missing:
        return Judged(unjudged="; ".join(missing), parts=parts, evidence=evidence)
    weights = [one.weight for one in judges]
    whole = sum(weight / sum(weights) * parts[one.name] for one, weight in zip(judges, weights, strict=True))
    return Judged(reward=whole, parts=parts, evidence=evidence)
