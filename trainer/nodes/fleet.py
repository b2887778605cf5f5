"""The nodes of a run on a cluster: the actors on them, and the writer of their rows."""

import asyncio
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.errors import InputError, RecorderError, RolltapError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.metadata import RUN_FILE
from rolltap.trainer.nodes.actor import NodeActor
from rolltap.trainer.nodes.cluster import Cluster
from rolltap.trainer.nodes.facts import Examined
from rolltap.trainer.nodes.messages import Failure, Package, Policies, Report, Setup
from rolltap.trainer.nodes.rows import PARTS, ForkedCalls, LostSessions, Writer
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.node import NodeLostError
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionRows

logger = logging.getLogger(__name__)

UNAVAILABLE_SECONDS = 1.0
"""Pause before a node that does not answer is asked again."""
AGAIN_SECONDS = 30.0
"""Pause before a node that failed is tried again."""
LOST_SECONDS = 600.0
"""Time without a report, or an answer, after which a node is given up. Its sessions are run
elsewhere."""


@dataclass(slots=True)
class Member:
    """A node that runs sessions.

    Attributes:
        silent: Its engines that did not answer. They are asked only after failed sessions.
        config: The configuration, with as many sessions at once as it runs.
        number: Number of its last report that was written.
        seen: Time of that report, on the monotonic clock.
        attempts: Gives each attempt a number.
    """

    name: str
    config: RolloutConfig
    engine: str
    actor: Any
    silent: Sequence[str] = ()
    number: int = 0
    seen: float = field(default_factory=time.monotonic)
    attempts: "count[int]" = field(default_factory=count)


