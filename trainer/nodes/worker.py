"""A worker whose sessions run on the nodes of a Ray cluster, recorded into the run folder here.

    driver   the process of `rolltap rollout`, `train` or `service`: has the queue of sessions
    node     one actor a machine: a worker with its recorder and runtimes; its rows go to a folder
             there
    writer   an actor beside the driver: appends the nodes' rows to the run, so that tokens do not
             pass the driver

Every node that has the Ray resource `rolltap` is used, with as many slots as it has of it; if none
has, all are, with `concurrency` slots each. Nodes may join and leave while sessions run. An engine
at a loopback address is each node's own; others are dealt out to the nodes, so that the sessions of
a group share a prefix cache.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.errors import InputError
from rolltap.addons.options import is_loopback
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.locks import rollout_lock
from rolltap.trainer.nodes.attach import attached
from rolltap.trainer.nodes.facts import (
    Installation,
    examine,
    installation_reader,
    require_alike,
    require_alike_installations,
)
from rolltap.trainer.nodes.fleet import Fleet
from rolltap.trainer.nodes.messages import Setup
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.tasks.task import Task


class FleetWorker(Worker):
    """Runs groups on the nodes of the cluster `config.ray`: methods and errors as of `Worker`.

    With `publishes`, an engine at a loopback address is refused if there are several nodes: weights
    would reach one.

    `fit` connects to the cluster and raises `InputError` for nodes that differ, with the node's
    name. Entering starts an actor on each node, which ends with this process.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        runtime: Runtime | None = None,
        publishes: bool = False,
        **how: Any,
    ) -> None:
        if runtime is not None:
            why = "cannot be sent to the nodes of --ray: give its name"
            raise InputError(f"a runtime that you made {why}")
        super().__init__(config, **how)
        self._publishes = publishes
        setup = Setup(config, self.harness, self.recorder.engine, self.recorder.model)
        self._fleet = Fleet(config.ray or "", self.recorder.path, setup)

    def fit(self, tasks: Sequence[Task], private: Sequence[Path] = ()) -> list[Task]:
        """Return the tasks as the nodes run them, after a comparison of the nodes."""
        cluster = self._fleet.cluster
        cluster.connect()
        hosts = [urlsplit(url).hostname or "" for url in self.recorder.engine.split(",")]
        if self._publishes and len(cluster.nodes()) > 1 and any(map(is_loopback, hosts)):
            raise InputError(
                f"--engine {self.recorder.engine}: with --ray each node has an engine of its own "
                "at that address, and weights are published to this machine's alone: give an "
                "address that is the same on all nodes"
            )
        asked = time.time()
        nodes = {}
        for name, read in cluster.call_on_all(installation_reader(), lambda _: ()).items():
            nodes[name] = Installation(*read)
        own = Installation(*installation_reader()())  # its clock is that of the last answer
        require_alike_installations(own, asked, nodes)
        # a node may see these files on a shared disk
        files = (self.recorder.path.absolute(), *(path.absolute() for path in private))
        self._fleet.setup = replace(self._fleet.setup, private=files)
        return self._examine(tasks, build=False)

    async def build(self, tasks: Sequence[Task]) -> list[Task]:
        """Build the images of tasks on every node, and return the tasks."""
        if any(task.build for task in tasks):
            return await asyncio.to_thread(self._examine, tasks, build=True)
        return list(tasks)

    def _examine(self, tasks: Sequence[Task], *, build: bool) -> list[Task]:
        policy = PolicyFile(self.recorder.path).read().version
        setup = self._fleet.setup

        def arguments(node: str) -> tuple[Any, ...]:
            return node, setup, tasks, policy, build

        found = require_alike(self._fleet.cluster.call_on_all(examine, arguments))
        if build:
            self._fleet.update_tasks(found)
        else:
            self._fleet.add_tasks(tasks, found)
        return found.tasks

    def weights(self, say: Callable[[str], None]) -> str:
        """Tell `say` what the engines serve, as the nodes see them; `keys` has their weights."""
        for line in self._fleet.found.engines:
            say(line)
        return ""

    async def keys(self, tasks: Sequence[Task], weights: str) -> list[dict[str, str]]:
        """Return the parts of each task's key, as the nodes have it."""
        return [self._fleet.found.keys[task.id] for task in tasks]

    @property
    def digests(self) -> dict[str, str]:
        """Task id -> its digest."""
        return self._fleet.found.digests

    def silent(self) -> Collection[str]:
        """Return the engines that did not answer nodes whose sessions failed a moment ago."""
        return self._fleet.silent()

    @asynccontextmanager
    async def attach(self, runner: GroupRunner, *, share: float = 0.0) -> AsyncIterator[None]:
        """Let a runner of the caller's use the nodes: see `Worker.attach` and `attached`."""
        async with attached(self._fleet, runner, share):
            yield

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(rollout_lock(self.recorder.path))
            self._fleet.cluster.connect()
            run_blocking(self._fleet.open())
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._cleanup:
            run_blocking(self._fleet.close())


def make_worker(config: RolloutConfig, *, publishes: bool = False, **how: Any) -> Worker:
    """Return the worker of a configuration: here, or with `ray` on the nodes of a cluster."""
    if config.ray:
        return FleetWorker(config, publishes=publishes, **how)
    return Worker(config, **how)
