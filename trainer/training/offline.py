"""Offline training: the groups of recorded runs are the rows, and no engine and no recorder run.

The runs may hold sessions of other policies than the model: the loss corrects by the recorded log-probabilities.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata, tokenizer_digests, write_metadata
from rolltap.addons.store.tables import read_batches
from rolltap.trainer.console import nodes_started, processes_started
from rolltap.trainer.models.loading import load_tokenizer
from rolltap.trainer.names import counted
from rolltap.trainer.runs.edit import require_other_content
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
from rolltap.trainer.training.arguments import biased, check_arguments, require_rows
from rolltap.trainer.training.attempt import Attempt, claimed_attempt, offline_fingerprint
from rolltap.trainer.training.loop import Source
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.step.advantages import rewards_differ


class RecordedGroup(NamedTuple):
    """A group of a recorded run, by its index, that trains something: it has sessions with rewards that differ."""

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

    def __init__(self, recipe: Recipe, runs: Sequence[Path], *, out: Path, seed: int, console: Console) -> None:
        self.groups: Sequence[RecordedGroup] = ()
        self._recipe, self._runs, self._out, self._seed, self._console = recipe, runs, out, seed, console
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
        self.groups = recorded_groups(self._runs, self._options.rewards, every=recipe.teacher is not None)
        teachers = {reader.scores.scorer for reader in self._readers if reader.scores is not None}
        if len(teachers) > 1:
            both = " and ".join(map(str, teachers))
            raise InputError(f"the scores {recipe.teacher!r} of the runs are of {both}: give one")
        for number, run in enumerate(self._runs):
            sessions = {name for group in self.groups if group.run == number for name in group.session_ids}
            _require_sampling(run, sessions, recipe.grpo.get("temperature", 1.0))
        require_rows(recipe, len(self.groups), f"the runs have {len(self.groups)} groups to train")
        return {"group": list(range(len(self.groups))), "task_id": [group.task_id for group in self.groups]}

    def claim(self, stack: ExitStack) -> Attempt:
        """Claim the folder, make it a run, and say what is trained and what is not."""
        fingerprint = offline_fingerprint(self._recipe, self.groups, self._seed)
        attempt = stack.enter_context(claimed_attempt(self._out, fingerprint))
        write_metadata(self._out, {"model": str(self._recipe.model), **self._digests})
        sessions = sum(len(group.session_ids) for group in self.groups)
        self._console.print(f"{len(self.groups)} groups to train, of {sessions} sessions")
        if skipped := self.skipped()[1]:
            self._console.print(f"not trained: {skipped}")
        return attempt

    def __call__(self, rows: list[dict[str, Any]]) -> TraceBatch:
        """Return the batch of the groups that the rows name (`group`: index of a group).

        A group's id gets the index of its run: two runs may have groups of one name. A session's id gets it where two
        runs have the id.
        """
        batch = TraceBatch()
        for row in rows:
            group = self.groups[row["group"]]
            part = make_batch(self._trace(group.run, name) for name in group.session_ids + group.unrewarded)
            name = f"{group.run}/{group.group_id}"
            named = {id: f"{group.run}/{id}" if id in self._shared else id for id in part.accounts}
            batch.traces += [replace(trace, session_id=named[trace.session_id], group_id=name) for trace in part.traces]
            batch.rewards |= {named[id]: replace(reward, group_id=name) for id, reward in part.rewards.items()}
            batch.unrewarded |= {named[id]: replace(why, group_id=name) for id, why in part.unrewarded.items()}
            batch.accounts |= {named[id]: replace(account, group_id=name) for id, account in part.accounts.items()}
            batch.ledger += part.ledger
        return batch

    @cached_property
    def _shared(self) -> set[str]:
        """The ids of sessions that several runs have."""
        runs = Counter[str]()
        for reader in self._readers:
            runs.update(reader.session_ids)
        return {session_id for session_id, number in runs.items() if number > 1}

    def skipped(self) -> tuple[Ledger, str]:
        """Return the account of the sessions that are in no row, and a text that counts them; empty without any."""
        ledger = Ledger()
        groups = defaultdict[tuple[int, str], list[float | None]](list)
        rows = [set[str]() for _ in self._runs]
        for group in self.groups:
            rows[group.run].update(group.session_ids, group.unrewarded)
        for run, reader in enumerate(self._readers):
            for session_id in reader.session_ids:
                if session_id in rows[run]:
                    continue
                traced = self._trace(run, session_id)
                ledger += traced.rewarded().ledger.leave_out("no_signal")
                groups[run, traced.group_id].append(traced.reward)
        parts = []
        for kind, without in (("whose rewards are equal", False), ("without a reward", True)):
            sizes = [len(given) for given in groups.values() if (set(given) == {None}) == without]
            if sizes:
                parts.append(f"{counted(len(sizes), 'group')} {kind} ({counted(sum(sizes), 'session')})")
        return ledger, f"{', '.join(parts)}; tokens {ledger}" if parts else ""

    @cached_property
    def _readers(self) -> list[SessionReader]:
        return [open_sessions(run, self._options) for run in self._runs]

    def _trace(self, run: int, session_id: str) -> TracedSession:
        return trace_session(self._readers[run].read(session_id), self._options)


def recorded_groups(runs: Sequence[Path], rules: RewardRules, *, every: bool = False) -> list[RecordedGroup]:
    """Return the groups of runs whose rewards, by the recipe's rules, differ, by run and id; `every` one with a reward.

    Raises `InputError` when two runs have the same session with the same content and when no group is left, and
    `RunError` for a folder that is not a run.
    """
    ids: list[set[str]] = []
    groups: list[RecordedGroup] = []
    rewarded = 0
    for number, run in enumerate(runs):
        members: defaultdict[str, list[str]] = defaultdict(list)
        sessions = load_sessions(run)
        for other, known in zip(runs, ids, strict=False):
            require_other_content(other, run, known & sessions.keys())
        ids.append(set(sessions))
        for session_id, session in sorted(sessions.items()):
            members[session.group_id or session_id].append(session_id)
        for group_id, names in sorted(members.items()):
            labels = {name: label_session(sessions[name], rules).reward for name in names}
            rewards = {name: reward for name, reward in labels.items() if reward is not None}
            rewarded += bool(rewards)
            if rewards_differ(rewards.values()) or (every and rewards):
                without = tuple(name for name in names if name not in rewards)
                task_id = sessions[next(iter(rewards))].task_id
                found = RecordedGroup(number, group_id, tuple(rewards), without, task_id, tuple(rewards.values()))
                groups.append(found)
    if not groups:
        where = ", ".join(map(str, runs))
        why = f"the rewards of each of its {rewarded} groups are equal" if rewarded else "no session has a reward"
        raise InputError(f"nothing to train on in {where}: {why}")
    return groups


def _require_tokenizer(run: Path, model: Path, digests: Mapping[str, str]) -> None:
    """Raise `InputError` unless the run has the model's tokenizer and chat template, as far as it names them."""
    metadata = read_metadata(run)
    for name, digest in digests.items():
        if metadata.get(name, digest) != digest:
            what = name.removesuffix("_sha256").replace("_", " ")
            raise InputError(
                f"{run} was recorded with another {what} than that of {model}; its model was {metadata.get('model')}"
            )


def _require_sampling(run: Path, sessions: set[str], temperature: float) -> None:
    """Raise `InputError` when a call of the sessions was sampled in another way, as far as calls name it."""
    for batch in read_batches(run, "calls", sessions):
        columns = (batch.column(name).to_pylist() for name in ("session_id", "call_id", "sampling"))
        for session_id, call_id, sampling in zip(*columns, strict=True):
            recorded = json.loads(sampling)
            what = f"{run}: call {call_id} of session {session_id} was sampled"
            if (given := recorded.get("temperature", temperature)) != temperature:
                raise InputError(
                    f"{what} at temperature {given}, but grpo.temperature is {temperature}: the trainer would divide "
                    "the logits by another number than the engine did"
                )
            if key := biased(recorded):
                raise InputError(
                    f"{what} with {key} = {recorded[key]!r}: the loss would be biased, because tokens were not sampled "
                    "by the probabilities that are trained; record without it, or leave the session out (Run.filter)"
                )
