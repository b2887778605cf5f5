"""A fleet whose actors are in this process, with sessions that a test ends; no Ray runs.

What crosses between the driver and an actor is pickled, as Ray does it.
"""

import asyncio
import pickle
from collections import defaultdict
from types import SimpleNamespace
from typing import ClassVar

from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.nodes import actor as actor_module
from rolltap.trainer.nodes.cluster import ClusterNode
from rolltap.trainer.nodes.fleet import Fleet
from rolltap.trainer.nodes.messages import Setup
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.recorder import started_event
from rolltap.trainer.traces.facts import Facts
from tests.factories import make_session, write_run


async def until(fact):
    """Let the event loop run until a fact is there."""
    while not fact():  # noqa: ASYNC110
        await asyncio.sleep(0)


class RayError(Exception): ...


class ActorUnavailableError(RayError): ...


class ObjectLostError(RayError): ...


class Sessions:
    """The worker of an actor and its node. A session goes on when the test says so."""

    def __init__(self, out):
        self.out = out
        self.began = defaultdict(asyncio.Event)
        self.may_end = defaultdict(asyncio.Event)
        self.failing = {}
        """Session -> the error that it raises in place of its end."""
        self.unlucky = set()
        """Sessions that the machine keeps from their end."""
        self.stuck = set()
        """Sessions that do not end when they are stopped."""
        self.writers = {}
        self.groups = {}

    def fit(self, tasks, private):
        if LocalSetup.unfit:
            raise LocalSetup.unfit.pop()

    def node(self):
        return self

    async def __aenter__(self):
        if LocalSetup.is_slow:
            await asyncio.Event().wait()
        write_run(self.out)
        return self

    async def __aexit__(self, *error):
        for writer in self.writers.values():
            writer.close()

    def writer(self, group):
        folder = self.out / "evaluation" if group.evaluates else self.out
        if folder not in self.writers:
            write_run(folder)
            self.writers[folder] = RunWriter(folder)
        return self.writers[folder]

    async def run(self, attempt, enter):
        name = attempt.session_id
        await enter("running")
        self.groups[name] = attempt.group
        writer = self.writer(attempt.group)
        group_id = attempt.group.group_id
        session = make_session(name, group_id=group_id, status="cancelled", reward=None)
        writer.add_event(started_event(session))
        self.began[name].set()
        try:
            await self.may_end[name].wait()
            if name in self.failing:
                session.status = "infrastructure"
                session.error = str(self.failing[name])
                raise self.failing[name]
            if name in self.unlucky:
                session.status = "infrastructure"
                session.error = "the machine is broken"
                return Facts()
            await enter("judging")
            session.status = "completed"
            session.reward = 1.0
        except asyncio.CancelledError:
            session.error = attempt.why_stopped
            if name in self.stuck:
                await asyncio.Event().wait()
            raise
        finally:
            writer.add_session(session)
            attempt.row = session
        return Facts(completed_calls=1)


class Handle:
    """An actor as Ray gives it to its driver. `error` is raised by its answers, for ever or
    `once`. Methods in `hanging` never answer."""

    def __init__(self, actor):
        self.actor = actor
        self.error = None
        self.once = None
        self.hanging = set()

    def __getattr__(self, name):
        def remote(*arguments):
            call = asyncio.ensure_future(self._call(name, arguments))
            # an error that nobody waits for would be logged by the garbage collector, which may run
            # in any later test
            call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return asyncio.shield(call)  # it goes on when the driver does not wait any more

        return SimpleNamespace(remote=remote)

    async def _call(self, name, arguments):
        if self.error is not None:
            raise self.error
        if name in self.hanging:
            await asyncio.Event().wait()
        answer = await getattr(self.actor, name)(*pickle.loads(pickle.dumps(arguments)))
        once = self.once
        self.once = None
        if once is not None or self.error is not None:
            raise once or self.error  # it was done, and the answer is lost
        return pickle.loads(pickle.dumps(answer))


class LocalCluster:
    """The methods of a `Cluster`."""

    def __init__(self):
        exceptions = SimpleNamespace(
            RayError=RayError,
            ActorUnavailableError=ActorUnavailableError,
            ObjectLostError=ObjectLostError,
        )
        self.ray = SimpleNamespace(exceptions=exceptions, kill=self.kill)
        self.address = "here"
        self.names = []

    def nodes(self):
        return {name: ClusterNode(name, 4) for name in self.names}

    def own_node(self):
        return "driver"

    def start_actor(self, kind, ray_id, *arguments, name):
        return Handle(kind(*arguments))

    @staticmethod
    def kill(handle):
        handle.error = RayError("it was killed")


class LocalSetup(Setup):
    """The setup of actors of this process.

    Attributes:
        workers: Their workers.
        unfit: Errors of the next workers that are asked whether the tasks fit.
        is_slow: True when a further worker never gets ready.
    """

    workers: ClassVar = []
    unfit: ClassVar = []
    is_slow: ClassVar = False

    def worker(self, out):
        self.workers.append(Sessions(out))
        return self.workers[-1]


def local_fleet(run, patch, names):
    """Return a fleet that is not open yet."""
    put = SimpleNamespace(put=lambda packages: packages)
    patch.setattr(actor_module, "require_ray", lambda: put)
    patch.setattr(actor_module, "WAIT_SECONDS", 0.0)
    patch.setattr(actor_module, "Engines", lambda urls: SimpleNamespace(silent=list))
    patch.setattr(LocalSetup, "workers", [])
    patch.setattr(LocalSetup, "unfit", [])
    patch.setattr(LocalSetup, "is_slow", False)
    setup = LocalSetup(RolloutConfig(retries=2), None, "http://e", "model")
    fleet = Fleet("here", run, setup)
    fleet.cluster = LocalCluster()
    fleet.cluster.names = list(names)
    fleet.found = None
    return fleet
