"""The trace source of an online run, with rewards from a table in place of harness and engine."""

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from rolltap.addons.errors import RecorderError
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.rollouts.task import Task
from rolltap.trainer.training.attempts import Attempt
from rolltap.trainer.training.online import OnlineTraces
from rolltap.trainer.training.recipe import Recipe
from tests.trainer.runs.recorded_runs import make_call

TASKS = [Task(id=name, instruction="go", evaluate=["true"]) for name in "abcde"]


class Loop:
    """An online run. `silent` are the tasks whose rewards are all equal; `run` and `published` note what it did."""

    def __init__(self, folder, silent="", **settings):
        write_metadata(folder, {})
        self.folder, self.silent = folder, silent
        self.recipe = Recipe(model="m", tasks="t", harness="h", steps=9, sessions_per_group=2, **settings)
        self.run: list[str] = []
        self.published: list[str] = []
        self.faults = False
        self.console = Console(file=StringIO(), width=1000)

    def publish(self, model, version):
        self.published.append(version)

    def run_sessions(self, groups, version):
        sessions = [
            Session(
                session_id=session_id,
                group_id=group.group_id,
                task_id=group.task.id,
                status="completed",
                reward=0.5 if group.task.id in self.silent else float(session_id.partition(".")[2].count("-0")),
                policy_version=version,
            )
            for group in groups
            for session_id in group.session_ids
        ]
        if self.faults:
            for session in sessions:
                session.status, session.reward, session.error = "error", None, "the engine is down"
        with RunWriter(self.folder, "never") as writer:
            for session in reversed(sessions):
                writer.add_call(make_call(session.session_id, "c", [1], [2, 3]))
                writer.add_session(session)
        self.run += [session.session_id for session in sessions]
        return sessions

    def step(self, number, tasks, attempt=0):
        """Return the batch of a step, by a source of its own as after a restart."""
        source = OnlineTraces(
            self.recipe, TASKS, self.folder, Attempt("1a2b3c4d", attempt), self, self.run_sessions, self.console
        )
        source.trainer = SimpleNamespace(
            state=SimpleNamespace(global_step=number), args=SimpleNamespace(seed=7, max_steps=9), model=None
        )
        return source([{"task_id": task} for task in tasks])


def test_a_step_runs_one_group_for_each_row_and_has_their_order(tmp_path):
    loop = Loop(tmp_path)
    batch = loop.step(3, "ba")
    ids = ["b-1a2b3c4d.3.0-0.0", "b-1a2b3c4d.3.0-1.0", "a-1a2b3c4d.3.1-0.0", "a-1a2b3c4d.3.1-1.0"]
    assert loop.run == list(batch.rewards) == [trace.session_id for trace in batch.traces] == ids
    assert batch.on_policy
    assert loop.published == ["1a2b3c4d.3.0"]
    assert "step 4/9  4 sessions in " in loop.console.file.getvalue()


def test_a_step_that_is_on_the_disk_is_neither_run_nor_published_again(tmp_path):
    loop = Loop(tmp_path)
    first = loop.step(3, "ba")
    loop.run.clear()
    assert loop.step(3, "ba", attempt=1) == first
    assert (loop.run, loop.published) == ([], ["1a2b3c4d.3.0"])
    assert "4 sessions (4 recorded before) in 0.0 s" in loop.console.file.getvalue()


def test_only_the_missing_sessions_of_a_step_are_run_by_newly_published_weights(tmp_path):
    loop = Loop(tmp_path)
    loop.step(3, "b")
    batch = loop.step(3, "ba", attempt=1)
    assert loop.run[2:] == ["a-1a2b3c4d.3.1-0.1", "a-1a2b3c4d.3.1-1.1"]
    assert loop.published == ["1a2b3c4d.3.0", "1a2b3c4d.3.1"]
    assert list(batch.rewards) == loop.run


def test_a_step_whose_sessions_are_all_faults_ends_the_training_and_runs_again_at_the_next_start(tmp_path):
    loop = Loop(tmp_path)
    loop.faults = True
    with pytest.raises(RecorderError, match=r"all 2 sessions of step 4 failed .*; the first: the engine is down; put"):
        loop.step(3, "b")
    loop.faults = False
    assert len(loop.step(3, "b", attempt=1).rewards) == 2


class TestGroupsWithoutSignal:
    @pytest.mark.parametrize(
        ("silent", "limit", "groups"), [("", 2, 2), ("a", 0, 2), ("a", 1, 3), ("ab", 1, 3), ("ab", 9, 4)]
    )
    def test_each_is_replaced_by_one_further_group_up_to_the_limit(self, tmp_path, silent, limit, groups):
        loop = Loop(tmp_path, silent, replace_zero_variance=limit)
        batch = loop.step(3, "ab")
        assert len({labelled.group_id for labelled in batch.rewards.values()}) == groups
        assert batch.ledger.sampled == 2 * 2 * groups
        assert loop.published == ["1a2b3c4d.3.0"]

    def test_a_further_group_without_signal_is_replaced_too_until_the_limit(self, tmp_path):
        loop = Loop(tmp_path, "abcde", replace_zero_variance=4)
        loop.step(3, "a")
        tasks = [session_id.partition("-")[0] for session_id in loop.run[::2]]
        assert tasks[0] == "a"
        assert sorted(tasks[1:]) == ["b", "c", "d", "e"]
        assert [session_id.partition(".3.")[2][0] for session_id in loop.run[::2]] == list("01234")

    def test_a_restarted_step_draws_the_same_tasks_and_takes_their_sessions(self, tmp_path):
        loop = Loop(tmp_path, "abc", replace_zero_variance=4)
        first = loop.step(3, "ab")
        loop.run.clear()
        assert loop.step(3, "ab", attempt=1) == first
        assert loop.run == []
