"""Facts of the nodes of a cluster, by which a fleet is refused before a session runs, with the node's name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rolltap.addons.errors import InputError
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.nodes.messages import Failure, Setup
from rolltap.trainer.rollouts.check import check_engines
from rolltap.trainer.rollouts.mitmdump import workplace
from rolltap.trainer.rollouts.resume import changed_parts
from rolltap.trainer.rollouts.session import SessionContext
from rolltap.trainer.rollouts.worker import keys_of
from rolltap.trainer.tasks.task import Task

CLOCK_SECONDS = 5.0
"""Largest difference of two clocks: rows have times, and rollouts have deadlines."""


class Machine(NamedTuple):
    """A node's versions, and the seconds of its clock since 1970."""

    rolltap: str
    python: str
    clock: float


@dataclass(frozen=True, slots=True)
class Examined:
    """Tasks as a node runs them, their digests by id, the parts of their groups' keys, and lines on its engines."""

    tasks: list[Task]
    digests: dict[str, str]
    keys: dict[str, dict[str, str]]
    engines: list[str]


def machine_reader() -> Callable[[], tuple[str, str, float]]:
    """Return a function that reads a `Machine`. It is sent by value: a node may have another rolltap, or none."""

    def read() -> tuple[str, str, float]:
        import sys
        import time
        from importlib.metadata import distributions

        versions = [each.version for each in distributions(name="rolltap")]
        return "".join(versions[:1]) or "none", "{}.{}".format(*sys.version_info), time.time()

    return read


def examine(node: str, setup: Setup, tasks: Sequence[Task], policy: str, build: bool) -> Examined | Failure:
    """Check on a node what its sessions need, and read what decides them. With `build`, build the tasks' images."""
    try:
        with workplace() as work:
            worker, said = setup.worker(work / "run"), list[str]()
            fitting = worker.fit(tasks, setup.private)
            worker.recorder.path.mkdir()
            fitting = run_blocking(worker.build(fitting)) if build else fitting
            weights = f"{check_engines(worker.recorder, said.append)},{policy}"
            context = SessionContext.of(worker.config, worker.harness, worker.runtime, worker.recorder, work)
            keys = run_blocking(keys_of(fitting, context, weights))
            names = [task.id for task in fitting]
            return Examined(
                fitting, {name: context.digests[name] for name in names}, dict(zip(names, keys, strict=True)), said
            )
    except Exception as error:
        return Failure.of(error, node)


def require_alike_machines(own: Machine, asked: float, nodes: Mapping[str, Machine]) -> None:
    """Refuse machines that differ from this one, which were asked at the time `asked`. Raises `InputError`."""
    for name, machine in nodes.items():
        for what, theirs, ours in (("rolltap", machine.rolltap, own.rolltap), ("Python", machine.python, own.python)):
            if theirs != ours:
                raise InputError(f"node {name} has {what} {theirs}, and this machine {ours}: install the same on both")
        apart = max(asked - machine.clock, machine.clock - own.clock)
        if apart > CLOCK_SECONDS:
            raise InputError(f"the clock of node {name} is {apart:.0f} s off this machine's: synchronise them (NTP)")


def require_alike(nodes: Mapping[str, Examined | Failure]) -> Examined:
    """Return what nodes found, which is the same on all. Raises `InputError`, or the error of a node."""
    found: dict[str, Examined] = {}
    for name, each in nodes.items():
        if isinstance(each, Failure):
            raise each.error()
        found[name] = each
    (first, one), *others = found.items()
    for name, other in others:
        if differing := [task for task in one.digests if other.digests.get(task) != one.digests[task]]:
            raise InputError(
                f"node {name} has not the task {differing[0]!r} as node {first} has it: lay the tasks into a folder "
                "that all have"
            )
        if parts := sorted({part for task in one.keys for part in changed_parts(one.keys[task], other.keys[task])}):
            raise InputError(
                f"nodes {first} and {name} would run other sessions: they differ in {', '.join(parts)}: install the "
                "same programs and images, and serve the same weights"
            )
    return one
