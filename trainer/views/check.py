"""Scores recorded calls again on a running vLLM and compares the log-probabilities.

A call's prompt and completion are sent as one prompt and vLLM reports the log-probability of each token of it
(`prompt_logprobs` of `POST /v1/completions`). These are the policy's own, so only calls that were sampled neutrally,
by weights that the engine serves, can be compared.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.engine.sampling import NEUTRAL_SAMPLING
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call, CallKind, find_violation
from rolltap.trainer.errors import UserError
from rolltap.trainer.traces.reader import iter_sessions

KINDS: tuple[CallKind, ...] = ("root", "bridged", "rendered")
HARMLESS_SAMPLING = {"max_tokens", "seed", "stop", "stop_token_ids", "asked"}
"""Sampling parameters that leave the distribution as it is."""
TIMEOUT = httpx.Timeout(600, connect=10)
"""Seconds. A long prompt is scored in chunks, between the engine's other work."""


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine serves, as far as a run's calls need it."""

    model: str
    """The base model: a folder or a name."""
    names: dict[str, str]
    """Weight version -> the model name by which the engine knows these weights."""
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Score:
    """A call and its score: `logprobs` has the length of the call's completion."""

    call: Call
    logprobs: list[float]

    def differences(self) -> list[float]:
        """Absolute difference of each token's log-probability, in nats."""
        return [abs(a - b) for a, b in zip(self.call.logprobs, self.logprobs, strict=True)]


@dataclass(frozen=True, slots=True)
class Token:
    """The sampled token of a row whose log-probabilities differ most."""

    session_id: str
    call_id: str
    position: int
    recorded: float
    scored: float


@dataclass(frozen=True, slots=True)
class Row:
    """The calls of one kind and one policy version; differences in nats, over all of their sampled tokens."""

    kind: CallKind
    policy_version: str
    calls: int
    tokens: int
    mean_difference: float
    max_difference: float
    share_over_threshold: float
    """Of the tokens."""
    worst: Token
    within: bool
    """Whether the mean difference is within the threshold."""


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a check."""

    recorded_model: str
    served_model: str
    threshold: float
    rows: list[Row]
    comparable: int
    """Calls that could have been scored; the sample is taken from these."""
    skipped: dict[str, int]
    """Calls that cannot be compared, by reason."""

    @property
    def within(self) -> bool:
        """Whether every row is within the threshold."""
        return all(row.within for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"within": self.within, **asdict(self)}


class Scorer:
    """A running vLLM; a context manager. Everything that goes wrong with it is a `UserError`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # the engine is never behind the caller's proxy
        self._client = httpx.Client(timeout=TIMEOUT, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def served(self, run: Path) -> Served:
        """What the engine serves of the weights that sampled `run`: its base model, and the adapter that the run's
        `policy.json` names if it is loaded."""
        cards = self._json("GET", "/v1/models")
        version = self._json("GET", "/weight_info")
        try:
            base = next(card for card in cards["data"] if not card.get("parent"))
            names = {str(version["weight_version"]): str(base["id"])}
            policy = PolicyFile(run).read()
            if policy.model is not None and policy.model in {card["id"] for card in cards["data"]}:
                names[policy.version] = policy.model
            return Served(str(base.get("root") or base["id"]), names, int(base["max_model_len"]))
        except (KeyError, TypeError, StopIteration) as error:
            raise UserError(f"the server at {self._url} is not vLLM: /v1/models answers {cards!r}"[:500]) from error

    def score(self, call: Call, model: str) -> Score:
        """Score a call by the weights that the engine serves as `model`."""
        sequence = [*call.prompt_ids, *call.completion_ids]
        body = {"model": model, "prompt": sequence, "max_tokens": 1, "prompt_logprobs": 0}
        answer = self._json("POST", "/v1/completions", body)
        try:
            entries = answer["choices"][0]["prompt_logprobs"][len(call.prompt_ids) :]
            taken = zip(entries, call.completion_ids, strict=True)
            return Score(call, [float(entry[str(token)]["logprob"]) for entry, token in taken])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            why = f"{self._url}/v1/completions does not report the log-probabilities of call {call.call_id}: {error!r}"
            raise UserError(f"{why}; rolltap needs vLLM 0.32 or newer") from error

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = f"{method} {self._url}{path}"
        try:
            response = self._client.request(method, self._url + path, json=body)
            if response.is_success:
                return response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"{request}: no engine answers ({error!r}); start it with `rolltap serve`, or see --engine"
            ) from error
        except ValueError as error:
            raise UserError(f"{request}: the server is not vLLM, it answers {response.text[:200]!r}") from error
        raise UserError(f"{request}: {response.status_code} {response.text[:500]}; {_advice(path, response)}")


def _advice(path: str, response: httpx.Response) -> str:
    if "out of vocabulary" in response.text:
        return "the engine serves a model with another tokenizer: start it with the model that run.json names"
    if response.status_code == 404 and path == "/v1/completions":
        return "the adapter was unloaded while it was checked: check again"
    if response.status_code == 404:
        return "start vLLM with `rolltap serve`, or with VLLM_SERVER_DEV_MODE=1"
    return "see the engine's log"


