"""The age of weights: how many steps they are older than those that a step trains.

A version has the number of its optimizer steps, of which a step has as many as
`grpo.num_iterations`. So ages are in optimizer steps, and `TraceOptions.max_staleness` too; metrics
have them in steps.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from rolltap.addons.store.records import Session
from rolltap.trainer.names import Version
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.reader import SessionReader
from rolltap.trainer.traces.sessions import TraceOptions, trace_session


def is_older(version: str | None, options: TraceOptions) -> bool:
    """Return True for weights that are too old for the step of `options.weights`; False for those
    of another run."""
    age = options.weights.age(version) if options.weights and version else None
    return age is not None and age > options.max_staleness


def is_stale(reader: SessionReader, group: Sequence[Session], options: TraceOptions) -> bool:
    """Return True for a group of which age leaves no token to train, whatever its rewards, experts
    and scores.

    A group is stale too if it is empty, or if all its sessions were cancelled, because none can
    have a reward. Raises as `trace_session`.
    """
    if all(session.status == "cancelled" for session in group):
        return True
    if not any(is_older(session.policy_version, options) for session in group):
        return False
    names = [session.session_id for session in group]
    for recorded in reader.sessions(names):
        unscored = replace(recorded, routing=None, scores=None)
        if trace_session(unscored, options).traces:
            return False
    return True


def other_weights(
    reader: SessionReader, session_ids: Collection[str], options: TraceOptions
) -> Counter[str]:
    """Return version -> tokens of the sessions, for weights that no rollout of the step could have
    begun with."""
    tokens = Counter[str]()
    if options.weights is None:
        return tokens
    for session in reader.sessions(session_ids):
        for call in session.calls:
            for span in call.weight_versions:
                age = options.weights.age(span.version)
                if age is None or age < 0 or (age > 0 and not options.max_staleness):
                    tokens[span.version] += span.end - span.start
    return tokens


def token_ages(batch: TraceBatch, weights: Version) -> Counter[int]:
    """Return age in optimizer steps -> tokens that the traces train."""
    ages = Counter[int]()
    for trace in batch.traces:
        for span in trace.weight_versions:
            ages[weights.age(span.version) or 0] += span.end - span.start
    return ages


def age_metrics(
    batch: TraceBatch,
    ages: Counter[int],
    *,
    iterations: int,
    max_staleness: int,
) -> dict[str, float]:
    """Return the metrics of the ages of a batch's tokens, and the share that is too old.

    `age/share/N` is the share of the tokens in traces whose weights are N steps old.
    `max_staleness` is the recipe's.
    """
    tokens = max(1, ages.total())
    steps = Counter[int]()
    for age, count in ages.items():
        steps[age // iterations] += count
    return {
        "age/mean": sum(age * count for age, count in steps.items()) / tokens,
        "age/max": float(max(steps, default=0)),
        **{f"age/share/{age}": steps[age] / tokens for age in range(max_staleness + 1)},
        "stale_share": batch.ledger.left_out.get("stale", 0) / max(1, batch.ledger.sampled),
    }
