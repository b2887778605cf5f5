"""Scores every sampled token of a run by the weights of a running vLLM, and stores them in the run
(`Score`).

An engine scores the longest of calls that continue each other, and with it all sampled tokens on
its way. They are committed when its request has ended. Calls that have scores are skipped, so what
was stopped goes on where it was.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from operator import sub
from pathlib import Path
from typing import Any

from rich.jupyter import JupyterMixin
from rich.text import Text

from rolltap.addons.errors import EngineError, InputError
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call
from rolltap.addons.store.rows import to_batch
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.console import Advance
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.names import counted
from rolltap.trainer.runs.import_calls import named_model
from rolltap.trainer.traces.reader import SessionReader
from rolltap.trainer.traces.scores import RecordedScores
from rolltap.trainer.traces.tables import SCORE_SCHEMA, Score
from rolltap.trainer.traces.tree import find_ends, link_calls, path_to


@dataclass(slots=True)
class ScoreReport(JupyterMixin):
    """Result of a scoring by a `scorer`, as `Score` has it.

    Attributes:
        known: Calls that had scores before.
        calls, tokens: Calls and sampled tokens that were scored.
        skipped: Calls with sampled tokens that have no scores, by reason.
        divergence: Mean over the scored tokens of log p_recorded - log p_scorer, in nats; None
            without one.
    """

    name: str
    scorer: str
    known: int = 0
    calls: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    divergence: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)

    def __rich__(self) -> Text:
        scored = f"{counted(self.calls, 'call')}, {counted(self.tokens, 'token')}"
        lines = [f"{self.name}: {scored} scored by {self.scorer}"]
        lines.append(f"had scores before: {self.known}")
        if self.divergence is not None:
            lines.append(f"log p_recorded - log p_{self.name}: {self.divergence:.4g} nats a token")
        for why, number in sorted(self.skipped.items()):
            lines.append(f"without scores: {number} {why}")
        return Text("\n".join(lines))


class Teacher:
    """The engines at `urls`, or an `adapter` of theirs, as a scorer of the tokens of a `model`, and
    of a `run`."""

    def __init__(
        self,
        urls: str,
        model: str,
        adapter: str | None = None,
        *,
        run: Path | None = None,
    ) -> None:
        """Raises `EngineError`, and `InputError` for engines that differ, or have another tokenizer
        than `model`."""
        entries, tokenizer = named_model(model)
        if run is not None:
            recorded = read_metadata(run).get("tokenizer_sha256")
            if recorded != entries["tokenizer_sha256"]:
                raise InputError(
                    f"{run} was not recorded with the tokenizer that its model {model} has now:"
                    " put it back"
                )
        # it needs the recorder's packages, as tokenizers do
        from rolltap.addons.engine.own_model import OwnModel

        own = OwnModel.of(model, tokenizer)
        self.engines = Engines(urls)
        self.adapter = adapter
        models = self.engines.each(EngineAdmin.models)
        scorers = set()
        for engine, served in zip(self.engines.admins, models, strict=True):
            if adapter is not None and adapter not in served.adapters:
                raise InputError(
                    f"the engine at {engine.url} serves no adapter {adapter!r}: it has"
                    f" {sorted(served.adapters)}"
                )
            if not engine.has_tokenizer_of(own):
                raise InputError(
                    f"the engine at {engine.url} serves {served.root}, whose tokenizer is not that"
                    f" of {model}: it would score other tokens; serve a model with the same"
                    " tokenizer"
                )
            scorers.add(self._scorer(engine))
        if len(scorers) > 1:
            raise InputError(
                f"the engines serve {' and '.join(sorted(scorers))}: give those of one scorer"
            )
        self.scorer = scorers.pop()
        self.max_model_len = min(served.max_model_len for served in models)
        self.engines.each(EngineAdmin.require_scores)

    def _scorer(self, engine: EngineAdmin) -> str:
        version = "without a name"
        if self.adapter is not None:
            version = self.adapter
        else:
            with suppress(EngineError):  # its development routes are off
                version = engine.weight_version()
        return f"{engine.models().root} (weights {version})"

    def score(
        self,
        engine: EngineAdmin,
        name: str,
        path: Sequence[Call],
        top_k: int,
    ) -> list[Score]:
        """Return the scores of calls that continue each other. Raises `EngineError`, also for
        weights that changed."""
        start = len(path[0].prompt_ids)
        last = path[-1]
        ids = [*last.prompt_ids[start:], *last.completion_ids]
        model = self.adapter or engine.models().base
        entries = engine.score_tokens(model, last.prompt_ids[:start], ids, top_k)
        now = self._scorer(engine)
        if now != self.scorer:
            raise EngineError(
                f"the engine at {engine.url} now serves {now}, not {self.scorer}: nothing more is"
                " scored"
            )
        scores = []
        for call in path:
            score = Score(call.session_id, call.call_id, name, self.scorer, [], top_k)
            for place, token in enumerate(call.completion_ids, len(call.prompt_ids) - start):
                entry = entries[place]
                score.logprobs.append(entry[token])
                score.top_ids += sorted(entry, key=entry.__getitem__, reverse=True)[:top_k]
                score.top_logprobs += sorted(entry.values(), reverse=True)[:top_k]
            scores.append(score)
        return scores


def score_run(
    reader: SessionReader,
    teacher: Teacher,
    advance: Advance = lambda *_: None,
    sessions: Collection[str] | None = None,
    top_k: int = 0,
    concurrency: int = 8,
) -> ScoreReport:
    """Give the calls of a reader's run, or of some `sessions`, scores of the name of its scores.

    Raises as `Run.score`.
    """
    assert reader.scores is not None
    name = reader.scores.name
    if not name or top_k < 0 or concurrency < 1:
        given = f"name={name!r}, top_k={top_k}, concurrency={concurrency}"
        raise InputError(f"{given}: give a name, and at least 0 and 1")
    scorer = reader.scores.scorer
    if scorer not in (None, teacher.scorer):
        raise InputError(
            f"the scores {name!r} of {reader.run} are those of {scorer}: score it as another name"
        )
    total = sum(map(reader.count_calls, reader.session_ids if sessions is None else sessions))
    if not total:
        raise InputError(f"{reader.run} has no calls to score")
    report = ScoreReport(name, teacher.scorer)
    apart = 0.0
    compared = 0
    waiting = _paths(reader, reader.scores, teacher.max_model_len, sessions, top_k, report)
    engines = cycle(teacher.engines.admins)
    running: dict[Future[list[Score]], list[Call]] = {}
    with RunWriter(reader.run) as writer, ThreadPoolExecutor(concurrency) as pool:
        while True:
            for path in islice(waiting, concurrency - len(running)):
                running[pool.submit(teacher.score, next(engines), name, path, top_k)] = path
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                for call, score in zip(running.pop(done), done.result(), strict=True):
                    writer.add_batch("scores", to_batch(asdict(score), SCORE_SCHEMA))
                    report.calls += 1
                    report.tokens += len(score.logprobs)
                    apart += sum(map(sub, call.logprobs, score.logprobs))
                    compared += len(call.logprobs)
            writer.end_session()
            advance("calls scored", report.calls + report.known + report.skipped.total(), total)
    if compared:
        report.divergence = apart / compared
    return report


def _paths(
    reader: SessionReader,
    scored: RecordedScores,
    max_model_len: int,
    sessions: Collection[str] | None,
    top_k: int,
    report: ScoreReport,
) -> Iterator[list[Call]]:
    """Yield the calls that need scores, each once, in lists of calls that continue each other.

    Counts the others in the report.
    """
    for recorded in reader.sessions(sessions):
        known = scored.of(recorded.session_id)
        wanted: dict[int, Call] = {}
        for number, call in enumerate(recorded.calls):
            tokens = len(call.completion_ids)
            before = known.get(call.call_id)
            if before and before.top_k >= top_k and len(before.logprobs) == tokens:
                report.known += 1
            elif not tokens:
                continue
            elif call.violation:
                report.skipped["violation"] += 1
            # vLLM samples one token more
            elif len(call.prompt_ids) + tokens >= max_model_len:
                report.skipped["too long for the engine"] += 1
            else:
                wanted[number] = call
        parents, _ = link_calls(recorded.calls)
        for end in find_ends(parents, wanted):
            path = path_to(end, parents.__getitem__)
            yield [wanted.pop(number) for number in path if number in wanted]
