"""The members of a fleet as nodes of a runner, while members come and go."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from rolltap.addons.errors import RecorderError, RolltapError
from rolltap.trainer.nodes.fleet import LOST_SECONDS, Fleet, Member
from rolltap.trainer.nodes.ray import RayNode
from rolltap.trainer.rollouts.node import NodeLostError
from rolltap.trainer.rollouts.runner import GroupRunner

logger = logging.getLogger(__name__)

SILENT_SECONDS = 60.0
"""Time without a report after which a node is given no more groups."""
TICK_SECONDS = 1.0


@asynccontextmanager
async def attached(
    fleet: Fleet,
    runner: GroupRunner,
    share: float = 0.0,
) -> AsyncIterator[None]:
    """Let a runner run its sessions on the members of a fleet, and on nodes that join meanwhile.

    Sessions that evaluate have a `share` of each node's slots. The block is cancelled, and leaving
    it raises `RecorderError`, when no member is left. Leaving it stops the sessions that still run,
    and removes the nodes.
    """
    watch = _Watch(fleet, runner, share)
    try:
        async with asyncio.TaskGroup() as group:
            failing = group.create_task(watch.failure())
            try:
                yield
            finally:
                await watch.end()
                failing.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


class _Watch:
    """Follows the members, and looks for newcomers and for silent nodes."""

    def __init__(self, fleet: Fleet, runner: GroupRunner, share: float) -> None:
        self._fleet = fleet
        self._runner = runner
        self._share = share
        self._nodes: dict[str, RayNode] = {}
        """The nodes that are not lost."""
        self._given_up: set[str] = set()
        """Names of nodes that the runner removed."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for member in fleet.members.values():
            self._add(member)
        self._start(self._tick())

    async def failure(self) -> None:
        """Wait for an error that ends all, and raise it."""
        await self._failure

    async def end(self) -> None:
        """Remove the nodes, after the rows of their sessions. They stay members."""
        self._given_up.update(self._nodes)
        for node in self._nodes.values():
            self._runner.remove_node(node, NodeLostError("the fleet was left"))
        await asyncio.gather(*(node.wait_until_idle() for node in self._nodes.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _add(self, member: Member) -> None:
        node = RayNode(self._fleet, member, member.config.slots(self._share))
        self._nodes[node.name] = node
        self._runner.add_node(node)
        self._start(self._follow(node))

    async def _follow(self, node: RayNode) -> None:
        """Take the reports of a node until it is lost."""
        error = await node.follow()
        logger.warning("node %s is lost: %s", node.name, error)
        del self._nodes[node.name]
        self._given_up.discard(node.name)
        self._runner.remove_node(node, error)
        if not self._nodes:
            raise RecorderError(f"no node of the fleet is left; the last: {error}")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for name in self._fleet.newcomers():
                self._start(self._greet(name))
            for node in self._nodes.values():
                self._look_at(node)

    def _look_at(self, node: RayNode) -> None:
        silent = time.monotonic() - node.member.seen
        self._runner.rest_node(node.name, silent > SILENT_SECONDS)
        if silent > LOST_SECONDS:
            self._fleet.kill(node.member)  # its follower loses it
        if node.name not in self._runner.nodes and node.name not in self._given_up:
            self._given_up.add(node.name)
            self._start(self._close(node))

    async def _close(self, node: RayNode) -> None:
        """Stop a node that was given up after too many failures."""
        await node.wait_until_idle()
        with suppress(RolltapError):
            await self._fleet.ask(node.member, "close")

    async def _greet(self, name: str) -> None:
        """Take a new node. It may build images first."""
        if await self._fleet.join(name, late=True) is None:
            self._add(self._fleet.members[name])