class Fleet:
    """The nodes of a cluster that run the sessions of one run.

    `setup` is theirs, with the engines of all.

    `open` and `cluster.connect` raise `InputError` when no cluster answers. Other methods raise
    `RolltapError` for what failed on a node, and `NodeLostError`; `OSError` is for the run folder
    alone.
    """

    def __init__(self, address: str, run: Path, setup: Setup) -> None:
        self.cluster = Cluster(address)
        self.members: dict[str, Member] = {}
        self.setup = setup
        self.tasks: Sequence[Task] = ()
        self.found: Examined
        """Findings of the nodes on the tasks, by which a newcomer is compared."""
        self._run = run
        self._rows = SessionRows(run)
        self._reads = count(1)
        self._forked: dict[Path, ForkedCalls] = {}
        """Run -> the calls of its sessions that are forked."""
        self._resting: dict[str, float] = {}
        """Node that failed -> the time at which it is tried again."""

    def add_tasks(self, tasks: Sequence[Task], found: Examined) -> None:
        """Take tasks to run, beside earlier ones, and what the nodes found of them.

        Of tasks with the same id the first counts, as on a node that examines all of them.
        """
        if self.tasks:
            before = self.found
            digests = found.digests | before.digests
            keys = found.keys | before.keys
            found = Examined([*before.tasks, *found.tasks], digests, keys, found.engines)
        self.found = found
        self.tasks = [*self.tasks, *tasks]

    def update_tasks(self, found: Examined) -> None:
        """Take what the nodes found of earlier tasks since these were built."""
        before = self.found
        self.found = replace(
            before,
            digests=before.digests | found.digests,
            keys=before.keys | found.keys,
        )

    async def open(self) -> None:
        """Start the actors of the nodes. Sessions that an earlier driver left get a row.

        Raises the error of a node if all fail.
        """
        self._name = secrets.token_hex(4)
        own = self.cluster.own_node()
        name = f"{self._name}-writer"
        self._writer = self.cluster.start_actor(Writer, own, str(self._run), name=name)
        await self.write("open")
        await self.write("end_interrupted")
        failures = await asyncio.gather(*map(self.join, self.cluster.nodes()))
        if self.members:
            return
        for failure in failures:
            if failure is not None:
                raise failure
        raise InputError(f"no node of the cluster {self.cluster.address} runs sessions")

    async def join(self, name: str, *, late: bool = False) -> Exception | None:
        """Make a node a member. Return why it cannot be one; it is tried again after a while.

        One that comes `late` is compared with the others first.
        """
        nodes = self.cluster.nodes()
        if name not in nodes:
            return NodeLostError(f"node {name} is gone")
        node = nodes[name]
        slots = node.slots or self.setup.config.concurrency
        dealt = [member.engine.split(",") for member in self.members.values()]
        host = name.partition("/")[0]
        engine = ",".join(deal(self.setup.engine.split(","), dealt, len(nodes), host))
        config = self.setup.config.model_copy(update={"concurrency": slots})
        setup = replace(self.setup, engine=engine, config=config)
        member = Member(name, config, engine, None)
        self.members[name] = member  # now: nodes that join at once are dealt other engines
        actor = f"{self._name}-{node.ray_id[:16]}-{secrets.token_hex(2)}"
        found = None
        if late:
            found = self.found
        try:
            member.actor = self.cluster.start_actor(NodeActor, node.ray_id, name, setup, name=actor)
            await self.ask(member, "open", self.tasks, self.policies(), found)
            await self.next_report(member)
        except asyncio.CancelledError:
            self.drop(member)
            raise
        except RolltapError as error:
            with suppress(RolltapError):  # its folder is removed
                await self.ask(member, "leave")
            await self.forget(member)
            logger.warning("node %s is not used: %s", name, error)
            return error
        return None

    def newcomers(self) -> list[str]:
        """Return the nodes that are no members and may be."""
        now = time.monotonic()
        found = []
        for name in self.cluster.nodes():
            if name not in self.members and self._resting.get(name, 0.0) <= now:
                found.append(name)
        return found

    async def ask(self, member: Member, method: str, *arguments: Any) -> Any:
        """Call a method of a node's actor, again while Ray has the node and it does not answer."""
        errors = self.cluster.ray.exceptions
        while True:
            try:
                result = await getattr(member.actor, method).remote(*arguments)
                break
            except errors.ActorUnavailableError as error:
                if member.name not in self.cluster.nodes():
                    raise NodeLostError(f"node {member.name} is gone") from error
                await asyncio.sleep(UNAVAILABLE_SECONDS)
            except errors.RayError as error:
                raise NodeLostError(f"node {member.name} is gone") from error
        if isinstance(result, Failure):
            failure = result.error()
            if not isinstance(failure, RolltapError):  # of the node's disk, not of the run folder
                failure = RecorderError(str(failure))
            raise failure
        return result

    async def next_report(self, member: Member) -> Report:
        """Wait for a node's next report, and write its rows.

        Raises `OSError` when they cannot be written.
        """
        report: Report = await self.ask(member, "poll", member.number, self.policies())
        if report.packages is not None:
            await self.write("append", report.packages, member.name, report.number)
        member.number = report.number
        member.seen = time.monotonic()
        member.silent = report.silent
        return report

    async def write(self, method: str, *arguments: Any) -> Any:
        """Call a method of the writer.

        Raises `NodeLostError` when a node took with it what was to be written, the error of a node
        whose rows do not fit, and `OSError`.
        """
        errors = self.cluster.ray.exceptions
        try:
            result = await getattr(self._writer, method).remote(*arguments)
        except errors.ObjectLostError as error:
            raise NodeLostError("a node is gone, with a report that was not written yet") from error
        except errors.RayError as error:
            raise OSError(f"{self._run} cannot be written any more: {error}") from error
        if isinstance(result, Failure):
            raise result.error()
        return result

    async def forget(
        self,
        member: Member,
        why: str = "",
        sessions: Collection[str] = (),
    ) -> LostSessions:
        """Drop a member, and write the rows of its `sessions` that ran, which say why."""
        self.drop(member)
        lost: LostSessions = await self.write("end_node", member.name, why, sessions)
        return lost

    def drop(self, member: Member) -> None:
        """Kill a member's actor and take it off the members, without rows. It may become a member
        again after a while."""
        self.members.pop(member.name, None)
        self._resting[member.name] = time.monotonic() + AGAIN_SECONDS
        self.kill(member)

    def kill(self, member: Member) -> None:
        """End a node's actor, whose next answer is `NodeLostError`."""
        with suppress(Exception):  # it may be gone
            self.cluster.ray.kill(member.actor)

    async def close(self) -> None:
        """Retire all members. Raises `OSError` when rows cannot be written."""
        members = list(self.members.values())
        ends = await asyncio.gather(*map(self._retire, members), return_exceptions=True)
        with suppress(OSError):
            await self.write("close")
        self.cluster.ray.kill(self._writer)
        for end in ends:
            if isinstance(end, OSError):
                raise end

    async def _retire(self, member: Member) -> None:
        """Stop a node's sessions, write what it has, and end its actor."""
        why = ""
        try:
            async with asyncio.timeout(LOST_SECONDS):
                await self.ask(member, "close")
                while not (await self.next_report(member)).is_over:
                    pass
                await self.ask(member, "leave")
        except TimeoutError:
            why = f"node {member.name} did not end within {LOST_SECONDS:g} s"
        except RolltapError as error:
            why = str(error)
        await self.forget(member, why)

    def forked_calls(self, source: RecordedFrom) -> Package:
        """Return the calls of a recorded session. Raises `RunError` and `OSError`."""
        if source.run not in self._forked:
            self._forked[source.run] = ForkedCalls(source.run)
        return self._forked[source.run].of(source.session)

    def first_version(self, session_id: str) -> str | None:
        """Return the version of the weights of a session's first call, once its row is here."""
        if not (self._run / RUN_FILE).exists():
            return None
        return self._rows.first_version(session_id)

    def silent(self) -> list[str]:
        """Return the engines that did not answer when sessions failed a moment ago."""
        return [url for member in self.members.values() for url in member.silent]

    def policies(self) -> Policies:
        """Return the policies of the run, as they are now."""
        found = {}
        for part in PARTS:
            path = self._run / part / POLICY_FILE
            if path.exists():
                found[part] = path.read_text()
        return Policies(next(self._reads), found)


def deal(
    engines: Sequence[str],
    dealt: Iterable[Sequence[str]],
    nodes: int,
    host: str = "",
) -> list[str]:
    """Return the engines of a further node of about so many `nodes`.

    They are the engines on its own `host`, then those that the others, `dealt`, use least.
    """
    used = [url for own in dealt for url in own]

    def order(url: str) -> tuple[bool, int]:
        return urlsplit(url).hostname != host, used.count(url)

    return sorted(engines, key=order)[: max(1, len(engines) // max(1, nodes))]
