"""The values that decide the sessions of a group: with another value a rollout begins a group of its own."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.groups import key_parts
from rolltap.trainer.rollouts.plan import Plan
from rolltap.trainer.rollouts.provenance import Provenance
from rolltap.trainer.rollouts.shared import Shared
from rolltap.trainer.rollouts.tasks.task import Task

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
