import asyncio
from collections import Counter, defaultdict
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest

from rolltap.addons.errors import RecorderError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.records import Session
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.rollouts import runner as runner_module
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.node import NodeLostError, SessionAttempt
from rolltap.trainer.rollouts.queue import Slots
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.rollouts.session import LocalNode
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.facts import Facts
from rolltap.trainer.traces.reader import load_sessions
from tests.addons.harness import until
from tests.scripted_engine import Say
from tests.trainer.rollouts.contexts import (
    ONE_CALL,
    context_of,
    pass_time,
    run_groups,
    runner_of,
)

TASK = Task(id="count", instruction="go", evaluate=["true"])


def group_of(name, *places, task=TASK, **fields):
    return Group(task, name, [f"{name}-{place}" for place in places], **fields)


@pytest.fixture
def name(tmp_path):
    """Return the name of a group that no other test has."""
    return tmp_path.name


@pytest.fixture
def pause(monkeypatch):
    """Return a function that sets the seconds before a retry. They are 0 before."""

    def pause(seconds):
        monkeypatch.setattr(runner_module, "PAUSE_SECONDS", seconds)

    pause(0.0)
    return pause


class TestWithPrograms:
    async def test_every_session_is_recorded_with_its_reward_and_its_group(
        self, recorder, tmp_path, name
    ):
        lines = []
        steps = set()

        def advance(line, done, total):
            lines.append(line)
            steps.add((done, total))

        groups = [group_of(name, 2, 0), group_of("empty")]
        sessions = await run_groups(groups, context_of(recorder, tmp_path, ONE_CALL), advance)
        assert {session.session_id for session in sessions} == {f"{name}-2", f"{name}-0"}
        recorded = load_sessions(recorder.path)
        for session in sessions:
            assert recorded[session.session_id] == session
            assert (session.group_id, session.status, session.reward) == (name, "completed", 1.0)
        assert steps == {(0, 2), (1, 2), (2, 2)}
        for phase in ("preparing", "running", "judging"):
            assert phase in " ".join(lines)
        assert lines[-1] == "2 of 2 sessions: 2 completed; mean reward 1"

    async def test_a_session_without_a_call_has_the_expected_version(
        self, recorder, tmp_path, name
    ):
        context = context_of(recorder, tmp_path, "true")
        (session,) = await run_groups([group_of(name, 0)], context, policy_version="7")
        assert load_sessions(recorder.path)[session.session_id].policy_version == "7"

    async def test_a_task_that_cannot_be_run_does_not_end_the_others_and_is_told_once(
        self, recorder, tmp_path, name, caplog
    ):
        (tmp_path / "empty").mkdir()
        no_checkout = {"workspace": tmp_path / "empty", "commit": "0123456789abcdef"}
        bad = Task(id="bad", instruction="go", evaluate=["true"], **no_checkout)
        groups = [group_of(name, 0, 1, 2, task=bad), group_of(f"{name}-good", 0)]
        context = context_of(recorder, tmp_path, ONE_CALL, retries=2, give_up_after=3)
        sessions = await run_groups(groups, context)
        statuses = Counter((session.task_id, session.status) for session in sessions)
        assert statuses == {("bad", "infrastructure"): 3, ("count", "completed"): 1}
        assert caplog.text.count("no session of task bad can be run") == 1

    async def test_a_session_that_is_judged_leaves_its_place_to_others(
        self, recorder, tmp_path, name
    ):
        first = tmp_path / "first"
        second = tmp_path / "second"
        waits_for_second = f"[ ! -e waits ] || until [ -e {second} ]; do sleep 0.01; done"
        task = TASK.model_copy(update={"evaluate": ["sh", "-c", waits_for_second]})
        script = f"{ONE_CALL}; if mkdir {first}; then touch waits; else touch {second}; fi"
        context = context_of(recorder, tmp_path, script, concurrency=1)
        sessions = await run_groups([group_of(name, 0, 1, task=task)], context)
        assert [session.reward for session in sessions] == [1.0, 1.0]

    async def test_a_preparation_that_takes_too_long_is_tried_again(
        self, recorder, tmp_path, name, monkeypatch, pause
    ):
        tried = tmp_path / "tried"

        class Stuck(ProcessRuntime):
            @asynccontextmanager
            async def box(self, spec):
                is_of_session = spec.proxy is not None  # neither the judge's nor of `--version`
                if is_of_session and not tried.exists():
                    tried.touch()
                    await asyncio.Event().wait()
                async with super().box(spec) as box:
                    yield box

        settings = {"preparing_timeout": 3600, "retries": 1}
        context = context_of(recorder, tmp_path, ONE_CALL, Stuck(), **settings)
        passing = asyncio.create_task(pass_time(monkeypatch, 3600, tried))
        failed, ended = await run_groups([group_of(name, 0)], context)
        await passing
        assert failed.status == "infrastructure"
        assert "not prepared within 3600 s: raise --preparing-timeout" in failed.error
        assert (ended.status, ended.reward) == ("completed", 1.0)

    async def test_a_session_or_a_group_is_cancelled_and_the_others_go_on(
        self, recorder, engine, tmp_path, name
    ):
        go_on = tmp_path / "go"
        called = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def answer(request):
            loop.call_soon_threadsafe(called.put_nowait, request)
            return Say("Hi.")

        engine.otherwise = answer
        script = f"{ONE_CALL}; until [ -e {go_on} ]; do sleep 0.01; done"
        context = context_of(recorder, tmp_path, script, ready=1, preparing=2)
        kept = group_of(name, 0, 1)
        dropped = group_of(f"{name}-b", 0, 1, 2)
        async with runner_of(context) as running:
            result = await running.submit(kept)
            for _ in kept.session_ids:  # both run, and no slot is left
                await called.get()
            begun = await running.submit(dropped)
            running.cancel(kept.session_ids[0], "it is not needed")
            running.cancel(dropped.group_id, "its weights are too old")
            stopped = await begun  # without waiting for a slot
            go_on.touch()
            await result
        recorded = load_sessions(recorder.path)
        for session in stopped:
            row = recorded[session.session_id]
            assert (row.status, row.error) == ("cancelled", "its weights are too old")
        first, second = [recorded[session_id] for session_id in kept.session_ids]
        assert (first.status, first.error) == ("cancelled", "it is not needed")
        assert (second.status, second.error) == ("completed", None)

    async def test_a_session_is_as_old_as_its_first_call_and_without_one_or_in_an_evaluation_never(
        self, recorder, tmp_path, engine, name
    ):
        begun = tmp_path / "begun"
        call = tmp_path / "call"
        begun.mkdir()
        script = (
            f"mktemp -p {begun}; until [ -e {call} ]; do sleep 0.01; done; {ONE_CALL}; sleep 600"
        )
        engine.otherwise = lambda request: Say("Hi.", weight_version="3")
        context = context_of(recorder, tmp_path, script)
        evaluation = group_of(f"{name}-e", 0, evaluates=True)
        async with runner_of(context, evaluation=context) as running:
            result = await running.submit(group_of(name, 0))
            await running.submit(evaluation)
            await until(lambda: len([*begun.iterdir()]) == 2)
            running.cancel_running(lambda version: True, "too old")
            assert running.running_versions() == {}
            call.touch()
            await until(lambda: recorder.rows.first_version(evaluation.session_ids[0]))
            await until(running.running_versions)
            assert running.running_versions() == {f"{name}-0": "3"}
            running.cancel_running(lambda version: version != "3", "too old")
            running.cancel_running(lambda version: version == "3", "its weights are too old")
            (session,) = await result
            running.cancel(evaluation.group_id, "it is not needed")
        assert (session.status, session.policy_version) == ("cancelled", "3")
        assert session.error == "its weights are too old"

    async def test_a_group_of_forks_runs_beside_others(self, recorder, tmp_path, name):
        context = context_of(recorder, tmp_path, ONE_CALL)
        (first,) = await run_groups([group_of(name, 0)], context)
        ((asked,),) = recorder.rows.of("calls", first.session_id, ("started_at",))
        later = asked + timedelta(seconds=1)
        run = recorder.path.absolute()
        groups = [
            group_of(name, 1),
            group_of(f"{name}-same", 0, fork=RecordedFrom(run, first.session_id, asked)),
            group_of(f"{name}-short", 0, fork=RecordedFrom(run, first.session_id, later)),
        ]
        ended = {session.group_id: session for session in await run_groups(groups, context)}
        for group in groups[:2]:
            session = ended[group.group_id]
            assert (session.status, session.reward) == ("completed", 1.0)
        diverged = ended[f"{name}-short"]
        assert (diverged.status, diverged.reward) == ("diverged", None)
        assert diverged.error == "diverged: it ended before the call at which it forks"

    async def test_what_sessions_share_is_made_once_for_several_calls(
        self, recorder, tmp_path, name, monkeypatch
    ):
        asked = tmp_path / "asked"
        program = tmp_path / "program"
        program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
        program.chmod(0o755)
        harness = Harness(name="x", program=str(program), headless=["go"])
        context = context_of(recorder, tmp_path, harness)
        digests = []
        monkeypatch.setattr(Task, "digest", lambda task: digests.append(task.id) or "d")
        await run_groups([group_of(name, 0, 1)], context)
        await run_groups([group_of(name, 2, 3)], context)
        assert asked.read_text().split().count("--version") == 1
        assert digests == ["count"]

    async def test_a_recorder_that_dies_during_a_session_is_an_error_of_its_own(
        self, engine, tmp_path, tokenizer_folder, name
    ):
        recorder = Recorder(tmp_path / "run", engine=engine.url, model=tokenizer_folder)
        with suppress(RecorderError), recorder:
            process = recorder._processes[0]
            context = context_of(recorder, tmp_path, f"kill -9 {process.pid}")
            with pytest.raises(RecorderError, match=r"the recorder (died|does not end)"):
                await run_groups([group_of(name, 0)], context)
            (session,) = load_sessions(recorder.path).values()
            assert (session.status, session.reward) == ("infrastructure", None)
            assert "the recorder" in session.error
            await until(lambda: process.ended)
            with pytest.raises(RecorderError, match="the recorder died with status -9"):
                await run_groups([group_of(name, 1)], context)  # before a session


