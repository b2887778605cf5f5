"""The rows of a node's run reach the run of the driver once each, whatever is killed in between."""

import asyncio
from types import SimpleNamespace

import pyarrow as pa
import pytest

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Event
from rolltap.addons.store.tables import RunWriter, read_rows, run_files
from rolltap.trainer.nodes import node as module
from rolltap.trainer.nodes.messages import Failure, Package
from rolltap.trainer.nodes.node import Node, Shard
from rolltap.trainer.nodes.writer import Writer
from rolltap.trainer.rollouts.resume import started_event
from tests.factories import make_call, make_session, write_run


@pytest.fixture
def node(tmp_path):
    return write_run(tmp_path / "node", recorders=[{"name": "a"}], engines={"http://e": {"model": "m"}})


async def sent(shard, node, writer, again=False):
    """Send what is new of a node's run, and return the names of the tables."""
    package = Package(shard.new(), read_metadata(node), {"s-0.log": b"out"})
    assert await writer.append(package, again, "a") is None
    return [table for table, _ in package.tables]


def ids(run, table):
    return sorted(str(row["call_id"] if table == "calls" else row["session_id"]) for row in read_rows(run, table))


async def test_rows_are_sent_once_a_session_after_its_calls_and_compaction_sends_none_again(node, tmp_path):
    shard, writer, run = Shard(node), Writer(tmp_path / "run"), tmp_path / "run"
    with RunWriter(node) as recorder:
        for number in range(3):
            recorder.add_call(make_call(call_id=f"c{number}", session_id=f"s-{number % 2}"))
        assert await sent(shard, node, writer) == ["calls"]
        recorder.add_call(make_call(call_id="c3", session_id="s-0"))
        recorder.add_event(Event(kind="refused"))
        recorder.add_session(make_session("s-0"))
        assert await sent(shard, node, writer) == ["calls", "events", "sessions"]
    before = run_files(node, "calls")[0].stat().st_ino
    with RunWriter(node) as recorder:
        recorder.add_call(make_call(call_id="c4", session_id="s-1"))
        assert await sent(shard, node, writer) == ["calls"]  # the earlier segment was compacted
    assert run_files(node, "calls")[0].stat().st_ino == before
    assert ids(run, "calls") == ["c0", "c1", "c2", "c3", "c4"]
    assert ids(run, "sessions") == ["s-0"]
    assert len(list(read_rows(run, "events"))) == 1
    assert read_metadata(run)["engines"] == {"http://e": {"model": "m"}}
    assert (run / "logs" / "s-0.log").read_text() == "out"


async def test_what_a_write_that_was_cancelled_had_done_is_not_done_twice(node, tmp_path):
    run = tmp_path / "run"
    with RunWriter(node) as recorder:
        recorder.add_call(make_call(call_id="c0", session_id="s-0"))
        await sent(Shard(node), node, Writer(run))
        recorder.add_call(make_call(call_id="c1", session_id="s-0"))
        recorder.add_session(make_session("s-0"))
    await sent(Shard(node), node, Writer(run), again=True)
    assert ids(run, "calls") == ["c0", "c1"]
    assert ids(run, "sessions") == ["s-0"]


async def test_a_question_whose_answer_is_lost_takes_no_report_away(node, monkeypatch):
    monkeypatch.setattr(module, "require_ray", lambda: SimpleNamespace(put=lambda package: package))
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.01)
    actor = Node("a", None)
    actor._out, actor._shard = node, Shard(node)
    with RunWriter(node) as recorder:
        recorder.add_session(make_session("t[0]-0"))
        (node / "logs").mkdir()
        (node / "logs" / "t[0]-0.log").write_text("out")
        actor._note(make_session("t[0]-0"), 0.0)
        gone, new = await asyncio.gather(actor.poll(0, ""), actor.poll(0, ""))
        assert gone is new
        assert [table for table, _ in new.package.tables] == ["sessions"]
        assert new.package.logs == {"t[0]-0.log": b"out"}
        assert await actor.poll(0, "") is new  # until it is acknowledged
        recorder.add_session(make_session("s-1"))
        further = await actor.poll(new.number, "")
    assert further.number == new.number + 1
    [(_, stream)] = further.package.tables
    assert [row["session_id"] for row in pa.ipc.open_stream(stream).read_all().to_pylist()] == ["s-1"]


async def test_sessions_that_no_node_holds_get_a_row_and_others_do_not(tmp_path):
    begun = [started_event(make_session(f"g-{number}")) for number in range(3)]
    run = write_run(tmp_path / "run", *begun, make_session("g-2"))
    lost = await Writer(run).end_lost({"g-1"}, "node b is gone", [])
    assert [(session.session_id, session.status, session.error) for session in lost] == [
        ("g-0", "infrastructure", "node b is gone")
    ]
    assert ids(run, "sessions") == ["g-0", "g-2"]


async def test_sessions_that_an_earlier_driver_left_are_cancelled(tmp_path):
    begun = [started_event(make_session(f"g-{number}")) for number in range(2)]
    run = write_run(tmp_path / "run", *begun, make_session("g-1"))
    await Writer(run).end_interrupted()
    rows = {row["session_id"]: row["status"] for row in read_rows(run, "sessions")}
    assert rows == {"g-0": "cancelled", "g-1": "completed"}
    assert await Writer(tmp_path / "new").end_interrupted() is None


async def test_another_tokenizer_is_a_failure_of_the_writer(node, tmp_path):
    run = write_run(tmp_path / "run", tokenizer_sha256="other")
    failure = await Writer(run).append(Package([], read_metadata(node), {}), False, "a")
    assert isinstance(failure, Failure)
    assert failure.message.startswith(f"node a: {run} was recorded with another tokenizer")
