"""Offline training: the groups of recorded runs are the rows, and no engine and no recorder run.

The runs may hold sessions of other policies than the model: the loss corrects by the recorded log-probabilities.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata, tokenizer_digests
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import read_batches
from rolltap.trainer.console import processes_started
from rolltap.trainer.models.loading import load_tokenizer
from rolltap.trainer.names import counted
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import RecordedCalls, RecordedRouting, RecordedSession, load_sessions
from rolltap.trainer.traces.sessions import (
    RewardRules,
    TracedSession,
    TraceOptions,
    label_session,
    make_batch,
    trace_session,
)
from rolltap.trainer.training.arguments import check_arguments, require_machine, training_arguments
from rolltap.trainer.training.attempt import begun_offline, claimed_attempt
from rolltap.trainer.training.grpo.advantages import rewards_differ
from rolltap.trainer.training.grpo.ranks import initialise, on_main
from rolltap.trainer.training.loop import first_on_main, make_trainer, save_finished, train_to_end
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.report import run_reports


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group of a recorded run that trains something: it has sessions with rewards that differ."""

    run: int
    """Index of the run."""
    group_id: str
    session_ids: tuple[str, ...]
    """Sessions with a reward."""
    unrewarded: tuple[str, ...] = ()
    """The others. They are only counted."""
    task_id: str = ""
    """Task of the first session."""
    rewards: tuple[float, ...] = ()
    """Rewards of `session_ids`, by the recipe's rules."""


@dataclass(slots=True)
class Skipped:
    """Sessions of recorded runs that are in no row, and the account of their tokens.

    Attributes:
        groups: Run and group -> number of sessions, and whether one has a reward.
    """

    groups: dict[tuple[int, str], tuple[int, bool]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)

    def add(self, run: int, traced: TracedSession) -> None:
        """Add a session of the run with this index. Its tokens that a trainer would train have no signal."""
        key = run, traced.group_id
        sessions, rewarded = self.groups.get(key, (0, False))
        self.groups[key] = sessions + 1, rewarded or traced.reward is not None
        self.ledger += traced.rewarded().ledger.leave_out("no_signal")

    def __str__(self) -> str:
        kinds = {True: "whose rewards are equal", False: "without a reward"}
        parts = []
        for rewarded, kind in kinds.items():
            if sizes := [sessions for sessions, any_reward in self.groups.values() if any_reward == rewarded]:
                parts.append(f"{counted(len(sizes), 'group')} {kind} ({counted(sum(sizes), 'session')})")
        return f"{', '.join(parts)}; tokens {self.ledger}"


def train(recipe: Recipe, runs: Sequence[Path], *, out: Path, title: str, seed: int, console: Console) -> None:
    """Train on recorded runs, from the start or from the last checkpoint in `out`, to the recipe's last step.

    Every process calls it; the main one alone reads the runs. Raises `InputError` for runs that the recipe's model
    cannot be trained on, `RunError` and, on processes of which another one failed, `RankError`.
    """
    groups = on_main(partial(_groups, recipe, runs))
    args = first_on_main(partial(training_arguments, recipe, out, seed, groups))
    initialise(args)
    source = RecordedTraces(runs, groups, recipe.trace_options())

    def claim() -> None:
        stack.enter_context(claimed_attempt(out, begun_offline(recipe, [astuple(group) for group in groups], seed)))
        sessions = sum(len(group.session_ids) for group in groups)
        console.print(f"{len(groups)} groups whose rewards differ, of {sessions} sessions")
        if (skipped := source.skipped()).groups:
            console.print(f"not trained: {skipped}")

    with ExitStack() as stack:
        on_main(claim)
        rows = Dataset.from_dict({"group": list(range(len(groups))), "task_id": [group.task_id for group in groups]})
        trainer = make_trainer(recipe, args, rows, source, run_reports(out, title, console))
        train_to_end(trainer, console)
        on_main(partial(save_finished, trainer, recipe, out))


def _groups(recipe: Recipe, runs: Sequence[Path]) -> list[RecordedGroup]:
    """Return the groups to train, after the checks of recipe and runs."""
    require_machine(recipe.machine, processes_started())
    check_arguments(recipe)
    temperature = recipe.grpo.get("temperature", 1.0)
    for run in runs:
        _require_tokenizer(run, recipe.model)
    groups = recorded_groups(runs, recipe.trace_options().rewards)
    for number, run in enumerate(runs):
        _require_temperature(
            run, {i for group in groups if group.run == number for i in group.session_ids}, temperature
        )
    if recipe.groups_per_step > len(groups):
        raise InputError(
            f"groups_per_step is {recipe.groups_per_step}, but the runs have {len(groups)} groups to train"
        )
    return groups


