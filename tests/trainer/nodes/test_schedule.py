"""Groups on nodes that are lost, with reports that the tests write; no Ray runs."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest

from rolltap.addons.store.tables import RunWriter, read_rows
from rolltap.trainer.nodes import schedule as schedule_module
from rolltap.trainer.nodes.fleet import Fleet, Member, NodeLostError
from rolltap.trainer.nodes.messages import Report
from rolltap.trainer.nodes.schedule import FleetSchedule
from rolltap.trainer.nodes.writer import Writer
from rolltap.trainer.rollouts.resume import Group, started_event
from rolltap.trainer.tasks.task import Task
from tests.factories import make_session, write_run

GROUP = Group(Task(id="t", instruction="go", evaluate=["true"]), "g.0", [f"g.0-{index}" for index in range(4)])


class Nodes:
    """The methods of a `Fleet` that a schedule uses. A node's next report is the one that a test puts."""

    def __init__(self, run):
        self.members, self.given, self.reports = {}, defaultdict(list), defaultdict(asyncio.Queue)
        self.setup = SimpleNamespace(config=SimpleNamespace(retries=2))
        self._writer = Writer(run)

    def add(self, name, slots=4):
        self.members[name] = member = Member(name, slots, "http://e", None)
        member.report = self.report()
        return member

    @staticmethod
    def report(ended=(), closed=()):
        return Report(1, None, [(session, 0.0) for session in ended], closed, {}, {}, None)

    async def ask(self, member, method, *arguments):
        self.given[member.name].append((method, *arguments))

    async def next_report(self, member):
        member.report = await self.reports[member.name].get()
        if isinstance(member.report, Exception):
            raise member.report
        return member.report

    async def write(self, method, *arguments):
        return await getattr(self._writer, method)(*arguments)

    async def given_to(self, name):
        """Wait until a node was given sessions, and return their ids."""
        while not self.given[name]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        ((_, group, _, _),) = self.given[name]
        return list(group.session_ids)

    def forget(self, member):
        del self.members[member.name]

    def newcomers(self):
        return []

    def policy(self):
        return ""


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


async def test_a_lost_node_costs_what_ran_and_no_session_whose_row_had_come_before_its_report(run):
    fleet, noted = Nodes(run), []
    fleet.add("a")
    told, untold, ran, waited = GROUP.session_ids
    ends = {name: make_session(name, group_id="g.0", task_id="t") for name in GROUP.session_ids}
    async with FleetSchedule(fleet, lambda *_: None, lambda session, _: noted.append(session.session_id)) as schedule:
        result = await schedule.submit(GROUP)
        assert await fleet.given_to("a") == GROUP.session_ids
        with RunWriter(run) as writer:  # as the writer does with the rows of a report
            for name in (told, untold, ran):
                writer.add_event(started_event(make_session(name, group_id="g.0", task_id="t")))
            for name in (told, untold):
                writer.add_session(ends[name])
        fleet.reports["a"].put_nowait(fleet.report([ends[told]]))
        schedule._join(fleet.add("b"))
        fleet.reports["a"].put_nowait(NodeLostError("node a is gone"))
        assert await fleet.given_to("b") == [f"{ran}~1", waited]
        again = [make_session(name, group_id="g.0", task_id="t") for name in (f"{ran}~1", waited)]
        fleet.reports["b"].put_nowait(fleet.report(again, ["g.0"]))
        ended = {session.session_id: session.status for session in await result}
    assert ended == dict.fromkeys([told, untold, f"{ran}~1", waited], "completed") | {ran: "infrastructure"}
    assert sorted(noted) == sorted(ended)
    rows = [row["session_id"] for row in read_rows(run, "sessions")]
    assert sorted(rows) == sorted([told, untold, ran])


async def test_a_deadline_passes_while_a_new_node_takes_its_time_to_join(run, monkeypatch):
    monkeypatch.setattr(schedule_module, "TICK_SECONDS", 0.0)
    fleet, joining = Nodes(run), asyncio.Event()

    async def join(name, *, late):
        fleet.add(name)
        joining.set()
        await asyncio.Event().wait()

    fleet.join = join
    fleet.newcomers = lambda: [] if fleet.members.keys() & {"late"} else ["late"]
    fleet.add("busy", slots=0)
    async with FleetSchedule(fleet, lambda *_: None, lambda *_: None) as schedule:
        await joining.wait()
        result = await schedule.submit(GROUP, seconds=0.0)
        assert await result == []


async def test_a_node_that_has_long_said_nothing_is_lost_and_its_sessions_run_elsewhere(run, monkeypatch):
    monkeypatch.setattr(schedule_module, "TICK_SECONDS", 0.0)
    fleet = Nodes(run)
    silent = fleet.add("silent")
    fleet.kill = lambda member: fleet.reports[member.name].put_nowait(NodeLostError("it was given up"))
    async with FleetSchedule(fleet, lambda *_: None, lambda *_: None) as schedule:
        result = await schedule.submit(GROUP)
        assert await fleet.given_to("silent") == GROUP.session_ids
        schedule._join(fleet.add("other"))
        silent.seen -= schedule_module.LOST_SECONDS
        assert await fleet.given_to("other") == GROUP.session_ids
        fleet.reports["other"].put_nowait(fleet.report([], ["g.0"]))
        await result


async def test_a_session_whose_nodes_are_lost_is_retried_as_often_as_any_other(run):
    fleet = Nodes(run)
    fleet.add("n0")
    group = Group(GROUP.task, "g.0", ["g.0-0"])
    async with FleetSchedule(fleet, lambda *_: None, lambda *_: None) as schedule:
        result = await schedule.submit(group)
        for number, session_id in enumerate(["g.0-0", "g.0-0~1", "g.0-0~2"]):
            assert await fleet.given_to(f"n{number}") == [session_id]
            with RunWriter(run) as writer:
                writer.add_event(started_event(make_session(session_id, group_id="g.0", task_id="t")))
            schedule._join(fleet.add(f"n{number + 1}"))
            fleet.reports[f"n{number}"].put_nowait(NodeLostError("it is gone"))
        ended = await result
    assert [(session.session_id, session.status) for session in ended] == [
        ("g.0-0", "infrastructure"),
        ("g.0-0~1", "infrastructure"),
        ("g.0-0~2", "infrastructure"),
    ]


async def test_a_group_that_is_submitted_after_the_end_is_cancelled(run):
    fleet = Nodes(run)
    fleet.add("a")
    async with FleetSchedule(fleet, lambda *_: None, lambda *_: None) as schedule:
        pass
    assert (await schedule.submit(GROUP)).cancelled()


async def test_a_report_that_is_lost_with_its_node_is_no_fault_of_the_disk(run):
    ray = pytest.importorskip("ray")

    async def lost(*arguments):
        raise ray.exceptions.OwnerDiedError("ff", SimpleNamespace(ip_address="", port=1), "")

    fleet = Fleet("", run, None)
    fleet._ray, fleet._writer = ray, SimpleNamespace(append=SimpleNamespace(remote=lost))
    with pytest.raises(NodeLostError, match="a node is gone, with a report that was not written yet"):
        await fleet.write("append", "a package")
