"""Offline training: the groups of recorded runs are the rows, and no engine and no recorder run.

The runs may hold sessions of other policies than the model: the loss corrects by the recorded
log-probabilities.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata, tokenizer_digests, write_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import read_batches
from rolltap.trainer.console import nodes_started, processes_started
from rolltap.trainer.models.loading import load_tokenizer
from rolltap.trainer.names import counted
from rolltap.trainer.runs.merge import require_other_content
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import SessionReader, load_sessions
from rolltap.trainer.traces.sessions import (
    RewardRules,
    TracedSession,
    label_session,
    make_batch,
    open_sessions,
    trace_session,
)
from rolltap.trainer.training.arguments import check_arguments, require_rows, require_unbiased
from rolltap.trainer.training.attempt import Attempt, claimed_attempt, offline_fingerprint
from rolltap.trainer.training.loop import Source
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.step.advantages import rewards_differ


class RecordedGroup(NamedTuple):
    """A group of a recorded run, by its index."""

    run: int
    group_id: str
    session_ids: tuple[str, ...]
    """Sessions with a reward."""
    unrewarded: tuple[str, ...]
    """The others. They are only counted."""
    task_id: str
    """Task of the first session."""
    rewards: tuple[float, ...]
    """Rewards of `session_ids`, by the recipe's rules."""


class RecordedTraces(Source):
    """Source of an offline training: a row has the index of a group of the recorded runs."""

    def __init__(
        self,
        recipe: Recipe,
        runs: Sequence[Path],
        *,
        out: Path,
        seed: int,
        console: Console,
    ) -> None:
        self.groups: Sequence[RecordedGroup] = ()
        self._recipe = recipe
        self._runs = runs
        self._out = out
        self._seed = seed
        self._console = console
        self._options = recipe.trace_options()

    def check(self) -> dict[str, list[Any]]:
        """Check recipe and runs, and return the groups to train and their tasks.

        Raises `InputError` for runs that the recipe's model cannot be trained on, and `RunError`.
        """
        recipe = self._recipe
        check_arguments(recipe, processes_started(), nodes=nodes_started())
        tokenizer = load_tokenizer(recipe.model)
        self._digests = tokenizer_digests(tokenizer.get_vocab(), tokenizer.chat_template)
        for run in self._runs:
            _require_tokenizer(run, recipe.model, self._digests)
        every = recipe.teacher is not None
        self.groups = recorded_groups(self._runs, self._options.rewards, every=every)
        teachers = {
            str(reader.scores.scorer) for reader in self._readers if reader.scores is not None
        }
        if len(teachers) > 1:
            both = " and ".join(teachers)
            raise InputError(f"the scores {recipe.teacher!r} of the runs are of {both}: give one")
        temperature = recipe.grpo.get("temperature", 1.0)
        for number, run in enumerate(self._runs):
            sessions: set[str] = set()
            sessions.update(*(group.session_ids for group in self.groups if group.run == number))
            _require_sampling(run, sessions, temperature)
        require_rows(recipe, len(self.groups), f"the runs have {len(self.groups)} groups to train")
        tasks = [group.task_id for group in self.groups]
        return {"group": list(range(len(tasks))), "task_id": tasks}

    def claim(self, stack: ExitStack) -> Attempt:
        """Claim the folder, make it a run, and say what is trained and what is not."""
        fingerprint = offline_fingerprint(self._recipe, self.groups, self._seed)
        attempt = stack.enter_context(claimed_attempt(self._out, fingerprint))
        write_metadata(self._out, {"model": str(self._recipe.model), **self._digests})
        sessions = sum(len(group.session_ids) for group in self.groups)
        self._console.print(f"{len(self.groups)} groups to train, of {sessions} sessions")
        _, skipped = self.skipped()
        if skipped:
            self._console.print(f"not trained: {skipped}")
        return attempt

    def __call__(self, rows: list[dict[str, Any]]) -> TraceBatch:
        """Return the batch of the groups that the rows name (`group`: index of a group).

        A group's id gets the index of its run: two runs may have groups of one name. A session's id
        gets it where two runs have the id.
        """
        sessions = []
        for row in rows:
            group = self.groups[row["group"]]
            for session_id in group.session_ids + group.unrewarded:
                traced = self._trace(group.run, session_id)
                sessions.append(self._renamed(traced, group))
        return make_batch(sessions)

    def _renamed(self, traced: TracedSession, group: RecordedGroup) -> TracedSession:
        """Give a session the names that it has in batches."""
        recorded = traced.recorded
        group_id = f"{group.run}/{group.group_id}"
        if recorded.session_id in self._shared:
            recorded.session_id = f"{group.run}/{recorded.session_id}"
        if recorded.session is not None:
            recorded.session = replace(recorded.session, group_id=group_id)
        for trace in traced.traces:
            trace.session_id = recorded.session_id
            trace.group_id = group_id
        return traced

    @cached_property
    def _shared(self) -> set[str]:
        """The ids of sessions that several runs have."""
        runs = Counter[str]()
        for reader in self._readers:
            runs.update(reader.session_ids)
        return {session_id for session_id, number in runs.items() if number > 1}

    def skipped(self) -> tuple[Ledger, str]:
        """Return the account of the sessions that are in no row, and a text that counts them; empty
        without any."""
        ledger = Ledger()
        groups = defaultdict[tuple[int, str], list[float | None]](list)
        for run, reader in enumerate(self._readers):
            in_rows: set[str] = set()
            in_rows.update(
                *(group.session_ids + group.unrewarded for group in self.groups if group.run == run)
            )
            for session_id in reader.session_ids:
                if session_id not in in_rows:
                    traced = self._trace(run, session_id)
                    ledger += traced.rewarded().ledger.leave_out("no_signal")
                    groups[run, traced.group_id].append(traced.reward)
        equal = []
        without = []
        for rewards in groups.values():
            if set(rewards) == {None}:
                without.append(len(rewards))
            else:
                equal.append(len(rewards))
        parts = []
        for kind, sizes in {"whose rewards are equal": equal, "without a reward": without}.items():
            if sizes:
                parts.append(
                    f"{counted(len(sizes), 'group')} {kind} ({counted(sum(sizes), 'session')})"
                )
        text = ""
        if parts:
            text = f"{', '.join(parts)}; tokens {ledger}"
        return ledger, text

    @cached_property
    def _readers(self) -> list[SessionReader]:
        return [open_sessions(run, self._options) for run in self._runs]

    def _trace(self, run: int, session_id: str) -> TracedSession:
        return trace_session(self._readers[run].read(session_id), self._options)


