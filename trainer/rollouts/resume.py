"""Going on with a rollout that was stopped or killed. The run folder is all that is known of it.

A session with a row is used again, unless its outcome says nothing about the agent: then it is tried again under the id
of the next attempt. One that was begun and has no row was interrupted: it gets a row `cancelled`.

The values that decide the sessions of a group: with another value a rollout begins a group of its own.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Session, SessionStatus
from rolltap.trainer.rollouts.facts import Group, attempt_of, group_key, key_parts, next_attempt, place_of
from rolltap.trainer.rollouts.plan import Plan, Shared
from rolltap.trainer.rollouts.provenance import Provenance
from rolltap.trainer.rollouts.recorder import Recorder, group_keys, interrupted_sessions
from rolltap.trainer.rollouts.session import end_session
from rolltap.trainer.tasks.task import Task

FREE_OPTIONS = frozenset({"rolltap_secret_file", "rolltap_engine_key_file", "rolltap_patience", "rolltap_fsync"})
"""Options of the recorder that decide no session."""


async def keys_of(
    tasks: Sequence[Task],
    plan: Plan,
    common: Shared,
    *,
    model: str | Path,
    weights: str,
    options: Mapping[str, str | Sequence[str]],
) -> list[dict[str, str]]:
    """Return the parts of each task's key, and fill in `common.digests`. Asks as many programs at once as sessions run.

    Raises `InputError` for a path of a task that cannot be read, and `OSError`.
    """
    places = asyncio.Semaphore(plan.concurrency)

    async def key(task: Task) -> dict[str, str]:
        async with places:
            common.digests[task.id] = await asyncio.to_thread(task.digest)
            return key_parts(await key_values(task, plan, common, model=model, weights=weights, options=options))

    keys = await asyncio.gather(*map(key, tasks), return_exceptions=True)  # none of them runs on after an error
    found = []
    for each in keys:
        if isinstance(each, BaseException):
            raise each
        found.append(each)
    return found


async def key_values(
    task: Task,
    plan: Plan,
    common: Shared,
    *,
    model: str | Path,
    weights: str,
    options: Mapping[str, str | Sequence[str]],
) -> dict[str, object]:
    """Return name -> JSON value of what decides the sessions of a task. `common.digests` has the task's digest.

    Of an image that cannot be had nothing is known: its sessions cannot be run, and say why. Raises `OSError`.
    """
    try:
        known = await common.provenances.of(task.image)
    except InputError:
        known = Provenance(harness_version="", program_digest="", preset_digest=plan.harness.digest(), image_digest="")
    place = Path(model)
    return {
        "task": common.digests[task.id],
        "harness": known.preset_digest,
        "harness_version": known.harness_version,
        "program": known.program_digest,
        "image": known.image_digest,
        "runtime": plan.runtime.name,
        "timeout": task.timeout or plan.timeout,
        "model": str(place.resolve()) if place.exists() else str(model),
        "weights": weights,
        **{name: value for name, value in options.items() if name not in FREE_OPTIONS},
    }


def changed_parts(known: Mapping[str, str], key: Mapping[str, str]) -> list[str]:
    """Return the names of the parts in which two keys differ, sorted."""
    return sorted(name for name in known.keys() | key.keys() if known.get(name) != key.get(name))


def changes_text(changed: Iterable[str], tasks: int) -> str:
    """Return the line that says why a rollout goes on with no group of so many tasks."""
    return f"begins new groups of {tasks} {'task' if tasks == 1 else 'tasks'}: {', '.join(sorted(changed))} changed"


NOT_RUN: frozenset[SessionStatus] = frozenset({"infrastructure", "cancelled"})
"""Outcomes of sessions that did not get to their end."""
TRIED_AGAIN: frozenset[SessionStatus] = NOT_RUN | {"unjudged"}
"""Outcomes that say nothing about the agent. A session without a judgement is run again when its judge is mended."""
_PLACE = re.compile(r"(.+)\.(0|[1-9][0-9]*)-[0-9]+")
"""A session's place: task and key, the round, and the index. Its group may be another one since somebody changed it."""


