"""Scores recorded calls again on a running vLLM and compares the log-probabilities.

A call's prompt and completion are sent as one prompt and vLLM reports the log-probability of each
token of it (`prompt_logprobs` of `POST /v1/completions`). These are the policy's own, so only calls
that were sampled neutrally, by weights that the engine serves, can be compared. The engine's
versions say which these are. vLLM scores a prompt by other kernels than those that sample, so
rounding differs: the engine's own difference on a fixed text is the measure.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from rolltap.addons.errors import InputError
from rolltap.addons.options import NEUTRAL_SAMPLING
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call, CallKind, find_violation
from rolltap.trainer.console import Advance
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.status import recorded_models, served_weights
from rolltap.trainer.engine.weights import (
    COMPARED,
    FIXED_TEXT,
    LIMITS,
    expected_limit,
    mean_difference,
)
from rolltap.trainer.traces.reader import iter_sessions

KINDS: tuple[CallKind, ...] = ("root", "bridged", "rendered")
HARMLESS_SAMPLING = {"max_tokens", "seed", "stop", "stop_token_ids", "asked"}
"""Sampling parameters that do not change the distribution of a sampled token."""

CallName = tuple[CallKind, str, str]
"""Kind, session id and call id."""
Score = tuple[Call, list[float]]
"""A call, and the engine's log-probability of each token of its completion."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A sampled token with its recorded log-probability and the engine's score, both in nats."""

    session_id: str
    call_id: str
    position: int
    recorded: float
    scored: float

    @property
    def difference(self) -> float:
        """Absolute difference of both, in nats."""
        return abs(self.recorded - self.scored)


@dataclass(frozen=True, slots=True)
class CheckRow:
    """Differences over all sampled tokens of the calls of one kind and one policy version, in
    nats."""

    kind: CallKind
    policy_version: str
    calls: int
    tokens: int
    mean_difference: float
    max_difference: float
    share_over_threshold: float
    """Share of the tokens whose difference exceeds the threshold."""
    worst: ScoredToken
    """The token with the largest difference."""
    within: bool
    """True when the mean difference is at most the threshold."""


@dataclass(frozen=True, slots=True)
class CheckReport(JupyterMixin):
    """Result of a check."""

    recorded_model: str
    served_model: str
    threshold: float
    rounding: float
    """Mean difference of the base model's own sampling from its scores, on a fixed text, in nats.
    """
    rows: list[CheckRow]
    comparable: int
    """Number of calls that can be compared. The sample is taken from these."""
    skipped: dict[str, int]
    """Calls that cannot be compared, by reason."""

    @property
    def within(self) -> bool:
        """True when every row is within the threshold."""
        return all(row.within for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"within": self.within, **asdict(self)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        over = f"over {self.threshold:g}"
        columns = ("prompt", "weights", "calls", "tokens", "mean", "largest", over, "")
        title = "recorded and scored log-probabilities: absolute difference in nats"
        table = Table(*columns, title=title)
        for row in self.rows:
            outcome = Text("within")
            if not row.within:
                outcome = Text("differs", style="red")
            table.add_row(
                row.kind,
                Text(row.policy_version),
                str(row.calls),
                str(row.tokens),
                f"{row.mean_difference:.2g}",
                f"{row.max_difference:.2g}",
                f"{row.share_over_threshold:.1%}",
                outcome,
            )
        yield table
        yield Text(
            f"the limit is {self.threshold:.2g}: on a fixed text, the engine's sampling and its"
            f" scores differ by {self.rounding:.2g}"
        )
        scored = sum(row.calls for row in self.rows)
        yield Text(
            f"{scored} of {self.comparable} calls that can be compared were scored by"
            f" {self.served_model}"
        )
        for reason, count in sorted(self.skipped.items()):
            yield Text(f"skipped: {count} {reason}")
        for row in self.rows:
            if not row.within:
                worst = row.worst
                yield Text(
                    f"{row.kind}, weights {row.policy_version}: differs most at sampled token"
                    f" {worst.position} of session {worst.session_id}, call {worst.call_id}:"
                    f" recorded {worst.recorded:.4f}, scored {worst.scored:.4f}"
                )


def check_run(
    run: Path,
    engine_url: str,
    *,
    sample: int,
    seed: int,
    threshold: float | None,
    advance: Advance,
) -> CheckReport:
    """Score up to `sample` calls of a run on a running engine, and compare.

    `engine_url` may name several engines, with commas. Each scores a share of the calls. Without a
    `threshold` the limit follows from the type of the weights and from the engines' own rounding,
    which is measured. Raises `RunError` when the folder cannot be read, `EngineError` when an
    engine does not answer as it should or may end by it, and `InputError` when no call of the run
    can be compared, which says what the engines serve instead.
    """
    engines = Engines(engine_url)
    engines.each(EngineAdmin.require_scores)
    metadata = read_metadata(run)
    served = served_weights(engines, run, recorded_models(metadata))
    skipped: Counter[str] = Counter()
    versions: set[str] = set()
    comparable: list[CallName] = []
    for session in iter_sessions(run):
        for call in session.calls:
            versions.update(span.version for span in call.weight_versions)
            reason = incomparable(call, served.names, served.max_model_len)
            if reason is not None:
                skipped[reason] += 1
            else:
                comparable.append((call.kind, call.session_id, call.call_id))
    if not comparable:
        reasons = [f"{count} {reason}" for reason, count in skipped.items()]
        why = ", ".join(reasons) or "it holds none"
        sampled = ", ".join(sorted(versions)[:5]) or "nothing"
        raise InputError(
            f"no call of {run} can be compared: {why}; its calls were sampled by the weights"
            f" {sampled}, and {served.found}"
        )
    chosen = choose(comparable, sample, seed)
    scores: list[Score] = []
    for session in iter_sessions(run, {session_id for _, session_id, _ in chosen}):
        for call in session.calls:
            if (call.kind, call.session_id, call.call_id) in chosen:
                advance("calls scored", len(scores), len(chosen))
                engine = engines.admins[len(scores) % len(engines.admins)]
                name = served.names[call.weight_versions[0].version] or engine.models().base
                scores.append((call, engine.score(name, call.prompt_ids, call.completion_ids)))
    rounding = max(engines.each(own_rounding))
    if threshold is None:
        dtype = engines.admins[0].dtype() or "bfloat16"
        threshold = expected_limit(LIMITS[dtype], rounding)
    rows = summarize_scores(scores, threshold)
    model = str(metadata.get("model", ""))
    return CheckReport(
        model, served.root, threshold, rounding, rows, len(comparable), dict(skipped)
    )


def own_rounding(engine: EngineAdmin) -> float:
    """Return the mean difference of an engine's own sampling from its scores of the same tokens, in
    nats."""
    base = engine.models().base
    ids = engine.tokenize(FIXED_TEXT)
    sampled = engine.sample(base, ids, COMPARED)
    return mean_difference(sampled.logprobs, engine.score(base, ids, sampled.ids))


def incomparable(call: Call, names: Collection[str], max_model_len: int) -> str | None:
    """Return the reason why a call cannot be compared on an engine that serves the weights `names`,
    or None."""
    if not call.completion_ids:
        return "nothing sampled"
    if call.violation or find_violation(call.completion_ids, call.logprobs, call.weight_versions):
        return "violation"
    if call.under_grammar:
        return "sampled under a grammar"
    sampling = call.parsed_sampling
    for name in HARMLESS_SAMPLING:
        sampling.pop(name, None)
    if sampling != NEUTRAL_SAMPLING:
        return "not sampled neutrally"
    versions = {span.version for span in call.weight_versions}
    if len(versions) != 1 or not versions <= set(names):
        return "other weights"
    # vLLM samples at least one token after what it scores
    if len(call.prompt_ids) + len(call.completion_ids) >= max_model_len:
        return "too long for the engine"
    return None


def choose(calls: Collection[CallName], count: int, seed: int) -> set[CallName]:
    """Choose up to `count` calls, evenly over the kinds as far as there are calls.

    The choice depends on the seed and on the set of calls, not on their order.
    """
    shuffled = sorted(calls)
    Random(seed).shuffle(shuffled)
    taken = Counter[CallKind]()
    turns = []
    for call in shuffled:
        kind = call[0]
        taken[kind] += 1
        turns.append((taken[kind], KINDS.index(kind), call))
    return {call for _, _, call in sorted(turns)[:count]}


def summarize_scores(scores: Sequence[Score], threshold: float) -> list[CheckRow]:
    """Return one row for each kind and policy version, in the order of `KINDS`."""
    groups: defaultdict[tuple[int, str], list[Score]] = defaultdict(list)
    for call, logprobs in scores:
        key = (KINDS.index(call.kind), call.weight_versions[0].version)
        groups[key].append((call, logprobs))
    rows = []
    for (kind, version), group in sorted(groups.items()):
        tokens = list(_scored_tokens(group))
        differences = [token.difference for token in tokens]
        mean = fmean(differences)
        row = CheckRow(
            kind=KINDS[kind],
            policy_version=version,
            calls=len(group),
            tokens=len(tokens),
            mean_difference=mean,
            max_difference=max(differences),
            share_over_threshold=sum(each > threshold for each in differences) / len(tokens),
            worst=max(tokens, key=attrgetter("difference")),
            within=mean <= threshold,
        )
        rows.append(row)
    return rows


def _scored_tokens(scores: Iterable[Score]) -> Iterator[ScoredToken]:
    for call, logprobs in scores:
        for position, pair in enumerate(zip(call.logprobs, logprobs, strict=True)):
            yield ScoredToken(call.session_id, call.call_id, position, *pair)