class RecordedTraces:
    """Trace source of an offline training. It reads the runs on first use: every process has one, the main one uses it.

    Raises `RunError` for a folder that is not a run.
    """

    def __init__(self, runs: Sequence[Path], groups: Sequence[RecordedGroup], options: TraceOptions) -> None:
        self._runs = runs
        self._groups = groups
        self._options = options

    @cached_property
    def _sessions(self) -> list[dict[str, Session]]:
        return [load_sessions(run) for run in self._runs]

    @cached_property
    def _calls(self) -> list[RecordedCalls]:
        return [RecordedCalls(run) for run in self._runs]

    @cached_property
    def _routing(self) -> list[RecordedRouting | None]:
        return [RecordedRouting(run) if self._options.routing else None for run in self._runs]

    def __call__(self, rows: list[dict[str, Any]]) -> TraceBatch:
        """Return the batch of the groups that the rows name (`group`: index of a group)."""
        batch = TraceBatch()
        for row in rows:
            part = self._load(self._groups[row["group"]])
            batch.traces += part.traces
            batch.rewards |= part.rewards
            batch.unrewarded |= part.unrewarded
            batch.ledger += part.ledger
        return batch

    def skipped(self) -> Skipped:
        """Count the sessions that are in no row. Reads their calls."""
        skipped = Skipped()
        for run, (sessions, calls) in enumerate(zip(self._sessions, self._calls, strict=True)):
            rows = {name for group in self._groups if group.run == run for name in group.session_ids + group.unrewarded}
            for session_id in {*sessions, *calls} - rows:
                skipped.add(run, self._trace(run, session_id))
        return skipped

    def _load(self, group: RecordedGroup) -> TraceBatch:
        """Return the batch of one group. Its id gets the index of its run: two runs may have groups of one name."""
        batch = make_batch(self._trace(group.run, name) for name in group.session_ids + group.unrewarded)
        name = f"{group.run}/{group.group_id}"
        for trace in batch.traces:
            trace.group_id = name
        batch.rewards = {session: replace(reward, group_id=name) for session, reward in batch.rewards.items()}
        batch.unrewarded = {session: replace(why, group_id=name) for session, why in batch.unrewarded.items()}
        return batch

    def _trace(self, run: int, session_id: str) -> TracedSession:
        calls = list(self._calls[run].get(session_id, []))
        session = self._sessions[run].get(session_id)
        recorded = RecordedSession(session_id=session_id, session=session, calls=calls, routing=self._routing[run])
        return trace_session(recorded, self._options)


def recorded_groups(runs: Sequence[Path], rules: RewardRules) -> list[RecordedGroup]:
    """Return the groups of runs that train something, by run and id.

    Groups whose rewards, by the recipe's rules, are all equal are left out: they have no advantage. A session without a
    reward does not count.

    Raises `InputError` when a session id is in two runs and when no group is left, and `RunError` for a folder that is
    not a run.
    """
    owners: dict[str, Path] = {}
    groups: list[RecordedGroup] = []
    rewarded = 0
    for number, run in enumerate(runs):
        rewards: defaultdict[str, dict[str, float]] = defaultdict(dict)
        unrewarded: defaultdict[str, list[str]] = defaultdict(list)
        sessions = load_sessions(run)
        for session_id, session in sessions.items():
            if session_id in owners:
                raise InputError(f"session {session_id} is in {owners[session_id]} and in {run}: name each run once")
            owners[session_id] = run
            if (reward := label_session(session, rules).reward) is not None:
                rewards[session.group_id or session_id][session_id] = reward
            else:
                unrewarded[session.group_id or session_id].append(session_id)
        rewarded += len(rewards)
        for group_id in sorted(rewards):
            if rewards_differ(rewards[group_id].values()):
                ids, given = zip(*sorted(rewards[group_id].items()), strict=True)
                without = tuple(sorted(unrewarded[group_id]))
                groups.append(RecordedGroup(number, group_id, ids, without, sessions[ids[0]].task_id, given))
    if not groups:
        where = ", ".join(map(str, runs))
        why = f"the rewards of each of its {rewarded} groups are equal" if rewarded else "no session has a reward"
        raise InputError(f"nothing to train on in {where}: {why}")
    return groups


def _require_tokenizer(run: Path, model: Path) -> None:
    """Raise `InputError` unless the run has the model's tokenizer and chat template, as far as it names them."""
    metadata = read_metadata(run)
    tokenizer = load_tokenizer(model)
    for name, digest in tokenizer_digests(tokenizer.get_vocab(), tokenizer.chat_template).items():
        if metadata.get(name, digest) != digest:
            what = name.removesuffix("_sha256").replace("_", " ")
            raise InputError(
                f"{run} was recorded with another {what} than that of {model}; its model was {metadata.get('model')}"
            )


def _require_temperature(run: Path, sessions: set[str], temperature: float) -> None:
    """Raise `InputError` when a call of the sessions was sampled at another temperature, as far as calls name it."""
    for batch in read_batches(run, "calls", sessions):
        columns = (batch.column(name).to_pylist() for name in ("session_id", "call_id", "sampling"))
        for session_id, call_id, sampling in zip(*columns, strict=True):
            recorded = json.loads(sampling).get("temperature", temperature)
            if recorded != temperature:
                raise InputError(
                    f"{run}: call {call_id} of session {session_id} was sampled at temperature {recorded}, but "
                    f"grpo.temperature is {temperature}: the trainer would divide the logits by another number than "
                    "the engine did"
                )
