"""The members of a fleet: they join, are refused, and come back; the engines that each has."""

import asyncio

import pytest

from rolltap.addons.errors import InputError, RunError
from rolltap.trainer.locks import rollout_lock
from rolltap.trainer.nodes import fleet as fleet_module
from rolltap.trainer.nodes.facts import Examined
from rolltap.trainer.nodes.fleet import deal
from rolltap.trainer.rollouts.node import NodeLostError
from rolltap.trainer.tasks.task import Task
from tests.factories import write_run
from tests.trainer.nodes.local import LocalSetup, ObjectLostError, until


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


MISSING = InputError("'codex' is not on the PATH")


async def test_a_node_whose_worker_fails_is_not_used_and_tried_again_after_a_while(
    make_fleet, at_once
):
    fleet = make_fleet("a", "b")
    LocalSetup.unfit.append(MISSING)
    await fleet.open()
    (kept,) = fleet.members
    assert fleet.newcomers() == []
    at_once(fleet_module, "AGAIN_SECONDS")
    fleet.drop(fleet.members[kept])
    assert fleet.newcomers() == [kept]
    assert await fleet.join(kept) is None
    await fleet.close()


async def test_a_node_of_another_tokenizer_is_not_used(run, make_fleet):
    write_run(run, tokenizer_sha256="other")
    with pytest.raises(RunError, match=r"node a: .* was recorded with another tokenizer"):
        await make_fleet().open()


async def test_a_join_that_is_stopped_leaves_no_member(fleet):
    fleet.cluster.names.append("b")
    LocalSetup.is_slow = True
    joining = asyncio.ensure_future(fleet.join("b"))
    await until(lambda: len(LocalSetup.workers) == 2)
    joining.cancel()
    await asyncio.wait([joining])
    assert fleet.members.keys() == {"a"}


async def test_a_start_waits_for_the_writer_of_a_killed_driver(run, make_fleet):
    fleet = make_fleet()
    with rollout_lock(run):  # of the driver, which is killed while its writer appends
        await fleet.open()
    with pytest.raises(RunError, match="still records into"), rollout_lock(run, lambda: True):
        pass
    await fleet.close()
    with rollout_lock(run):
        pass


async def test_a_node_that_does_not_close_does_not_keep_the_driver(make_fleet, at_once):
    fleet = make_fleet()
    await fleet.open()
    fleet.members["a"].actor.hanging.add("close")
    at_once(fleet_module, "LOST_SECONDS")
    await fleet.close()
    assert fleet.members == {}


async def test_a_report_that_is_lost_with_its_node_is_no_fault_of_the_disk(fleet):
    fleet._writer.error = ObjectLostError("its owner died")
    lost = "a node is gone, with a report that was not written yet"
    with pytest.raises(NodeLostError, match=lost):
        await fleet.write("append", [], "a", 1)
    fleet._writer.error = None


def test_tasks_of_an_evaluation_are_taken_beside_those_of_the_training(make_fleet):
    trained = Task(id="a", instruction="go", evaluate=["true"])
    held_out = trained.model_copy(update={"id": "b"})
    first = Examined([trained], {"a": "1"}, {"a": {"task": "1"}}, ["an engine"])
    keys = {"a": {"task": "2"}, "b": {"task": "3"}}
    second = Examined([trained, held_out], {"a": "2", "b": "3"}, keys, ["an engine"])
    fleet = make_fleet()
    fleet.tasks = []
    fleet.add_tasks([trained], first)
    fleet.add_tasks([trained, held_out], second)
    assert fleet.tasks == fleet.found.tasks == [trained, trained, held_out]
    assert fleet.found.digests == {"a": "1", "b": "3"}
    assert fleet.found.keys == {"a": {"task": "1"}, "b": {"task": "3"}}


def test_engines_are_dealt_to_the_nodes_that_each_group_has_one_prefix_cache():
    dealt = []
    for _ in range(4):
        dealt.append(deal(["a", "b"], dealt, 4))
    assert dealt == [["a"], ["b"], ["a"], ["b"]]
    assert deal(["a", "b", "c", "d"], [], 2) == ["a", "b"]
    assert deal(["http://one:8000", "http://two:8000"], [], 2, host="two") == ["http://two:8000"]
    assert deal(["a", "b", "c", "d"], [["a", "b"]], 2) == ["c", "d"]