def recorded_groups(
    runs: Sequence[Path], rules: RewardRules, *, every: bool = False
) -> list[RecordedGroup]:
    """Return the groups of runs whose rewards, by the recipe's rules, differ, by run and id;
    `every` one with a reward.

    Raises `InputError` when two runs have the same session with the same content and when no group
    is left, and `RunError` for a folder that is not a run.
    """
    groups: list[RecordedGroup] = []
    earlier: dict[Path, Set[str]] = {}
    for number, run in enumerate(runs):
        sessions = load_sessions(run)
        for other, known in earlier.items():
            require_other_content(other, run, known & sessions.keys())
        earlier[run] = sessions.keys()
        groups += _groups_of(number, sessions, rules)
    rewarded = [group for group in groups if group.rewards]
    trained = [group for group in rewarded if every or rewards_differ(group.rewards)]
    if not trained:
        why = "no session has a reward"
        if rewarded:
            why = f"the rewards of each of its {len(rewarded)} groups are equal"
        raise InputError(f"nothing to train on in {', '.join(map(str, runs))}: {why}")
    return trained


def _groups_of(
    run: int, sessions: Mapping[str, Session], rules: RewardRules
) -> list[RecordedGroup]:
    """Return the groups of a run, by id."""
    members: defaultdict[str, list[Session]] = defaultdict(list)
    for _, session in sorted(sessions.items()):
        members[session.group_id or session.session_id].append(session)
    groups = []
    for group_id, group in sorted(members.items()):
        rewards: dict[str, float] = {}
        unrewarded = []
        for session in group:
            reward = label_session(session, rules).reward
            if reward is None:
                unrewarded.append(session.session_id)
            else:
                rewards[session.session_id] = reward
        task_id = group[0].task_id
        groups.append(
            RecordedGroup(
                run, group_id, tuple(rewards), tuple(unrewarded), task_id, tuple(rewards.values())
            )
        )
    return groups


def _require_tokenizer(run: Path, model: Path, digests: Mapping[str, str]) -> None:
    """Raise `InputError` unless the run has the model's tokenizer and chat template, as far as it
    names them."""
    metadata = read_metadata(run)
    for name, digest in digests.items():
        if metadata.get(name, digest) != digest:
            what = name.removesuffix("_sha256").replace("_", " ")
            raise InputError(
                f"{run} was recorded with another {what} than that of {model}; its model was"
                f" {metadata.get('model')}"
            )


def _require_sampling(run: Path, sessions: set[str], temperature: float) -> None:
    """Raise `InputError` when a call of the sessions was sampled in another way, as far as calls
    name it."""
    fix = "record without it, or leave the session out (Run.filter)"
    for batch in read_batches(run, "calls", sessions):
        for call in batch.select(["session_id", "call_id", "sampling"]).to_pylist():
            what = f"{run}: call {call['call_id']} of session {call['session_id']} was sampled"
            require_unbiased(what, json.loads(call["sampling"]), temperature, fix)