class TestEvaluations:
    @pytest.fixture
    def contexts(self, recorder, tmp_path):
        """Return the contexts of a node's sessions, and of those that evaluate."""

        def check():
            raise RecorderError("the second recorder died")

        dead = SimpleNamespace(engine=recorder.engine, check=check)
        return context_of(recorder, tmp_path, "true"), context_of(dead, tmp_path, "true")

    @pytest.fixture
    def node(self, contexts):
        async def evaluation():
            return contexts[1]

        return LocalNode(contexts[0].config.slots(), contexts[0], evaluation)

    async def test_a_group_that_evaluates_has_a_context_of_its_own(self, contexts, node):
        evaluates = group_of("b", 0, evaluates=True)
        assert await node.context_of(group_of("a", 0)) is contexts[0]
        assert await node.context_of(evaluates) is contexts[1]

    async def test_the_recorder_of_an_evaluation_must_run_too(self, node):
        attempt = SessionAttempt("b-0", group_of("b", 0, evaluates=True))
        with pytest.raises(RecorderError, match="the second recorder died"):
            await node.run(attempt, None)


class PlayedNode:
    """A node whose sessions run until the test ends them, by a status or the loss of the node, or
    end `always` with the same status."""

    def __init__(self, name="n", running=2, always=None, **slots):
        self.name = name
        self.always = always
        self.slots = Slots(preparing=running, ready=0, running=running, judging=running, **slots)
        self.ends = {}
        self.stopped = []
        self._running = defaultdict(asyncio.Event)

    async def run(self, attempt, enter):
        await enter("running")
        name = attempt.session_id
        attempt.row = Session(session_id=name, task_id=attempt.group.task.id, status="cancelled")
        self.ends[name] = asyncio.get_running_loop().create_future()
        self._running[name].set()
        if self.always is not None:
            self.ends[name].set_result(self.always)
        try:
            attempt.row.status = await self.ends[name]
        except asyncio.CancelledError:
            self.stopped.append((name, attempt.why_stopped))
            attempt.row.error = attempt.why_stopped
            raise
        except NodeLostError as error:
            attempt.row.status = "infrastructure"
            attempt.row.error = str(error)
            raise
        return Facts(completed_calls=attempt.row.status == "completed")

    def first_version(self, session_id):
        return "1"

    async def runs(self, *names):
        """Wait until these sessions run."""
        for name in names:
            await self._running[name].wait()

    async def end(self, name, status="completed"):
        await self.runs(name)
        self.ends[name].set_result(status)

    async def die(self, name):
        await self.runs(name)
        self.ends[name].set_exception(NodeLostError("the machine is off"))


