"""The rows of a node's run reach the run of the driver once each, whatever is killed in between."""

import pytest

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Event
from rolltap.addons.store.tables import RunWriter, read_rows, run_files
from rolltap.trainer.nodes.messages import Failure, Package
from rolltap.trainer.nodes.rows import ForkedCalls, Shard, Writer, keep_calls
from rolltap.trainer.rollouts.recorder import started_event
from tests.factories import make_call, make_session, write_run


@pytest.fixture
def node(tmp_path):
    engines = {"http://e": {"model": "m"}}
    return write_run(tmp_path / "node", recorders=[{"name": "a"}], engines=engines)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


class Sender:
    """Sends what is new of a node's run, each time as a further report."""

    def __init__(self, node, writer, part=""):
        self.shard = Shard(node, part)
        self.writer = writer
        self.number = 0

    async def send(self, *told):
        """Return the names of the tables that are sent."""
        self.number += 1
        package = self.shard.package(told)
        assert await self.writer.append([package], "a", self.number) is None
        return [table for table, _ in package.tables]


def ids(run, table):
    key = "call_id" if table == "calls" else "session_id"
    return sorted(row[key] for row in read_rows(run, table))


async def test_rows_are_sent_once_a_session_after_its_calls_and_compaction_sends_none_again(
    node, run
):
    sender = Sender(node, Writer(run))
    with RunWriter(node) as recorder:
        for number in range(3):
            recorder.add_call(make_call(call_id=f"c{number}", session_id=f"s-{number % 2}"))
        assert await sender.send() == ["calls"]
        recorder.add_call(make_call(call_id="c3", session_id="s-0"))
        recorder.add_event(Event(kind="refused"))
        recorder.add_session(make_session("s-0"))
        assert await sender.send("s-0") == ["calls", "events", "sessions"]
    before = run_files(node, "calls")[0].stat().st_ino
    with RunWriter(node) as recorder:
        recorder.add_call(make_call(call_id="c4", session_id="s-1"))
        assert await sender.send() == ["calls"]  # the earlier segment was compacted
    assert run_files(node, "calls")[0].stat().st_ino == before
    assert ids(run, "calls") == ["c0", "c1", "c2", "c3", "c4"]
    assert ids(run, "sessions") == ["s-0"]
    assert len(list(read_rows(run, "events"))) == 1
    assert read_metadata(run)["engines"] == {"http://e": {"model": "m"}}


async def test_a_session_that_ends_brings_its_logs_and_no_other(node, run):
    (node / "logs").mkdir()
    for name in ("t[0]-0.log", "t[0]-1.log"):
        (node / "logs" / name).write_text(name)
    await Sender(node, Writer(run)).send("t[0]-0")
    assert [path.name for path in (run / "logs").iterdir()] == ["t[0]-0.log"]


async def test_nothing_new_is_no_package(node):
    shard = Shard(node)
    assert shard.package().metadata["recorders"] == [{"name": "a"}]
    assert shard.package() is None
    assert Shard(node / "evaluation").package() is None  # no recorder has begun there


async def test_a_report_that_comes_again_is_written_once(node, run):
    writer = Writer(run)
    with RunWriter(node) as recorder:
        recorder.add_call(make_call(call_id="c0", session_id="s-0"))
        package = Shard(node).package()
    for _ in range(2):  # the driver was stopped while it waited for the first time
        await writer.append([package], "a", 7)
    await writer.append([package], "b", 1)
    assert ids(run, "calls") == ["c0", "c0"]  # the other one is another node's


async def test_a_lost_node_costs_the_sessions_that_ran_and_none_whose_row_had_come(node, run):
    writer = Writer(run)
    sender = Sender(node, writer)
    with RunWriter(node) as recorder:
        for number in range(3):
            recorder.add_event(started_event(make_session(f"g-{number}")))
        recorder.add_session(make_session("g-0"))
        await sender.send("g-0")
        recorder.add_session(make_session("g-1"))
        await sender.send()  # its end is told by the next report, which never comes
    lost = await writer.end_node("a", "node a is gone", ["g-1", "g-2", "g-3"])
    assert [session.session_id for session in lost.ended] == ["g-1"]
    (running,) = lost.running
    assert (running.session_id, running.status) == ("g-2", "infrastructure")
    assert running.error == "node a is gone"
    assert ids(run, "sessions") == ["g-0", "g-1", "g-2"]
    assert (await writer.status())["error"] == "lost: node a is gone"


async def test_a_node_that_comes_back_counts_its_reports_anew(node, run):
    writer = Writer(run)
    for number in range(2):
        with RunWriter(node) as recorder:
            recorder.add_call(make_call(call_id=f"c{number}", session_id="s"))
            shard = Shard(node)
            await writer.append([shard.package()], "a", 1)
        await writer.end_node("a", "", [])
    assert ids(run, "calls") == ["c0", "c0", "c1"]
    assert (await writer.status())["error"] == ""


async def test_sessions_that_an_earlier_driver_left_are_cancelled(tmp_path):
    begun = [started_event(make_session(f"g-{number}")) for number in range(2)]
    run = write_run(tmp_path / "run", *begun, make_session("g-1"))
    held_out = write_run(run / "evaluation", started_event(make_session("h-0")))
    writer = Writer(run)
    await writer.end_interrupted()
    rows = {
        row["session_id"]: row["status"]
        for part in (run, held_out)
        for row in read_rows(part, "sessions")
    }
    assert rows == {"g-0": "cancelled", "g-1": "completed", "h-0": "cancelled"}
    assert await Writer(tmp_path / "new").end_interrupted() is None


async def test_another_tokenizer_is_a_failure_that_names_the_node(node, tmp_path):
    run = write_run(tmp_path / "run", tokenizer_sha256="other")
    failure = await Writer(run).append([Package([], read_metadata(node), {})], "a", 1)
    assert isinstance(failure, Failure)
    assert failure.message.startswith(f"node a: {run} was recorded with another tokenizer")


def test_the_calls_of_a_forked_session_are_a_run_of_their_own(tmp_path):
    calls = [make_call(call_id=f"c{number}", session_id=f"s-{number % 2}") for number in range(4)]
    run = write_run(tmp_path / "run", *calls, make_session("s-0"), tokenizer_sha256="t")
    forked = ForkedCalls(run)
    keep_calls(forked.of("s-0"), tmp_path / "small")
    assert ids(tmp_path / "small", "calls") == ["c0", "c2"]
    assert read_metadata(tmp_path / "small")["tokenizer_sha256"] == "t"
    with RunWriter(run) as recorder:
        recorder.add_call(make_call(call_id="c5", session_id="s-0"))
    keep_calls(forked.of("s-0"), tmp_path / "later")
    assert ids(tmp_path / "later", "calls") == ["c0", "c2", "c5"]