def check_run(
    run: Path, engine_url: str, *, sample: int, seed: int, threshold: float, progress: Callable[[int, int], None]
) -> Report:
    """Score up to `sample` calls of a run again; `progress` is told how many of how many are scored.

    Raises `RunError` when the folder cannot be read, and `UserError` when the engine does not answer as it should or
    no call of the run can be compared.
    """
    recorded_model = str(read_metadata(run).get("model", ""))
    skipped: Counter[str] = Counter()
    comparable = 0

    def comparable_calls(served: Served) -> Iterator[Call]:
        nonlocal comparable
        for session in iter_sessions(run):
            for call in session.calls:
                reason = incomparable(call, served)
                if reason is None:
                    comparable += 1
                    yield call
                else:
                    skipped[reason] += 1

    with Scorer(engine_url) as engine:
        served = engine.served(run)
        chosen = choose(comparable_calls(served), sample, seed)
        if not chosen:
            why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "it holds none"
            serves = ", ".join(f"{version} (as {name})" for version, name in served.names.items())
            raise UserError(f"no call of {run} can be compared: {why}; the engine serves the weights {serves}")
        scores = []
        for done, call in enumerate(chosen):
            progress(done, len(chosen))
            scores.append(engine.score(call, served.names[call.weight_versions[0].version]))
        progress(len(chosen), len(chosen))
    rows = summarize_scores(scores, threshold)
    return Report(recorded_model, served.model, threshold, rows, comparable, dict(skipped))


def incomparable(call: Call, served: Served) -> str | None:
    """Why a call cannot be compared with what the engine says, or None."""
    if not call.completion_ids:
        return "nothing sampled"
    if call.violation or find_violation(call.completion_ids, call.logprobs, call.weight_versions):
        return "broken tokens"
    sampling = json.loads(call.sampling)
    if "structured_outputs" in sampling:
        return "sampled under a grammar"
    if any(sampling.get(key) != value for key, value in NEUTRAL_SAMPLING.items()):
        return "not sampled neutrally"
    if sampling.keys() - NEUTRAL_SAMPLING.keys() - HARMLESS_SAMPLING:
        return "not sampled neutrally"
    versions = {span.version for span in call.weight_versions}
    if len(versions) != 1 or not versions <= served.names.keys():
        return "other weights"
    # vLLM samples at least one token after what it scores
    if len(call.prompt_ids) + len(call.completion_ids) >= served.max_model_len:
        return "too long for the engine"
    return None


def choose(calls: Iterable[Call], count: int, seed: int) -> list[Call]:
    """Up to `count` calls, as evenly over the kinds as there are calls; the same for the same seed, in whatever order
    they come. No more than `count` of each kind are held."""
    # each call draws a number; of each kind those with the smallest ones are kept, the largest of them on top
    kept: defaultdict[CallKind, list[tuple[int, str, Call]]] = defaultdict(list)
    for call in calls:
        name = f"{seed} {call.session_id} {call.call_id}"
        drawn = int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
        heappush(kept[call.kind], (-drawn, name, call))
        if len(kept[call.kind]) > count:
            heappop(kept[call.kind])
    turns = []
    for kind, entries in kept.items():
        for turn, (_, _, call) in enumerate(sorted(entries, key=lambda entry: entry[:2], reverse=True)):
            turns.append((turn, KINDS.index(kind), call))
    return [call for _, _, call in sorted(turns, key=lambda entry: entry[:2])[:count]]


def summarize_scores(scores: Sequence[Score], threshold: float) -> list[Row]:
    """One row for each kind and policy version, kinds in the order of `KINDS`."""
    groups: defaultdict[tuple[CallKind, str], list[Score]] = defaultdict(list)
    for score in scores:
        groups[score.call.kind, score.call.weight_versions[0].version].append(score)
    rows = []
    for kind, version in sorted(groups, key=lambda key: (KINDS.index(key[0]), key[1])):
        group = groups[kind, version]
        found = [(d, score, i) for score in group for i, d in enumerate(score.differences())]
        differences = [d for d, _, _ in found]
        largest, score, i = max(found, key=lambda entry: entry[0])
        call, mean = score.call, fmean(differences)
        rows.append(
            Row(
                kind=kind,
                policy_version=version,
                calls=len(group),
                tokens=len(differences),
                mean_difference=mean,
                max_difference=largest,
                share_over_threshold=sum(d > threshold for d in differences) / len(differences),
                worst=Token(call.session_id, call.call_id, i, call.logprobs[i], score.logprobs[i]),
                within=mean <= threshold,
            )
        )
    return rows


def print_report(report: Report, console: Console) -> None:
    """A table of the differences, what was skipped, and where to look when something is not within the threshold."""
    columns = ("prompt", "weights", "calls", "tokens", "mean", "largest", f"over {report.threshold:g}", "")
    table = Table(*columns, title="recorded and scored log-probabilities: absolute difference in nats")
    for row in report.rows:
        table.add_row(
            row.kind,
            Text(row.policy_version),
            str(row.calls),
            str(row.tokens),
            f"{row.mean_difference:.2g}",
            f"{row.max_difference:.2g}",
            f"{row.share_over_threshold:.1%}",
            "within" if row.within else "[red]differs[/]",
        )
    console.print(table)
    scored = sum(row.calls for row in report.rows)
    lines = [f"{scored} of {report.comparable} calls that can be compared were scored by {report.served_model}"]
    lines += [f"skipped: {count} {reason}" for reason, count in sorted(report.skipped.items())]
    for row in report.rows:
        if not row.within:
            worst = row.worst
            lines.append(
                f"{row.kind}, weights {row.policy_version}: differs most at sampled token {worst.position} of session "
                f"{worst.session_id}, call {worst.call_id}: recorded {worst.recorded:.4f}, scored {worst.scored:.4f}"
            )
    if not report.within and report.recorded_model != report.served_model:
        lines.append(f"the run was recorded with {report.recorded_model}: is it the same model?")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