def none(*_):
    """Do nothing: for a runner whose progress or lost nodes nobody asks for."""


def open_runner(*nodes, advance=none, retries=0, give_up_after=9, **settings):
    return GroupRunner(nodes, advance, retries=retries, give_up_after=give_up_after, **settings)


@pytest.mark.usefixtures("pause")
class TestWithoutPrograms:
    @pytest.fixture
    async def node(self):
        return PlayedNode()

    async def test_a_block_that_fails_ends_every_session_and_every_result(self, node):
        running = open_runner(node)
        results = []

        async def fail():
            async with running:
                results.append(await running.submit(group_of("a", 0)))
                results.append(await running.submit(group_of("b", 0, 1)))
                await node.runs("a-0", "b-0")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        results.append(await running.submit(group_of("late", 0)))
        assert [result.cancelled() for result in results] == [True] * 3
        assert node.ends["a-0"].cancelled()

    async def test_a_block_is_left_when_its_groups_have_ended_after_their_retries_too(self, node):
        async with asyncio.TaskGroup() as ending, open_runner(node, retries=1) as running:
            result = await running.submit(group_of("a", 0))
            ending.create_task(node.end("a-0", "infrastructure"))
            ending.create_task(node.end("a-0~1"))
        assert [session.session_id for session in result.result()] == ["a-0", "a-0~1"]

    async def test_one_who_waits_no_longer_for_a_group_stops_nobody(self, node):
        async with open_runner(node) as running:
            given_up = await running.submit(group_of("a", 0))
            other = await running.submit(group_of("b", 0))
            await node.runs("a-0", "b-0")
            given_up.cancel()
            await node.end("a-0")
            await node.end("b-0")
            assert [session.status for session in await other] == ["completed"]

    async def test_a_block_that_waits_for_a_group_of_which_nobody_waits_for_the_result_is_idle(
        self, node, monkeypatch
    ):
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon
        turns = []

        def counted(*arguments, **how):
            turns.append(arguments)
            return call_soon(*arguments, **how)

        async def leave():
            async with open_runner(node) as running:
                (await running.submit(group_of("a", 0))).cancel()
                await node.runs("a-0")

        leaving = asyncio.create_task(leave())
        await node.runs("a-0")
        for _ in range(9):  # until it waits
            await asyncio.sleep(0)
        monkeypatch.setattr(loop, "call_soon", counted)
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(turns) == 9  # this test's own
        await node.end("a-0")
        await leaving

    async def test_a_group_with_a_name_that_is_used_leaves_the_first_as_it_is(self, node):
        async with open_runner(node) as running:
            first = await running.submit(group_of("a", 0))
            with pytest.raises(ValueError, match="is there already"):
                await running.submit(group_of("a", 0, 1))
            await node.end("a-0")
            assert [session.session_id for session in await first] == ["a-0"]

    async def test_a_session_that_waits_for_its_retry_leaves_its_place_and_may_be_cancelled(
        self, pause
    ):
        pause(3600.0)
        node = PlayedNode(running=1)
        steps = []

        def advance(line, done, total):
            steps.append((done, total))

        async with open_runner(node, advance=advance, retries=1) as running:
            waits = await running.submit(group_of("a", 0))
            await node.end("a-0", "infrastructure")
            second = await running.submit(group_of("b", 0))
            await node.end("b-0")
            assert [session.status for session in await second] == ["completed"]
            assert not waits.done()
            running.cancel("a-0~1", "no more")
            assert [session.session_id for session in await waits] == ["a-0"]
        assert steps[-1] == (1, 1)

    async def test_sessions_that_are_stopped_are_no_failures_and_those_that_never_ran_do_not_count(
        self, node
    ):
        steps = []

        def advance(line, done, total):
            steps.append((done, total))

        async with open_runner(node, advance=advance, give_up_after=2) as running:
            result = await running.submit(group_of("a", *range(5)))
            await node.runs("a-0", "a-1")
            running.cancel("a", "too old")
            assert {session.error for session in await result} == {"too old"}
        assert steps[-1] == (2, 2)

    async def test_failures_of_a_group_that_is_apart_end_it_alone(self):
        node = PlayedNode(running=4)
        async with open_runner(node, give_up_after=2) as running:
            other = await running.submit(group_of("b", 0), apart=True)
            failing = await running.submit(group_of("a", *range(9)), apart=True)
            await node.end("a-0", "infrastructure")
            await node.end("a-1", "infrastructure")
            sessions = await failing
            await node.end("b-0")
            assert [session.status for session in await other] == ["completed"]
        assert len(sessions) == 3
        last = sessions[-1]
        assert (last.session_id, last.status) == ("a-2", "cancelled")
        assert last.error.startswith(
            "its group was given up after 2 consecutive infrastructure failures; the last, a-1"
        )

    async def test_failures_of_all_groups_count_together_while_an_engine_does_not_answer(
        self, node
    ):
        async def run_groups_that_fail():
            async with open_runner(node, silent=lambda: ["gone"], give_up_after=2) as running:
                for name in "abc":
                    await running.submit(group_of(name, 0), apart=True)
                for name in "ab":
                    await node.end(f"{name}-0", "infrastructure")

        why = "gave up after 2 consecutive infrastructure failures; the last, b-0"
        with pytest.raises(RecorderError, match=why):
            await run_groups_that_fail()

    async def test_a_stop_that_comes_after_the_outcome_changes_nothing_of_it(self, node):
        has_outcome = asyncio.Event()

        async def run(attempt, enter):
            await enter("running")
            attempt.row = Session(session_id="a-0", status="completed", reward=1.0)
            has_outcome.set()
            await asyncio.Event().wait()  # as the end of its row

        node.run = run
        async with open_runner(node, give_up_after=1) as running:
            result = await running.submit(group_of("a", 0))
            await has_outcome.wait()
            running.cancel("a-0", "too old")
            (session,) = await result
        assert (session.status, session.reward, session.error) == ("completed", 1.0, None)

    async def test_groups_that_evaluate_have_their_share_from_the_start_and_then_what_is_left(
        self,
    ):
        node = PlayedNode(running=4, evaluation=2)
        async with open_runner(node) as running:
            await running.submit(group_of("b", 0, 1, 2, evaluates=True))
            await running.submit(group_of("a", 0, 1, 2))
            await node.runs("a-0", "a-1", "b-0", "b-1")
            assert len(node.ends) == 4
            await node.end("b-0")
            await node.runs("b-2")
            await node.end("b-1")
            await node.runs("a-2")
            for name in ("a-0", "a-1", "a-2", "b-2"):
                await node.end(name)


