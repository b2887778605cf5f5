"""The driver's side of a fleet: the cluster's nodes, the actors on them, and the writer of the run."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.errors import InputError, RecorderError, RolltapError
from rolltap.trainer.nodes.facts import Examined
from rolltap.trainer.nodes.messages import Failure, Report, Setup, require_ray
from rolltap.trainer.nodes.node import Node
from rolltap.trainer.nodes.placement import deal
from rolltap.trainer.nodes.writer import Writer
from rolltap.trainer.tasks.task import Task

logger = logging.getLogger(__name__)

NAMESPACE = "rolltap"
"""Ray namespace of the actors."""
RESOURCE = "rolltap"
"""Ray resource: most sessions at once on a node that has it. If a node has it, the others are not used."""
CONNECT_SECONDS = 10.0
"""Longest wait for the cluster's address to accept a connection."""
AGAIN_SECONDS = 30.0
"""Pause before a node that failed is tried again."""


class NodeLostError(RecorderError):
    """A node is gone: its machine, or its actor."""


@dataclass(slots=True)
class Member:
    """A node that runs sessions. `number` is that of its last report that was written."""

    name: str
    slots: int
    engine: str
    handle: Any
    number: int = 0
    again: bool = False
    """True while a report is written: a write that was cancelled may have been done."""
    report: Report | None = None
    seen: float = field(default_factory=time.monotonic)


