"""The members of a fleet under a real runner: they come, go, fall silent and are given up."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from rolltap.addons.errors import RecorderError
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.nodes import attach as attach_module
from rolltap.trainer.nodes import fleet as fleet_module
from rolltap.trainer.nodes.attach import attached
from rolltap.trainer.rollouts import runner as runner_module
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.tasks.task import Task
from tests.trainer.nodes.local import LocalSetup, RayError, until

TASK = Task(id="t", instruction="go", evaluate=["true"])
GROUP = Group(TASK, "g.0", ["g.0-0", "g.0-1", "g.0-2", "g.0-3"])


@pytest.fixture(autouse=True)
def without_pauses(at_once):
    at_once(attach_module, "TICK_SECONDS")
    at_once(runner_module, "PAUSE_SECONDS")


@asynccontextmanager
async def runner_of(fleet, **how):
    runner = GroupRunner([], lambda *_: None, **{"retries": 2, "give_up_after": 8, **how})
    async with attached(fleet, runner), runner:
        yield runner


def worker_of(fleet, name):
    """Return the worker in the actor of a node."""
    actor = fleet.members[name].actor.actor
    for worker in LocalSetup.workers:
        if worker.out == actor._out:
            return worker
    raise AssertionError(f"node {name} has no worker")


async def began(worker, *names):
    for name in names:
        await worker.began[name].wait()


def let_end(worker, *names):
    for name in names:
        worker.may_end[name].set()


def statuses(fleet):
    return {row["session_id"]: row["status"] for row in rows_of(fleet, "sessions")}


def statuses_begun(fleet):
    return {row["session_id"] for row in rows_of(fleet, "events")}


def rows_of(fleet, table):
    """Return the rows of the driver's run, if there are any yet."""
    run = fleet._run
    return [*read_rows(run, table)] if (run / "run.json").exists() else []


async def test_a_lost_nodes_sessions_run_on_a_node_that_came_later_each_with_one_more_attempt(
    fleet,
):
    async with runner_of(fleet) as runner:
        result = await runner.submit(GROUP)
        first = worker_of(fleet, "a")
        await began(first, *GROUP.session_ids)
        await until(lambda: len(statuses_begun(fleet)) == 4)
        fleet.cluster.names.append("b")
        await until(lambda: "b" in runner.nodes)
        fleet.cluster.names.remove("a")
        fleet.members["a"].actor.error = RayError("no power")
        await until(lambda: "a" not in runner.nodes)
        second = worker_of(fleet, "b")
        again = [f"{name}~1" for name in GROUP.session_ids]
        await began(second, *again)
        let_end(second, *again)
        ended = await result
    assert [session.session_id for session in ended[:4]] == GROUP.session_ids
    assert {session.error for session in ended[:4]} == {"node a is gone"}
    assert sorted(session.session_id for session in ended[4:]) == again
    lost = dict.fromkeys(GROUP.session_ids, "infrastructure")
    assert statuses(fleet) == lost | dict.fromkeys(again, "completed")


async def test_a_session_whose_nodes_are_lost_is_retried_as_often_as_any_other(fleet, at_once):
    at_once(fleet_module, "AGAIN_SECONDS")
    attempts = ["g.0-0", "g.0-0~1", "g.0-0~2"]
    fleet.cluster.names.append("spare")  # so that the runner always has a node
    async with runner_of(fleet) as runner:
        result = await runner.submit(replace(GROUP, session_ids=["g.0-0"]))
        for name in attempts:
            await until(lambda name=name: name in statuses_begun(fleet) and len(runner.nodes) == 2)
            for member in [*fleet.members.values()]:
                if worker_of(fleet, member.name).began[name].is_set():
                    member.actor.error = RayError("no power")
        ended = await result
    assert [session.session_id for session in ended] == attempts
    assert {session.status for session in ended} == {"infrastructure"}


async def test_the_loss_of_the_last_node_ends_the_rollout_with_its_error(fleet):
    async def roll_out():
        async with runner_of(fleet) as runner:
            await runner.submit(GROUP)
            await began(worker_of(fleet, "a"), "g.0-0")
            fleet.cluster.names.clear()
            fleet.members["a"].actor.error = RayError("no power")
            await asyncio.Event().wait()

    with pytest.raises(RecorderError, match="node a is gone"):
        await roll_out()


