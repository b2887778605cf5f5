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
from itertools import cycle
from operator import itemgetter, sub
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
        lines = [
            f"{self.name}: {counted(self.calls, 'call')}, {counted(self.tokens, 'token')} scored by"
            f" {self.scorer}"
        ]
        lines.append(f"had scores before: {self.known}")
        if self.divergence is not None:
            lines.append(f"log p_recorded - log p_{self.name}: {self.divergence:.4g} nats a token")
        return Text(
            "\n".join(
                [*lines, *(f"without scores: {n} {why}" for why, n in sorted(self.skipped.items()))]
            )
        )


class Teacher:
    """The engines at `urls`, or an `adapter` of theirs, as a scorer of the tokens of a `model`, and
    of a `run`."""

    def __init__(
        self, urls: str, model: str, adapter: str | None = None, *, run: Path | None = None
    ) -> None:
        """Raises `EngineError`, and `InputError` for engines that differ, or have another tokenizer
        than `model`."""
        entries, tokenizer = named_model(model)
        from rolltap.addons.engine.own_model import (
            OwnModel,
        )  # it needs the recorder's packages, as tokenizers do

        if (
            run is not None
            and read_metadata(run).get("tokenizer_sha256") != entries["tokenizer_sha256"]
        ):
            raise InputError(
                f"{run} was not recorded with the tokenizer that its model {model} has now: put it"
                " back"
            )
        self.engines, self.adapter, scorers = Engines(urls), adapter, set[str]()
        own, models = OwnModel.of(model, tokenizer), self.engines.each(EngineAdmin.models)
        for engine, each in zip(self.engines.admins, models, strict=True):
            if adapter is not None and adapter not in each.adapters:
                raise InputError(
                    f"the engine at {engine.url} serves no adapter {adapter!r}: it has"
                    f" {sorted(each.adapters)}"
                )
            if not engine.has_tokenizer_of(own):
                what = (
                    f"the engine at {engine.url} serves {each.root}, whose tokenizer is not that of"
                    f" {model}"
                )
                raise InputError(
                    f"{what}: it would score other tokens; serve a model with the same tokenizer"
                )
            scorers.add(self._scorer(engine))
        if len(scorers) > 1:
            raise InputError(
                f"the engines serve {' and '.join(sorted(scorers))}: give those of one scorer"
            )
        self.scorer, self.max_model_len = scorers.pop(), min(each.max_model_len for each in models)
        self.engines.each(EngineAdmin.require_scores)

    def _scorer(self, engine: EngineAdmin) -> str:
        version = self.adapter or "without a name"
        with suppress(EngineError):  # its development routes are off
            version = self.adapter or engine.weight_version()
        return f"{engine.models().root} (weights {version})"

    def score(
        self, engine: EngineAdmin, name: str, path: Sequence[Call], top_k: int
    ) -> list[Score]:
        """Return the scores of calls that continue each other. Raises `EngineError`, also for
        weights that changed."""
        start, last = len(path[0].prompt_ids), path[-1]
        model, ids = (
            self.adapter or engine.models().base,
            [*last.prompt_ids[start:], *last.completion_ids],
        )
        entries = engine.score_tokens(model, last.prompt_ids[:start], ids, top_k)
        if (now := self._scorer(engine)) != self.scorer:
            raise EngineError(
                f"the engine at {engine.url} now serves {now}, not {self.scorer}: nothing more is"
                " scored"
            )
        scores = []
        for call in path:
            first = len(call.prompt_ids) - start
            places = entries[first : first + len(call.completion_ids)]
            own = [entry[token] for entry, token in zip(places, call.completion_ids, strict=True)]
            best = [
                pair
                for entry in places
                for pair in sorted(entry.items(), key=itemgetter(1), reverse=True)[:top_k]
            ]
            scores.append(
                score := Score(call.session_id, call.call_id, name, self.scorer, own, top_k)
            )
            score.top_ids, score.top_logprobs = (
                [token for token, _ in best],
                [logprob for _, logprob in best],
            )
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
    scored = reader.scores
    run, name = reader.run, scored.name
    if not name or top_k < 0 or concurrency < 1:
        raise InputError(
            f"name={name!r}, top_k={top_k}, concurrency={concurrency}: give a name, and at least 0"
            " and 1"
        )
    report = ScoreReport(name, teacher.scorer)
    if scored.scorer not in (None, teacher.scorer):
        raise InputError(
            f"the scores {name!r} of {run} are those of {scored.scorer}: score it as another name"
        )
    total = sum(map(reader.count_calls, reader.session_ids if sessions is None else sessions))
    if not total:
        raise InputError(f"{run} has no calls to score")

    def paths() -> Iterator[list[Call]]:
        for recorded in reader.sessions(sessions):
            known, wanted = scored.of(recorded.session_id), dict[int, Call]()
            for i, call in enumerate(recorded.calls):
                before, tokens = known.get(call.call_id), len(call.completion_ids)
                if before and before.top_k >= top_k and len(before.logprobs) == tokens:
                    report.known += 1
                elif tokens and call.violation:
                    report.skipped["violation"] += 1
                elif (
                    tokens and len(call.prompt_ids) + tokens >= teacher.max_model_len
                ):  # vLLM samples one more
                    report.skipped["too long for the engine"] += 1
                elif tokens:
                    wanted[i] = call
            parents, _ = link_calls(recorded.calls)
            for end in find_ends(parents, wanted):
                yield [wanted.pop(i) for i in path_to(end, parents.__getitem__) if i in wanted]

    waiting, engines, difference, compared = paths(), cycle(teacher.engines.admins), 0.0, 0
    running = dict[Future[list[Score]], list[Call]]()
    with RunWriter(run) as writer, ThreadPoolExecutor(concurrency) as pool:
        while True:
            while len(running) < concurrency and (path := next(waiting, None)):
                running[pool.submit(teacher.score, next(engines), name, path, top_k)] = path
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                for call, score in zip(running.pop(done), done.result(), strict=True):
                    writer.add_batch("scores", to_batch(asdict(score), SCORE_SCHEMA))
                    report.calls, report.tokens = (
                        report.calls + 1,
                        report.tokens + len(score.logprobs),
                    )
                    difference += sum(map(sub, call.logprobs, score.logprobs))
                    compared += len(call.logprobs)
            writer.end_session()
            advance("calls scored", report.calls + report.known + report.skipped.total(), total)
    report.divergence = difference / compared if compared else None
    return report