def end_interrupted(recorder: Recorder) -> None:
    """Give a row `cancelled` to each session of the recorder's run that was begun and has none.

    Call it with the run's `rollout_lock`. Raises as `Recorder.end`.
    """
    for session in interrupted_sessions(recorder.path):
        end_session(recorder, session, None)


class Recorded:
    """The sessions that a run has: which of a group are used again, and under which ids the others are run."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        self._places: defaultdict[str, list[Session]] = defaultdict(list)
        self._rounds: defaultdict[str, set[int]] = defaultdict(set)
        for session in sessions:
            place = place_of(session.session_id)
            self._places[place].append(session)
            if found := _PLACE.fullmatch(place):
                self._rounds[found[1]].add(int(found[2]))

    def group(self, task: Task, key: Mapping[str, str], sessions: int, *, further: bool) -> Group:
        """Return the group to go on with: the newest of the task and the key, or with `further` one after it.

        A newest one with sessions that did not get to their end is gone on with in any case: so the same call with
        `further`, which was stopped, goes on. `key` is of `key_parts`. The session ids are those of first attempts.
        """
        base = f"{task.id}-{group_key(key)}"
        newest = max(self._rounds[base], default=-1)
        group = _round(task, base, max(newest, 0), sessions, key)
        if newest < 0 or not further or self._waiting(group, NOT_RUN):
            return group
        return _round(task, base, newest + 1, sessions, key)

    def has(self, group: Group) -> bool:
        """Return True when a session of the group is recorded, whatever its outcome."""
        return any(self._places.get(place) for place in group.session_ids)

    def attempts(self, group: Group) -> list[Session]:
        """Return all recorded sessions at the places of a group, in the order of the places and attempts."""
        return [
            session
            for place in group.session_ids
            for session in sorted(self._places[place], key=lambda session: attempt_of(session.session_id))
        ]

    def missing(self, group: Group) -> Group:
        """Return the group with the ids of the sessions that are still to be run: new places, and further attempts."""
        return replace(group, session_ids=self._waiting(group, TRIED_AGAIN))

    def _waiting(self, group: Group, again: Collection[SessionStatus]) -> list[str]:
        ids = []
        for place in group.session_ids:
            attempts = self.attempts(replace(group, session_ids=[place]))
            if not attempts:
                ids.append(place)
            elif all(session.status in again for session in attempts):
                ids.append(next_attempt(attempts[-1].session_id))
        return ids


def going_on(
    run: Path, recorded: Recorded, groups: Sequence[Group], missing: Sequence[Group], *, further: bool
) -> list[str]:
    """Return what a rollout of these groups says before it begins, as lines.

    `missing` are the groups with the ids that are still to be run. Raises `RunError` when the run cannot be read.
    """
    lines = []
    if used := sum(len(group.session_ids) for group in groups) - sum(len(group.session_ids) for group in missing):
        lines.append(f"goes on with {used} sessions of {run}")
    if further and (open_groups := sum(map(recorded.has, groups))):
        lines.append(
            f"goes on with {open_groups} newest groups, of which sessions are missing, before it begins further ones: "
            "start it again for these"
        )
    keys = group_keys(run)
    differ = [
        changed_parts(keys[group.task.id], group.key)
        for group in groups
        if group.task.id in keys and not recorded.has(group)
    ]
    if differ := [parts for parts in differ if parts]:
        lines.append(changes_text({name for parts in differ for name in parts}, len(differ)))
    return lines


def _round(task: Task, base: str, number: int, sessions: int, key: Mapping[str, str]) -> Group:
    return Group(task, f"{base}.{number}", [f"{base}.{number}-{index}" for index in range(sessions)], key)
