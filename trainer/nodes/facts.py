"""Facts of the nodes of a cluster: nodes that differ are refused before a session runs, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rolltap.addons.errors import InputError
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.locks import workplace
from rolltap.trainer.nodes.messages import Failure, Setup
from rolltap.trainer.rollouts.check import check_engines
from rolltap.trainer.rollouts.preparation import SessionContext
from rolltap.trainer.rollouts.resume import changed_parts
from rolltap.trainer.rollouts.worker import keys_of
from rolltap.trainer.tasks.task import Task

CLOCK_SECONDS = 5.0
"""Largest difference of two clocks: rows have times, and rollouts have deadlines."""


class Installation(NamedTuple):
    """A node's versions, and the seconds of its clock since 1970."""

    rolltap: str
    python: str
    clock: float


@dataclass(frozen=True, slots=True)
class Examined:
    """Findings of a node on its tasks and engines.

    Attributes:
        tasks: The tasks as the node runs them.
        digests: Task id -> digest.
        keys: Task id -> the parts of its group's key.
        engines: Lines on the engines.
    """

    tasks: list[Task]
    digests: dict[str, str]
    keys: dict[str, dict[str, str]]
    engines: list[str]


def installation_reader() -> Callable[[], tuple[str, str, float]]:
    """Return a function that reads a `Installation`.

    It is sent by value: a node may have another rolltap, or none.
    """

    def read() -> tuple[str, str, float]:
        import sys
        import time
        from importlib.metadata import distributions

        version = "none"
        for each in distributions(name="rolltap"):
            version = each.version
            break
        return version, "{}.{}".format(*sys.version_info), time.time()

    return read


def examine(
    node: str,
    setup: Setup,
    tasks: Sequence[Task],
    policy: str,
    build: bool,
) -> Examined | Failure:
    """Check on a node what its sessions need, and read what decides them.

    With `build`, build the tasks' images.
    """
    try:
        with workplace() as work:
            lines: list[str] = []
            worker = setup.worker(work / "run")
            fitting = worker.fit(tasks, setup.private)
            worker.recorder.path.mkdir()
            if build:
                fitting = run_blocking(worker.build(fitting))
            weights = f"{check_engines(worker.recorder, lines.append)},{policy}"
            context = SessionContext(
                worker.config,
                worker.harness,
                worker.runtime,
                worker.recorder,
                work,
            )
            keys = run_blocking(keys_of(fitting, context, weights))
            return Examined(
                fitting,
                {task.id: context.digests[task.id] for task in fitting},
                {task.id: key for task, key in zip(fitting, keys, strict=True)},
                lines,
            )
    except Exception as error:
        return Failure.of(error, node)


def require_alike_installations(
    own: Installation, asked: float, nodes: Mapping[str, Installation]
) -> None:
    """Refuse nodes that differ from this machine. They were asked at the time `asked`, and had
    answered when `own` was read.

    Raises `InputError`.
    """
    for name, node in nodes.items():
        versions = {
            "rolltap": (node.rolltap, own.rolltap),
            "Python": (node.python, own.python),
        }
        for what, (theirs, ours) in versions.items():
            if theirs != ours:
                both = f"{theirs}, and this machine {ours}: install the same on both"
                raise InputError(f"node {name} has {what} {both}")
        apart = max(asked - node.clock, node.clock - own.clock)
        if apart > CLOCK_SECONDS:
            why = f"{apart:.0f} s off this machine's: synchronise them (NTP)"
            raise InputError(f"the clock of node {name} is {why}")


def require_alike(nodes: Mapping[str, Examined | Failure]) -> Examined:
    """Return what nodes found, which is the same on all.

    Raises `InputError`, or the error of a node.
    """
    found: dict[str, Examined] = {}
    for name, each in nodes.items():
        if isinstance(each, Failure):
            raise each.error()
        found[name] = each
    first = next(iter(found))
    one = found[first]
    for name, other in found.items():
        differing = [task for task in one.digests if other.digests.get(task) != one.digests[task]]
        if differing:
            raise InputError(
                f"node {name} has not the task {differing[0]!r} as node {first} has it: lay the "
                "tasks into a folder that all have"
            )
        parts: set[str] = set()
        for task in one.keys:
            parts.update(changed_parts(one.keys[task], other.keys[task]))
        if parts:
            raise InputError(
                f"nodes {first} and {name} would run other sessions: they differ in "
                f"{', '.join(sorted(parts))}: install the same programs and images, and serve the "
                "same weights"
            )
    return one