class Fleet:
    """The nodes of a cluster that run the sessions of one run. `setup` is theirs, with the engines of all.

    `connect` raises `InputError` when no cluster answers. Other methods raise `RolltapError` for what failed on a node,
    and `NodeLostError`; `OSError` is for the run folder alone.
    """

    def __init__(self, address: str, run: Path, setup: Setup) -> None:
        self.members: dict[str, Member] = {}
        self.setup = setup
        self.tasks: Sequence[Task] = ()
        self.found: Examined
        """Findings of the nodes on the tasks, by which a newcomer is compared."""
        self._address, self._run = address, run
        self._rest: dict[str, float] = {}
        """Node that failed -> the time at which it is tried again."""

    def connect(self) -> None:
        """Connect this process to the cluster, once."""
        self._ray = connect(self._address)

    def nodes(self) -> dict[str, tuple[str, int]]:
        """Return name -> Ray's id and slots, of the nodes that run sessions."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        named = [node for node in alive if RESOURCE in node["Resources"]]
        most = self.setup.config.concurrency
        return {
            f"{node['NodeManagerHostname']}/{node['NodeID'][:8]}": (
                node["NodeID"],
                int(node["Resources"].get(RESOURCE, most)),
            )
            for node in named or alive
        }

    def everywhere(self, function: Callable[..., Any], arguments: Callable[[str], tuple[Any, ...]]) -> dict[str, Any]:
        """Call a function on each node, with the arguments for it. Return node -> result."""
        remote = self._ray.remote(num_cpus=0, max_retries=0)(function)
        calls = {
            name: remote.options(scheduling_strategy=self._on(node)).remote(*arguments(name))
            for name, (node, _) in self.nodes().items()
        }
        results = {}
        for name, call in calls.items():
            try:
                results[name] = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                why = str(error).strip().splitlines()[-1]
                raise InputError(f"node {name} cannot run rolltap: {why}: install it there, in this version") from error
        return results

    async def open(self) -> None:
        """Start the actors of the nodes. Sessions that an earlier driver left get a row. Raises the error of a node if
        all fail."""
        self._name = secrets.token_hex(4)
        own = self._ray.get_runtime_context().get_node_id()
        self._writer = self._actor(Writer, own, str(self._run), name=f"{self._name}-writer")
        await self.write("end_interrupted")
        failures = [why for why in await asyncio.gather(*map(self.join, self.nodes())) if why is not None]
        if not self.members:
            raise failures[0] if failures else InputError(f"no node of the cluster {self._address} runs sessions")

    async def join(self, name: str, *, late: bool = False) -> Exception | None:
        """Make a node a member. Return why it cannot be one; it is tried again after a while.

        One that comes `late` is compared with the others first.
        """
        node, slots = self.nodes()[name]
        dealt = [member.engine.split(",") for member in self.members.values()]
        engine = ",".join(deal(self.setup.engine.split(","), dealt, len(self.nodes()), name.partition("/")[0]))
        config = self.setup.config.model_copy(update={"concurrency": slots})
        setup = replace(self.setup, engine=engine, config=config)
        member = Member(name, slots, engine, None)
        self.members[name] = member
        actor = f"{self._name}-{node[:16]}-{secrets.token_hex(2)}"
        try:
            member.handle = self._actor(Node, node, name, setup, name=actor)
            await self.ask(member, "open", self.tasks, self.policy(), self.found if late else None)
            await self.next_report(member)
        except RolltapError as error:
            with suppress(RolltapError):  # its folder is removed
                await self.retire(member)
            self.forget(member)
            logger.warning("node %s is not used: %s", name, error)
            return error
        return None

    def newcomers(self) -> list[str]:
        """Return the nodes that are no members and may be."""
        now = time.monotonic()
        return [name for name in self.nodes() if name not in self.members and self._rest.get(name, 0.0) <= now]

    async def ask(self, member: Member, method: str, *arguments: Any) -> Any:
        """Call a method of a node's actor. It is called again while the node does not answer and Ray has it alive."""
        errors = self._ray.exceptions
        while True:
            try:
                result = await getattr(member.handle, method).remote(*arguments)
                break
            except errors.ActorUnavailableError as error:
                if member.name not in self.nodes():
                    raise NodeLostError(f"node {member.name} is gone") from error
                await asyncio.sleep(1.0)
            except errors.RayError as error:
                raise NodeLostError(f"node {member.name} is gone") from error
        if isinstance(result, Failure):
            failure = result.error()
            raise failure if isinstance(failure, RolltapError) else RecorderError(str(failure))
        return result

    async def next_report(self, member: Member) -> Report:
        """Wait for a node's next report, and write its rows. Raises `OSError` when they cannot be written."""
        report: Report = await self.ask(member, "poll", member.number, self.policy())
        if report.package is not None:
            again, member.again = member.again, True  # a write that is cancelled may have been done
            await self.write("append", report.package, again, member.name)
        member.number, member.again, member.report, member.seen = report.number, False, report, time.monotonic()
        return report

    async def write(self, method: str, *arguments: Any) -> Any:
        """Call a method of the writer. Raises `OSError`, and `NodeLostError` when a node took what it was to write."""
        try:
            result = await getattr(self._writer, method).remote(*arguments)
        except self._ray.exceptions.ObjectLostError as error:
            raise NodeLostError("a node is gone, with a report that was not written yet") from error
        except self._ray.exceptions.RayError as error:
            raise OSError(f"{self._run} cannot be written any more: {error}") from error
        if isinstance(result, Failure):
            raise OSError(result.message)
        return result

    async def retire(self, member: Member) -> None:
        """Stop a node's sessions, write what it has, and end its actor."""
        await self.ask(member, "close")
        while (await self.next_report(member)).package is not None:
            pass
        await self.ask(member, "leave")
        self.forget(member)

    def forget(self, member: Member) -> None:
        """Remove a member, and end its actor."""
        self.members.pop(member.name, None)
        self._rest[member.name] = time.monotonic() + AGAIN_SECONDS
        self.kill(member)

    def kill(self, member: Member) -> None:
        """End a node's actor, whose next answer is `NodeLostError`."""
        with suppress(Exception):  # it may be gone
            self._ray.kill(member.handle)

    async def close(self) -> None:
        """Retire all members. Raises `OSError` when rows cannot be written."""
        members = list(self.members.values())
        ends = await asyncio.gather(*map(self.retire, members), return_exceptions=True)
        with suppress(OSError):
            await self.write("close")
        self._ray.kill(self._writer)
        for end in ends:
            if isinstance(end, OSError):
                raise end

    def policy(self) -> str:
        """Return the contents of the run's `policy.json`; empty without one."""
        path = self._run / POLICY_FILE
        return path.read_text() if path.exists() else ""

    def _actor(self, kind: type, node: str, *arguments: Any, **options: Any) -> Any:
        made = self._ray.remote(kind).options(num_cpus=0, scheduling_strategy=self._on(node), **options)
        return made.remote(*arguments)

    def _on(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=False)


def connect(address: str) -> Any:
    """Connect this process to a cluster, once, and return the module `ray`. Raises `InputError`."""
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdecimal()):
        raise InputError(f"--ray {address}: give HOST:PORT, as `ray start` prints it, or auto")
    ray = require_ray()
    try:
        if address != "auto":
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()  # Ray itself asks for minutes
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"--ray {address}: {error}: give the address of a cluster of which this machine is a node (`ray start`), "
            "and RAY_AUTH_MODE as the cluster has it"
        ) from error
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        logger.warning("the cluster %s asks for no token: whoever reaches a port of it runs code there", address)
    # no option keeps the log of a dead node from stdout, where --json prints
    ray._private.worker._worker_logs_enabled = False
    return ray


async def nodes_status(address: str) -> list[dict[str, Any]]:
    """Return what the nodes of all runs on a cluster say of themselves. Raises `InputError`."""
    ray = connect(address)
    found = []
    for name in sorted(ray.util.list_named_actors()):
        try:
            status: Mapping[str, Any] | Failure = await asyncio.wait_for(ray.get_actor(name).status.remote(), 10)
        except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
            status = {"node": name.partition("-")[2], "error": f"it does not answer: {error}"}
        run = name.partition("-")[0]
        found.append({"run": run, **(status._asdict() if isinstance(status, Failure) else status)})
    return found
