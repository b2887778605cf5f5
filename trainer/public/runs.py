"""A run folder as an object: its sessions, calls and traces, and what can be made of them."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Unpack

from rolltap.addons.errors import InputError, MissingPackageError, install_command
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import CallRole as CallRole
from rolltap.addons.store.records import Session
from rolltap.addons.store.records import SessionStatus as SessionStatus
from rolltap.addons.store.rewards import GivenReward, give_reward
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.console import progress_bar
from rolltap.trainer.runs.edit import Filter, filter_run, split_run
from rolltap.trainer.runs.edit import SplitBy as SplitBy
from rolltap.trainer.runs.exports import ExportFormat as ExportFormat
from rolltap.trainer.runs.exports import exporter
from rolltap.trainer.runs.import_calls import ImportSummary
from rolltap.trainer.runs.import_calls import import_calls as _import_calls
from rolltap.trainer.runs.merge import LeftBehind
from rolltap.trainer.runs.merge import merge_runs as _merge_runs
from rolltap.trainer.runs.secrets import find_in_run
from rolltap.trainer.runs.verify import Verification
from rolltap.trainer.runs.verify import verify_run as _verify_run
from rolltap.trainer.runs.views.calls import CallView, view_call
from rolltap.trainer.runs.views.check import CheckReport, check_run
from rolltap.trainer.runs.views.compare import Difference
from rolltap.trainer.runs.views.compare import compare_sessions as first_difference
from rolltap.trainer.runs.views.evaluation import Comparison, compare_sessions
from rolltap.trainer.runs.views.inspect import (
    SessionView,
    find_session,
    find_session_id,
    view_session,
)
from rolltap.trainer.runs.views.report import Summary, summarize
from rolltap.trainer.runs.views.score import ScoreReport, Teacher, score_run
from rolltap.trainer.runs.views.sessions import Sort as Sort
from rolltap.trainer.runs.views.sessions import follow_sessions
from rolltap.trainer.runs.views.text import load_decoder
from rolltap.trainer.runs.views.training import read_training as read_training
from rolltap.trainer.traces.build import TRAINED_ROLES as TRAINED_ROLES
from rolltap.trainer.traces.build import Strategy as Strategy
from rolltap.trainer.traces.build import Trace, TraceBatch, require_collection
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import (
    RecordedCalls,
    SessionReader,
    load_sessions,
    recorded_ids,
    unknown_session,
)
from rolltap.trainer.traces.scores import RecordedScores
from rolltap.trainer.traces.sessions import (
    Totals,
    TracedSession,
    TraceOptions,
    iter_traces,
    load_batch,
)
from rolltap.trainer.traces.tables import Score
from rolltap.trainer.viewer.file import WrittenFile, write_file

logger = logging.getLogger(__name__)


class RunTraces:
    """The traces of a run, by one strategy.

    Iterating yields `Trace`s, session by session, in bounded memory.
    """

    def __init__(self, run: Path, options: TraceOptions) -> None:
        self._run = run
        self._options = options

    def __repr__(self) -> str:
        return f"RunTraces({str(self._run)!r}, {self._options.strategy!r})"

    def __iter__(self) -> Iterator[Trace]:
        for traced in self.by_session(progress=False):
            yield from traced.traces

    def by_session(self, *, progress: bool = True) -> Iterator[TracedSession]:
        """Yield every session with its traces and its ledger.

        Sessions without a reward have traces here.
        """
        total = len(recorded_ids(self._run)) if progress else 0
        with progress_bar(show=progress) as advance:
            for done, traced in enumerate(iter_traces(self._run, self._options), 1):
                yield traced
                advance("sessions", done, total)

    def batch(self, session_ids: Collection[str] | None = None) -> TraceBatch:
        """Return all traces as one batch for `TraceGRPOTrainer`, or those of `session_ids`.

        The batch has the reward of every session that has one. Tokens of the others are left out
        for a reason of `LeftOut`. Groups of equal rewards are in the batch; their advantages are 0.
        The ledger has been checked against the traces. Set `on_policy` of the batch when the
        weights to be trained sampled it.

        Raises `InputError` for a session that is not in the run.
        """
        return load_batch(self._run, session_ids, self._options)

    def totals(
        self,
        each: Callable[[Trace], None] | None = None,
        *,
        progress: bool = True,
    ) -> Totals:
        """Count sessions, calls, traces, rewards and tokens. `each` is called with every trace."""
        totals = Totals()
        for traced in self._told(each, progress):
            totals.add(traced)
        return totals

    def save(
        self,
        out: str | Path,
        each: Callable[[Trace], None] | None = None,
        *,
        progress: bool = True,
    ) -> Totals:
        """Write the traces to the new folder `out`, a dataset for `datasets.load_from_disk`.

        Returns the counts. `each` is called with every trace. Raises `RunError` when `out` is not
        empty.
        """
        # datasets takes a second to import
        from rolltap.trainer.runs.exports.parquet import save_traces

        return save_traces(self._run, self._told(each, progress), Path(out), self._options)

    def _told(
        self,
        each: Callable[[Trace], None] | None,
        progress: bool,
    ) -> Iterator[TracedSession]:
        for traced in self.by_session(progress=progress):
            if each is not None:
                for trace in traced.traces:
                    each(trace)
            yield traced


class Run:
    """A run folder.

    Methods read the folder again at each call; `calls` is a view of it at the time of the access.

    Methods raise `RunError` when the folder cannot be read, and `LedgerError` when sampled tokens
    are unaccounted for.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises `RunError` when `path` is not a run, or is one of another schema version."""
        self.path = Path(path)
        self.new_session_ids: tuple[str, ...] = ()
        """Sessions of the groups of the `rollout` that returned this run: all attempts, those of
        earlier calls too."""
        read_metadata(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def metadata(self) -> dict[str, Any]:
        """The contents of `run.json`: model, tokenizer and template hashes, recorders, engines."""
        return read_metadata(self.path)

    def sessions(self) -> list[Session]:
        """Return the sessions that have calls or a row.

        Those with calls are first, in the order of their first commits.

        A session without a row has the status `unknown`, no reward, and the times of its calls.
        """
        rows = load_sessions(self.path)
        calls = self.calls
        found = []
        for session_id in dict.fromkeys([*calls, *rows]):
            row = rows.get(session_id)
            found.append(row or unknown_session(session_id, calls[session_id]))
        return found

    @property
    def calls(self) -> RecordedCalls:
        """The model calls: session id -> its calls in the order in which they started.

        The mapping reads one session at each access. Keep it to look up several sessions.
        """
        return RecordedCalls(self.path)

    def traces(
        self,
        strategy: Strategy = "prefix_merging",
        *,
        roles: Collection[CallRole] = TRAINED_ROLES,
        max_tokens: int | None = None,
        routing: bool = False,
        scores: str | None = None,
    ) -> RunTraces:
        """Return the traces of all sessions, built when they are iterated over.

        `strategy` is `per_request` (one trace for each call), `prefix_merging` (one for each path
        from a root of the call tree to a leaf) or `tree` (the same, with the prefix that each trace
        shares with an earlier one). Every strategy trains the same sampled tokens. `roles` are the
        roles of the calls that are trained. `max_tokens` cuts off the end of longer traces. With
        `routing` each trace has the experts of its tokens, with a name of `scores` those; tokens of
        calls without them are left out as `missing_routing` and `missing_scores`.

        Raises `InputError` for an unknown strategy or role, and for `max_tokens` below 1.
        """
        return RunTraces(
            self.path,
            TraceOptions(strategy, roles, max_tokens, routing=routing, scores=scores),
        )

    def score(
        self,
        engine: str,
        name: str,
        *,
        adapter: str | None = None,
        sessions: Collection[str] | None = None,
        top_k: int = 0,
        concurrency: int = 8,
        progress: bool = True,
    ) -> ScoreReport:
        """Store the log-probability of every sampled token by an engine's model, or by an
        `adapter`.

        `name` is that of the scores. With `sessions` those of their calls; with `top_k` also the
        likeliest tokens. Calls that have them are skipped.

        Raises `InputError` for another tokenizer, a `name` of another scorer, unknown ids and no
        calls; `EngineError`.
        """
        ids = None
        if sessions is not None:
            ids = {find_session_id(self.path, each) for each in sessions}
        teacher = Teacher(engine, str(self.metadata.get("model", "")), adapter, run=self.path)
        with progress_bar(show=progress) as advance:
            reader = SessionReader(self.path, scores=RecordedScores(self.path, name, some=False))
            return score_run(
                reader,
                teacher,
                advance,
                sessions=ids,
                top_k=top_k,
                concurrency=concurrency,
            )

    def scores(self, name: str, session_id: str) -> dict[str, Score]:
        """Return call id -> the scores of a session's calls that have the name.

        Raises `InputError` if none has it.
        """
        return RecordedScores(self.path, name).of(find_session_id(self.path, session_id))

    def ledger(self) -> Ledger:
        """Return the account of all sampled tokens. Those without a reward are left out."""
        total = Ledger()
        for traced in iter_traces(self.path, TraceOptions()):
            total += traced.rewarded().ledger
        return total

    def summary(
        self,
        *,
        task: str | None = None,
        group: str | None = None,
        sort: Sort = "started",
    ) -> Summary:
        """Return counts of the run, rewards by policy version and task, and the ledger.
        `rich.print` shows tables.

        With `task` or `group`, an id or a unique prefix of it, only the sessions that have it
        count. `sort` is the order of the sessions: `started`, the highest `reward`, the most
        `tokens` or `calls` first, or by `task`.

        Raises `InputError` for a task or group that no session has.
        """
        return summarize(self.path, task=task, group=group, sort=sort)

    def follow(self, *, task: str | None = None, group: str | None = None) -> Iterator[Session]:
        """Yield the rows of the sessions, then each further one when its session has ended.

        It does not end.

        With `task` or `group`, a whole id, only those of sessions that have it. Looks once a
        second.
        """
        return follow_sessions(self.path, task, group, wait=partial(time.sleep, 1.0))

    def inspect_session(self, session_id: str) -> SessionView:
        """Return one session with its call tree and its ledger, as `rolltap inspect` shows it.

        Unique prefixes of the id are accepted. Raises `InputError` for an unknown id.
        """
        return view_session(self.path, session_id)

    def inspect_call(self, session_id: str, call_id: str, *, full: bool = False) -> CallView:
        """Return one call with its messages and its tools.

        A rendered prompt has the place where it leaves the recorded tokens.

        With `full` all messages and prompt tokens are shown, not only the new ones. Unique prefixes
        of both ids are accepted, and the number of the call in its session, from 1. Raises
        `InputError` for an unknown id.
        """
        return view_call(self.path, session_id, call_id, full=full)

    def compare_sessions(self, first_id: str, second_id: str) -> Difference:
        """Return the first message and the first token in which two sessions of the run differ.

        Unique prefixes of both ids are accepted. Raises `InputError` for an unknown id.
        """
        first = find_session(self.path, first_id)
        second = find_session(self.path, second_id)
        return first_difference(first, second, self.path)

    def reward(
        self,
        session_id: str,
        value: float,
        *,
        parts: Mapping[str, float] | None = None,
        task: str = "",
        group: str = "",
        change: bool = False,
    ) -> Session:
        """Give a session the reward `value`, a finite number, and return its new row.

        The earlier rows stay in the run.

        `task` and `group`, if not empty, replace those of the session; one in a group of its own
        joins that of `task`. Unique prefixes of the id are accepted.

        Raises `InputError`, `RunError` and `OSError` as `GivenReward` and `give_reward`.
        """
        given = GivenReward(
            value=value,
            parts=parts or {},
            task=task,
            group=group,
            source="rolltap reward",
        )
        with RunWriter(self.path) as writer:
            return give_reward(writer, find_session_id(self.path, session_id), given, change=change)

    def verify(self, *, repair: bool = False, progress: bool = True) -> Verification:
        """Check the run, as `verify_run`."""
        return verify_run(self.path, repair=repair, progress=progress)

    def check(
        self,
        engine: str,
        *,
        sample: int = 100,
        seed: int = 0,
        threshold: float | None = None,
        progress: bool = True,
    ) -> CheckReport:
        """Score recorded calls again on a running engine, and compare the log-probabilities.

        At most `sample` calls are scored; `seed` chooses them. A row of the report is within the
        `threshold` when its mean absolute difference is at most that, in nats. By default it
        follows from the type of the weights and from the engine's own rounding, which is measured.
        Calls that cannot be compared are skipped and counted. An engine of `rolltap serve` that
        takes adapters computes each score alone, and other calls wait meanwhile.

        Raises `EngineError` when the engine does not answer, or may end by scores beside other
        calls, and `InputError` when no call can be compared.
        """
        with progress_bar(show=progress) as advance:
            return check_run(
                self.path,
                engine,
                sample=sample,
                seed=seed,
                threshold=threshold,
                advance=advance,
            )

    def compare(self, other: "Run | str | Path") -> Comparison:
        """Compare the rewards of this run and of another one of the same tasks."""
        second = other if isinstance(other, Run) else open_run(other)
        return compare_sessions(self.sessions(), second.sessions())

    def export(self, target: ExportFormat, out: str | Path, *, progress: bool = True) -> int:
        """Write the run in another format to the new folder `out`. Returns the number of records.

        `parquet`: a dataset with the configs `traces`, `calls`, `sessions` and `events`. `atif`:
        Harbor's trajectories. `messages`: chats for supervised fine-tuning.

        Raises `RunError` when `out` is not empty.
        """
        export = exporter(target)
        with new_folder(Path(out)) as folder, progress_bar(show=progress) as advance:
            return export(self.path, folder, advance)

    def push_to_hub(self, repo: str, *, public: bool = False, progress: bool = True) -> str:
        """Push the run as Parquet to the dataset repository `repo` (ORG/NAME) and return its URL.

        The token is that of `hf auth login` or HF_TOKEN. A new repository is private unless
        `public`. Former Parquet files and the card in it are replaced. Sessions with a known form
        of a key, a token or a password in their texts or tokens are left out, as token ids cannot
        be redacted; a warning names them.

        Raises `InputError` without a token, for a malformed name, for a repository that is public
        while `public` is False, and when no session is left; `HubError` when the Hub refuses or
        cannot be reached.
        """
        from rolltap.trainer.runs.exports import parquet
        from rolltap.trainer.runs.exports.hub import Repository

        repository = Repository(repo, public=public)
        found = find_in_run(self.path, load_decoder(self.path))
        for session_id, kinds in sorted(found.items(), key=str):
            name = f"session {session_id}" if session_id else "events without a session"
            logger.warning(
                "not pushed: %s, which has what looks like a secret (%s)",
                name,
                ", ".join(sorted(kinds)),
            )
        if found and not recorded_ids(self.path) - found.keys():
            raise InputError(
                f"every session of {self.path} has what looks like a secret: nothing is pushed",
            )
        with TemporaryDirectory(prefix="rolltap-") as temporary:
            folder = Path(temporary) / "data"
            with new_folder(folder) as unfinished, progress_bar(show=progress) as advance:
                parquet.export(
                    self.path,
                    unfinished,
                    advance,
                    where=repository.name,
                    leave_out=found,
                )
            return repository.upload(folder, f"{self.path.resolve().name}, exported by rolltap")

    def filter(
        self,
        out: str | Path,
        *,
        progress: bool = True,
        **criteria: Unpack[Filter],
    ) -> "Run":
        """Write the sessions that meet every criterion to the new folder `out`, and return it.

        The criteria are `min_reward`, `max_reward` (None is none), and the accepted `harnesses`,
        `policy_versions`, `statuses`, `session_ids`, `tasks` and `runtimes`. `roles` keeps only the
        calls of these roles, and the calls that their prompts continue. A session without such a
        call is left out, and so are events without a session. `suspicious` is whether a session's
        row has suspicions, `suspicions` are names of rules of which it matched one. Raises
        `InputError` when no session is left, when one of `session_ids` does not exist, and for no
        rule's name.
        """
        with progress_bar(show=progress) as advance:
            filter_run(self.path, Path(out), criteria, advance)
        return Run(out)

    def split(
        self,
        out: str | Path,
        *,
        by: SplitBy | None = None,
        parts: int | None = None,
        progress: bool = True,
    ) -> dict[str, "Run"]:
        """Write the sessions to several runs in the new folder `out`, and return them by name.

        One run for each value of the session field `by`, or `parts` runs of about as many sessions
        each, with groups kept whole. Events without a session go to the first. Raises `InputError`
        unless exactly one of `by` and `parts` is given, and for more parts than groups.
        """
        with progress_bar(show=progress) as advance:
            names = split_run(self.path, Path(out), advance, by=by, parts=parts)
        return {name: Run(Path(out, name)) for name in names}

    def view_file(
        self,
        out: str | Path,
        *,
        sessions: Collection[str] | None = None,
        redact: Collection[str] = (),
        progress: bool = True,
    ) -> WrittenFile:
        """Write the page of `view_run` as one HTML file, which opens without a network.

        It has these `sessions`; without them, all of a run of at most 50. Unique prefixes of their
        ids are accepted. What looks like a secret is redacted, and so are the texts of `redact`: in
        texts, and in the tokens. The result says what was.

        Raises `InputError` for an unknown session, and when they have to be chosen; `OSError` for
        the file.
        """
        for given in (redact, sessions or ()):
            require_collection(given)
        with progress_bar(show=progress) as advance:
            return write_file(self.path, Path(out), sessions, redact, advance)


def view_run(
    path: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    say: Callable[[str], None] = print,
) -> None:
    """Serve a page that shows a run in the browser, until a signal.

    `say` is told the link, which has a token.

    `port` 0 is a free one. The run may be one that is being recorded. Raises `MissingPackageError`
    without FastAPI and uvicorn, `RunError` when `path` is not a run, and `OSError` for an address
    that is not free.
    """
    try:
        from rolltap.trainer.viewer.serve import serve
    except ImportError as error:
        raise MissingPackageError(
            f"rolltap view needs packages ({error}): {install_command('service')}",
        ) from error
    run_blocking(serve(Path(path), host=host, port=port, say=say))


def open_run(path: str | Path) -> Run:
    """Return the run in a folder.

    Raises `RunError` when it is not a run, or is one of another schema version.
    """
    return Run(path)


def merge_runs(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    progress: bool = True,
) -> tuple[Run, list[LeftBehind]]:
    """Write the sessions of several runs, or of one that is damaged, to the new folder `out`.

    Returns the new run, and the rows and places that were not copied: they cannot be read, or their
    digest does not match. When two runs have sessions or groups of equal names, the names of the
    later run get a prefix; the entries of `merged_from` in `metadata` have it. Raises `InputError`
    for no runs, for different tokenizers, and for a session with the same content in several runs;
    and `RunError`.
    """
    require_collection(runs)
    if not runs:
        raise InputError("the list of runs is empty: give at least one")
    with progress_bar(show=progress) as advance:
        _, left_behind = _merge_runs([Path(run) for run in runs], Path(out), advance)
    return Run(out), left_behind


def import_calls(
    file: str | Path | BinaryIO,
    out: str | Path,
    *,
    model: str | Path | None = None,
    skip_bad: bool = False,
    report: Callable[[int, str], None] = lambda number, fault: None,
    progress: bool = True,
) -> ImportSummary:
    """Write calls from JSON Lines to the new run `out`.

    `rolltap import --help` lists the keys of a line.

    `model` is the folder or name of the model whose tokens they are. Without it, `merge_runs` and
    `train_offline` take the import for one of their model.

    `report` is called with the number of each bad line and its fault. With bad lines nothing is
    imported, unless `skip_bad` leaves them out. Raises `InputError` when nothing is imported, with
    the first faults, and for a `model` without a tokenizer; `MissingPackageError` when transformers
    is missing for it; `RunError` for an `out` with files.
    """
    model = None if model is None else str(model)
    with progress_bar(show=progress) as advance, ExitStack() as stack:
        lines = stack.enter_context(open(file, "rb")) if isinstance(file, str | Path) else file
        return _import_calls(
            lines,
            Path(out),
            model=model,
            skip_bad=skip_bad,
            report=report,
            advance=advance,
        )


def verify_run(path: str | Path, *, repair: bool = False, progress: bool = True) -> Verification:
    """Check every file, digest and invariant of a run folder.

    A run that is being recorded can be verified.

    `repair` removes only what a crash left behind: an end that was not a whole commit, and
    temporary files that no process writes. Raises `RunError` when the folder is not a run, or is
    one of another schema version.
    """
    with progress_bar(show=progress) as advance:
        return _verify_run(Path(path), advance, repair=repair)
