"""Sessions on nodes whose actors are in this process: their ends, losses and lost answers, in every
order."""

import asyncio
import itertools
from collections import Counter
from dataclasses import replace

import pytest

from rolltap.addons.errors import RecorderError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.nodes import ray as ray_module
from rolltap.trainer.nodes.ray import RayNode
from rolltap.trainer.rollouts.node import NodeLostError, SessionAttempt
from rolltap.trainer.rollouts.queue import Slots
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.tasks.task import Task
from tests.factories import make_call, make_session, write_run
from tests.trainer.nodes.local import (
    ActorUnavailableError,
    LocalSetup,
    RayError,
    until,
)

TASK = Task(id="t", instruction="go", evaluate=["true"])
GROUP = Group(TASK, "g.0", ["g.0-0", "g.0-1", "g.0-2", "g.0-3"])


class Driver:
    """A driver with a fleet of one node, and the sessions that it runs there."""

    def __init__(self, fleet, run):
        self.fleet = fleet
        self.run_folder = run
        self.entered = []
        self.attempts = {}
        self.slots = {"running": asyncio.Event(), "judging": asyncio.Event()}
        for slot in self.slots.values():
            slot.set()

        (member,) = fleet.members.values()
        (self.sessions,) = LocalSetup.workers
        self.handle = member.actor
        self.node = RayNode(fleet, member, Slots(4, 4, 4, 4))
        self.follow()

    def follow(self):
        self.following = asyncio.ensure_future(self.node.follow())

    async def unfollow(self):
        self.following.cancel()
        await asyncio.wait([self.following])

    def run(self, session_id, group=GROUP):
        """Run a session, and return its task."""
        self.attempts[session_id] = attempt = SessionAttempt(session_id, group)

        async def enter(phase):
            self.entered.append((session_id, phase))
            await self.slots[phase].wait()

        return asyncio.ensure_future(self.node.run(attempt, enter))

    def row(self, session_id):
        return self.attempts[session_id].row

    def rows(self, part=""):
        rows = read_rows(self.run_folder / part, "sessions")
        return {row["session_id"]: (row["status"], row["error"]) for row in rows}

    async def began(self, *names):
        """Wait until sessions run, and the run folder knows it."""
        for name in names:
            await self.sessions.began[name].wait()
        known = set()
        while not known.issuperset(names):
            await asyncio.sleep(0.01)
            if (self.run_folder / "run.json").exists():
                known = {row["session_id"] for row in read_rows(self.run_folder, "events")}


@pytest.fixture
async def driver(fleet, tmp_path):
    made = Driver(fleet, tmp_path / "run")
    yield made
    await made.unfollow()


async def test_a_session_enters_each_phase_when_it_has_a_slot_and_its_row_is_there_before_its_end(
    driver,
):
    driver.slots["running"].clear()
    task = driver.run("g.0-0")
    await until(lambda: driver.entered)
    assert not driver.sessions.began["g.0-0"].is_set()
    driver.slots["running"].set()
    driver.sessions.may_end["g.0-0"].set()
    facts = await task
    assert driver.entered == [("g.0-0", "running"), ("g.0-0", "judging")]
    assert facts.completed_calls == 1
    assert driver.row("g.0-0").reward == 1.0
    assert driver.rows() == {"g.0-0": ("completed", None)}


async def test_a_session_that_is_stopped_has_its_row_when_that_is_told(driver):
    task = driver.run("g.0-0")
    await driver.began("g.0-0")
    driver.attempts["g.0-0"].why_stopped = "its group was cancelled"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert driver.rows() == {"g.0-0": ("cancelled", "its group was cancelled")}
    assert driver.row("g.0-0").status == "cancelled"


async def test_a_node_that_reports_and_leaves_a_request_without_an_answer_is_lost(
    driver, at_once, caplog
):
    task = driver.run("g.0-0")
    await driver.began("g.0-0")
    at_once(ray_module, "LOST_SECONDS")
    driver.handle.hanging.add("grant")
    driver.sessions.may_end["g.0-0"].set()
    with pytest.raises(NodeLostError, match="node a is gone"):
        await task
    assert driver.rows() == {"g.0-0": ("infrastructure", "node a is gone")}
    assert "node a did not answer 'grant' within 0 s and is ended" in caplog.text