async def test_a_rollout_that_is_stopped_has_the_rows_of_its_sessions(fleet):
    async def roll_out():
        async with runner_of(fleet) as runner:
            await (await runner.submit(GROUP))

    rollout = asyncio.ensure_future(roll_out())
    await until(lambda: LocalSetup.workers)
    await began(worker_of(fleet, "a"), *GROUP.session_ids)
    rollout.cancel()
    await asyncio.wait([rollout])
    assert rollout.cancelled()
    assert statuses(fleet) == dict.fromkeys(GROUP.session_ids, "cancelled")


async def test_one_runner_after_the_other_uses_the_same_nodes(fleet):
    worker = worker_of(fleet, "a")
    for number in range(2):
        names = [f"g.{number}-0"]
        let_end(worker, *names)
        async with runner_of(fleet) as runner:
            await (await runner.submit(replace(GROUP, group_id=f"g.{number}", session_ids=names)))
    assert statuses(fleet) == {"g.0-0": "completed", "g.1-0": "completed"}


async def test_a_deadline_passes_while_a_new_node_takes_its_time_to_join(fleet):
    async with runner_of(fleet) as runner:
        LocalSetup.is_slow = True
        fleet.cluster.names.append("b")
        await until(lambda: len(LocalSetup.workers) == 2)
        result = await runner.submit(GROUP, seconds=0.0)
        assert await result == []


async def test_a_silent_node_gets_no_further_group_and_is_lost_after_a_while(fleet, at_once):
    asked = []

    async def stay(number, policies):
        asked.append(number)
        await until(lambda: lost.actor.error)

    at_once(attach_module, "SILENT_SECONDS", -1.0)
    async with runner_of(fleet) as runner:
        await until(lambda: runner._queue._nodes["a"].rests)
        result = await runner.submit(GROUP)
        fleet.cluster.names.append("b")
        await until(lambda: "b" in runner.nodes)
        at_once(attach_module, "SILENT_SECONDS", 600.0)
        await until(lambda: not runner._queue._nodes["a"].rests)
        let_end(worker_of(fleet, "a"), *GROUP.session_ids)
        let_end(worker_of(fleet, "b"), *GROUP.session_ids)
        assert len(await result) == 4
        lost = fleet.members["a"]
        lost.actor.actor.poll = stay  # it answers no question any more
        await until(lambda: asked)
        lost.seen -= attach_module.LOST_SECONDS
        await until(lambda: fleet.members.get("a") is not lost)


async def test_a_node_that_is_given_up_is_closed_and_its_sessions_run_elsewhere(fleet):
    group = replace(GROUP, session_ids=GROUP.session_ids[:2])
    async with runner_of(fleet, give_up_after=1) as runner:
        broken = worker_of(fleet, "a")
        result = await runner.submit(group)
        await began(broken, *group.session_ids)
        fleet.cluster.names.append("b")
        await until(lambda: "b" in runner.nodes)
        broken.unlucky.add("g.0-0")
        let_end(broken, "g.0-0")
        again = [f"{name}~1" for name in group.session_ids]
        other = worker_of(fleet, "b")
        let_end(other, *again)
        ended = {session.session_id: session.error for session in await result}
        await until(lambda: "a" not in fleet.members)  # its actor was closed
    assert ended["g.0-0"] == "the machine is broken"
    assert ended["g.0-1"].startswith(
        "gave up after 1 consecutive infrastructure failures; the last, g.0-0"
    )
    assert ended[again[0]] is ended[again[1]] is None


async def test_a_runner_of_somebody_else_keeps_its_sessions_when_the_nodes_leave(fleet):
    nodes_lost = []

    def lost(node, why):
        nodes_lost.append(node.name)

    runner = GroupRunner([], lambda *_: None, retries=2, give_up_after=8, lost=lost)
    async with runner:
        result = await runner.submit(replace(GROUP, session_ids=["g.0-0"]))
        async with attached(fleet, runner):
            await began(worker_of(fleet, "a"), "g.0-0")
        assert nodes_lost == ["a"]
        assert statuses(fleet) == {"g.0-0": "cancelled"}
        let_end(worker_of(fleet, "a"), "g.0-0~1")
        async with attached(fleet, runner):
            ended = [(session.session_id, session.status) for session in await result]
    assert ended == [("g.0-0", "cancelled"), ("g.0-0~1", "completed")]