@pytest.mark.usefixtures("pause")
class TestNodes:
    async def test_sessions_of_a_lost_node_are_retried_on_another(self):
        first = PlayedNode("first")
        second = PlayedNode("second")
        async with open_runner(first, second, retries=1) as running:
            result = await running.submit(group_of("g", 0, 1))
            await first.die("g-0")
            await second.end("g-0~1")
            await second.end("g-1~1")
            ended = {session.session_id: session.status for session in await result}
        assert ended["g-0"] == "infrastructure"
        assert ended["g-0~1"] == ended["g-1~1"] == "completed"
        assert first.stopped == [("g-1", "the machine is off")]

    @staticmethod
    async def lose_unbegun(running):
        """Give a runner a node that is lost while its session is prepared. Return the session."""
        node = PlayedNode()
        begun = asyncio.get_running_loop().create_future()

        async def prepare(attempt, enter):
            begun.set_result(attempt.session_id)
            await asyncio.Event().wait()

        node.run = prepare
        running.add_node(node)
        session_id = await begun
        running.remove_node(node, NodeLostError("the machine is off"))
        return session_id

    async def test_a_session_that_had_not_begun_to_run_loses_no_retry_with_its_node(self):
        async with open_runner(lost=none) as running:
            result = await running.submit(group_of("g", 0))
            await self.lose_unbegun(running)
            last = PlayedNode()
            running.add_node(last)
            await last.end("g-0")
            assert [session.status for session in await result] == ["completed"]

    async def test_a_session_whose_preparation_ends_one_node_after_the_other_uses_its_retries(self):
        async with open_runner(lost=none, retries=1) as running:
            result = await running.submit(group_of("g", 0))
            lost = [await self.lose_unbegun(running) for _ in range(4)]
            assert lost == ["g-0", "g-0", "g-0~1", "g-0~1"]
            assert await result == []

    @pytest.mark.parametrize("runs", [True, False], ids=["it runs", "it is prepared"])
    async def test_a_session_that_loses_its_node_by_its_own_error_is_retried_as_any_other(
        self, runs
    ):
        seen = []

        async def fail(attempt, enter):
            seen.append(attempt.session_id)
            if runs:
                await enter("running")
            raise NodeLostError("no recorder can be started for it")

        async with open_runner(lost=none, retries=1) as running:
            result = await running.submit(group_of("g", 0))
            for number in (1, 2):
                node = PlayedNode()
                node.run = fail
                running.add_node(node)
                await until(lambda number=number: len(seen) == number and not running.nodes)
            assert await result == []
        assert seen == ["g-0", "g-0~1"]

    async def test_the_block_fails_with_its_last_node(self):
        async def fail():
            only = PlayedNode()
            async with open_runner(only, retries=1) as running:
                await running.submit(group_of("g", 0))
                await only.die("g-0")

        with pytest.raises(NodeLostError, match="the machine is off"):
            await fail()

    async def test_without_a_node_sessions_wait_for_the_next_of_its_name_if_somebody_is_told(self):
        told = []
        node = PlayedNode()
        again = PlayedNode()

        def lost(*what):
            told.append(what)

        async with open_runner(node, lost=lost, retries=1) as running:
            result = await running.submit(group_of("g", 0))
            await node.die("g-0")
            late = await running.submit(group_of("late", 0), seconds=0.0)
            assert await late == []
            running.add_node(again)
            await again.end("g-0~1")
            assert [session.session_id for session in await result] == ["g-0", "g-0~1"]
        ((which, why),) = told
        assert which is node
        assert str(why) == "the machine is off"

    async def test_a_node_that_only_fails_gets_no_more_and_the_others_go_on(self):
        bad = PlayedNode("bad", always="infrastructure")
        good = PlayedNode("good", always="completed")
        statuses = Counter()
        async with open_runner(bad, good, retries=9, give_up_after=2) as running:
            results = [await running.submit(group_of(name, 0, 1)) for name in "abcdefgh"]
            for result in results:
                statuses.update(session.status for session in await result)
            assert running.nodes.keys() == {"good"}
        assert statuses["completed"] == 16

    async def test_the_oldest_weights_are_asked_of_each_sessions_node(self):
        first = PlayedNode("first", running=1)
        second = PlayedNode("second", running=1)
        async with open_runner(first, second) as running:
            await running.submit(group_of("a", 0))
            await running.submit(group_of("b", 0))
            await first.runs("a-0")
            await second.runs("b-0")
            assert running.running_versions() == {"a-0": "1", "b-0": "1"}
            running.cancel_running(lambda version: version == "1", "too old")
        assert first.stopped + second.stopped == [("a-0", "too old"), ("b-0", "too old")]