async def test_a_node_that_reports_and_does_not_stop_a_session_is_lost(driver, at_once):
    task = driver.run("g.0-0")
    await driver.began("g.0-0")
    at_once(ray_module, "LOST_SECONDS")
    driver.sessions.stuck.add("g.0-0")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert driver.rows() == {"g.0-0": ("infrastructure", "node a is gone")}


async def test_a_session_that_is_stopped_before_it_began_has_no_row(driver):
    driver.slots["running"].clear()
    tasks = [driver.run("g.0-0"), driver.run("g.0-1")]
    await until(lambda: len(driver.entered) == 2)
    tasks.append(driver.run("g.0-2"))
    await asyncio.sleep(0)  # it has begun to tell the actor of it
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 3
    assert [driver.row(name) for name in driver.attempts] == [None] * 3
    driver.slots["running"].set()
    driver.sessions.may_end["g.0-0"].set()
    await driver.run("g.0-0")  # the same session, as the runner after this one begins it
    assert driver.rows() == {"g.0-0": ("completed", None)}


async def test_a_node_that_is_gone_costs_the_sessions_that_ran_there(driver):
    tasks = [driver.run("g.0-0"), driver.run("g.0-1")]
    await driver.began("g.0-0", "g.0-1")
    driver.handle.error = RayError("the machine has no power")
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [NodeLostError] * 2
    assert str(ends[0]) == "node a is gone"
    assert driver.rows() == dict.fromkeys(["g.0-0", "g.0-1"], ("infrastructure", "node a is gone"))
    assert driver.row("g.0-1").status == "infrastructure"
    assert str(await driver.following) == "node a is gone"
    assert driver.fleet.members == {}
    with pytest.raises(NodeLostError, match="node a is gone"):
        await driver.run("g.0-2")


async def test_an_error_that_nobody_thought_of_ends_the_sessions_of_its_node(driver):
    running = driver.run("g.0-0")
    await driver.began("g.0-0")

    def fail():
        raise SystemError("the connection to the cluster is broken")

    driver.fleet.cluster.nodes = fail
    driver.handle.error = ActorUnavailableError("it does not answer")
    with pytest.raises(NodeLostError, match="the connection to the cluster is broken"):
        await running
    assert (await driver.following).args == ("the connection to the cluster is broken",)
    assert driver.row("g.0-0").status == "infrastructure"


async def test_a_session_whose_row_came_before_its_node_was_gone_has_ended(driver):
    driver.handle.actor._ended = Untold()
    task = driver.run("g.0-0")
    driver.sessions.may_end["g.0-0"].set()
    await until(lambda: driver.rows())
    assert not task.done()
    driver.handle.error = RayError("the machine has no power")
    assert (await task).unreadable is None
    assert driver.row("g.0-0").reward == 1.0
    assert driver.rows() == {"g.0-0": ("completed", None)}


class Untold(list):
    """Ends of sessions that no report tells: their node dies between their row and the report after
    it."""

    def append(self, ended): ...


async def test_a_node_that_can_run_no_further_session_stops_the_others_and_is_closed(driver):
    names = ["g.0-0", "g.0-1"]
    tasks = [driver.run(name) for name in names]
    await driver.began(*names)
    driver.sessions.failing["g.0-0"] = RecorderError("the recorder has died")
    driver.sessions.may_end["g.0-0"].set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(end) for end in ends} == {NodeLostError}
    assert {str(end) for end in ends} == {"node a: the recorder has died"}
    assert driver.rows() == {
        "g.0-0": ("infrastructure", "the recorder has died"),
        "g.0-1": ("cancelled", "the recorder has died"),
    }
    assert driver.fleet.members == {}


async def test_a_request_whose_answer_is_lost_is_done_once(driver):
    answers = itertools.count()
    call = driver.handle._call

    async def lose_each_second_answer(name, arguments):
        if next(answers) % 2 == 0:
            driver.handle.once = ActorUnavailableError("the line was down")
        return await call(name, arguments)

    driver.handle._call = lose_each_second_answer
    tasks = [driver.run(name) for name in GROUP.session_ids]
    await driver.began(*GROUP.session_ids)
    for name in GROUP.session_ids[:3]:
        driver.sessions.may_end[name].set()
    tasks[3].cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(ends[3], asyncio.CancelledError)
    entered = Counter(driver.entered)
    for name in GROUP.session_ids:
        assert entered[name, "running"] == 1
        assert entered[name, "judging"] == (name != "g.0-3")
    for table in ("sessions", "events"):
        rows = read_rows(driver.run_folder, table)
        assert sorted(row["session_id"] for row in rows) == GROUP.session_ids


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 8, 16, 32])
async def test_a_driver_that_stops_in_the_middle_of_a_report_has_its_rows_once(driver, steps):
    task = driver.run("g.0-0")
    await driver.began("g.0-0")
    task.cancel()
    # to wherever it is: it asks, it waits for the rows to be written, or it is ahead
    for _ in range(steps):
        await asyncio.sleep(0)
    await driver.unfollow()
    driver.follow()
    with pytest.raises(asyncio.CancelledError):
        await task
    await driver.unfollow()
    assert [row["session_id"] for row in read_rows(driver.run_folder, "sessions")] == ["g.0-0"]


async def test_evaluations_are_recorded_apart(driver):
    held_out = replace(GROUP, group_id="evaluation.0", evaluates=True)
    for name, group in {"g.0-0": GROUP, "held-0": held_out}.items():
        driver.sessions.may_end[name].set()
        await driver.run(name, group)
    assert driver.rows().keys() == {"g.0-0"}
    assert driver.rows("evaluation").keys() == {"held-0"}


async def test_the_calls_of_a_forked_session_travel_with_its_group(driver, tmp_path):
    calls = [make_call(call_id=f"c{number}", session_id=f"s-{number}") for number in range(2)]
    recorded = write_run(tmp_path / "recorded", *calls, make_session("s-0"), tokenizer_sha256="t")
    forks = replace(GROUP, fork=RecordedFrom(recorded, "s-0", calls[0].started_at))
    for name in GROUP.session_ids[:2]:
        driver.sessions.may_end[name].set()
        await driver.run(name, forks)
    sources = [driver.sessions.groups[name].fork for name in GROUP.session_ids[:2]]
    assert sources[0] == sources[1]
    assert (sources[0].run, sources[0].session) == (recorded, "s-0")
    assert [row["call_id"] for row in read_rows(sources[0].folder, "calls")] == ["c0"]
    assert sources[0].folder != recorded


async def test_the_policies_of_the_run_and_of_its_evaluations_are_those_of_the_node(driver):
    for part, version in {"": "v1", "evaluation": "v2"}.items():
        (driver.run_folder / part).mkdir(parents=True, exist_ok=True)
        (driver.run_folder / part / "policy.json").write_text(version)
    task = driver.run("g.0-0")
    await driver.began("g.0-0")
    for part, version in {"": "v1", "evaluation": "v2"}.items():
        assert (driver.sessions.out / part / "policy.json").read_text() == version
    driver.sessions.may_end["g.0-0"].set()
    await task


async def test_an_older_policy_that_comes_late_does_not_replace_a_newer_one(driver):
    await driver.unfollow()
    (member,) = driver.fleet.members.values()
    read = []
    for version in ("v1", "v2"):
        (driver.run_folder / "policy.json").write_text(version)
        read.append(driver.fleet.policies())
    await driver.fleet.ask(member, "poll", member.number, read[1])
    attempt = SessionAttempt("g.0-0", GROUP)
    await driver.fleet.ask(member, "begin", next(member.attempts), attempt, read[0], None)
    assert (driver.sessions.out / "policy.json").read_text() == "v2"
