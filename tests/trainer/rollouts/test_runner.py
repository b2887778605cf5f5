import asyncio
from collections import Counter, defaultdict
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from rolltap.addons.errors import RecorderError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.records import Session
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.rollouts import runner as runner_module
from rolltap.trainer.rollouts import session as session_module
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.node import NodeLostError
from rolltap.trainer.rollouts.preparation import Starts
from rolltap.trainer.rollouts.queue import Slots
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.rollouts.session import new_session
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.facts import Facts
from rolltap.trainer.traces.reader import load_sessions
from tests.addons.harness import until
from tests.scripted_engine import Say
from tests.trainer.rollouts.contexts import ONE_CALL, context_of, run_groups, runner_of

TASK = Task(id="count", instruction="go", evaluate=["true"])


async def run(groups, context, advance=lambda *_: None):
    return await run_groups(groups, context, advance, "7")


def group_of(folder, *places, task=TASK):
    """Return a group that no other test has: it is named after the test's folder."""
    return Group(task, folder.name, [f"{folder.name}-{place}" for place in places])


async def test_every_session_is_recorded_with_its_reward_and_its_group(recorder, tmp_path):
    steps, said = [], []

    def advance(what, done, total):
        steps.append((done, total))
        said.append(what)

    context = context_of(recorder, tmp_path, ONE_CALL)
    sessions = await run([group_of(tmp_path, 0, 1)], context, advance)
    assert sorted({*steps}) == [(0, 2), (1, 2), (2, 2)]
    assert [
        phase for phase in ("preparing", "running", "judging") if phase not in " ".join(said)
    ] == []
    assert said[-1] == "2 of 2 sessions: 2 completed; mean reward 1"
    recorded = load_sessions(recorder.path)
    assert [recorded[session.session_id] for session in sessions] == sessions
    assert {(session.status, session.reward) for session in sessions} == {("completed", 1.0)}
    assert len({session.group_id for session in sessions}) == 1


@pytest.mark.parametrize(("script", "version"), [(ONE_CALL, "3"), ("true", "7")])
async def test_a_session_has_the_version_of_its_calls_and_without_one_the_expected_version(
    recorder, engine, tmp_path, monkeypatch, script, version
):
    monkeypatch.setattr(engine, "otherwise", lambda request: Say("Hi.", weight_version="3"))
    (session,) = await run([group_of(tmp_path, 0)], context_of(recorder, tmp_path, script))
    assert load_sessions(recorder.path)[session.session_id].policy_version == version


async def test_of_a_group_only_the_given_sessions_are_run(recorder, tmp_path):
    groups = [group_of(tmp_path, 2, 0), Group(TASK, "other", [])]
    sessions = await run(groups, context_of(recorder, tmp_path, "true"))
    assert {(session.session_id, session.group_id, session.task_id) for session in sessions} == {
        (f"{tmp_path.name}-{place}", tmp_path.name, "count") for place in (0, 2)
    }


async def test_a_task_that_cannot_be_run_does_not_end_the_others_and_is_told_once(
    recorder, tmp_path, caplog
):
    (tmp_path / "empty").mkdir()
    good = Task(id="good", instruction="go", evaluate=["true"])
    bad = Task(
        id="bad",
        instruction="go",
        evaluate=["true"],
        workspace=tmp_path / "empty",
        commit="0123456789abcdef",
    )
    groups = [group_of(tmp_path, 0, 1, 2, task=bad), Group(good, "good-g", ["good-g-0"])]
    sessions = await run(
        groups, context_of(recorder, tmp_path, ONE_CALL, retries=2, give_up_after=3)
    )
    found = {each.session_id: (each.status, each.reward) for each in sessions}
    assert found == {
        "good-g-0": ("completed", 1.0),
        **dict.fromkeys(groups[0].session_ids, ("infrastructure", None)),
    }
    assert caplog.text.count("no session of task bad can be run") == 1


async def test_a_session_that_waits_for_its_retry_leaves_its_place_to_others(
    recorder, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner_module, "PAUSE_SECONDS", 3600.0)
    script = f"test -e {tmp_path}/tried || {{ touch {tmp_path}/tried; exit 1; }}; {ONE_CALL}"
    context = context_of(recorder, tmp_path, script, retries=1, concurrency=1, preparing=1)
    async with runner_of(context) as running:
        first, second = (
            group_of(tmp_path, 0),
            Group(TASK, f"{tmp_path.name}-b", [f"{tmp_path.name}-b-0"]),
        )
        waits = await running.submit(first)
        (ended,) = await (await running.submit(second))
        assert (ended.session_id, ended.status) == (f"{tmp_path.name}-b-0", "completed")
        assert not waits.done()
        running.cancel(first.group_id, "no longer")
        assert [session.status for session in await waits] == ["infrastructure"]


def waits_for(path):
    """Return a script that makes a call and then waits for a file."""
    return f"{ONE_CALL}; until [ -e {path} ]; do sleep 0.01; done"


@pytest.fixture
async def called(engine, monkeypatch):
    """A queue with an entry for each call that the engine got."""
    called, loop = asyncio.Queue(), asyncio.get_running_loop()

    def answer(request):
        loop.call_soon_threadsafe(called.put_nowait, None)
        return Say("Hi.")

    monkeypatch.setattr(engine, "otherwise", answer)
    return called


async def test_a_session_that_is_judged_leaves_its_place_to_others(recorder, tmp_path):
    judged = tmp_path / "judged"
    waits = f"[ ! -e ran ] || until [ -e {judged} ]; do sleep 0.01; done"
    task = TASK.model_copy(update={"evaluate": ["sh", "-c", waits]})
    script = f"{ONE_CALL}; [ -e {tmp_path}/first ] && touch {judged}; touch {tmp_path}/first ran"
    context = context_of(recorder, tmp_path, script, concurrency=1)
    sessions = await run(
        [group_of(tmp_path, 0, 1, task=task)], context
    )  # the second one's run ends the first one's judge
    assert [session.reward for session in sessions] == [1.0, 1.0]


async def test_a_session_is_prepared_while_the_one_before_it_runs(
    recorder, tmp_path, monkeypatch, called
):
    go_on, first_runs = tmp_path / "go", asyncio.Event()

    async def of(self, task, starts=Starts.of):
        if first_runs.is_set():
            go_on.touch()  # the first session is still running: it waits for this
        return await starts(self, task)

    monkeypatch.setattr(Starts, "of", of)
    context = context_of(recorder, tmp_path, waits_for(go_on), concurrency=1, ready=1, preparing=1)
    async with runner_of(context) as running:
        first = await running.submit(group_of(tmp_path, 0))
        await called.get()
        first_runs.set()
        second = await running.submit(Group(TASK, f"{tmp_path.name}-b", [f"{tmp_path.name}-b-0"]))
        assert [session.status for session in await first + await second] == ["completed"] * 2


async def test_a_preparation_that_takes_too_long_is_tried_again(recorder, tmp_path, monkeypatch):
    class Stuck(ProcessRuntime):
        tried = 0

        @asynccontextmanager
        async def box(self, spec):
            self.tried += spec.proxy is not None  # neither the judge's nor that of `--version`
            if self.tried == 1 and spec.proxy is not None:
                await asyncio.Event().wait()
            async with super().box(spec) as box:
                yield box

    monkeypatch.setattr(runner_module, "PAUSE_SECONDS", 0.0)
    for number, seconds in enumerate(
        (0.2, 2, 20)
    ):  # the first limit in which the retry is prepared
        context = context_of(
            recorder, tmp_path, ONE_CALL, Stuck(), preparing_timeout=seconds, retries=1
        )
        group = Group(TASK, f"{tmp_path.name}-{number}", [f"{tmp_path.name}-{number}-0"])
        failed, ended = await run([group], context)
        assert (failed.status, failed.error) == (
            "infrastructure",
            f"the session could not be run: it was not prepared within {seconds} s:"
            " raise --preparing-timeout",
        )
        if ended.status == "completed":
            break
    assert (ended.status, ended.reward) == ("completed", 1.0)


async def test_a_session_or_a_group_is_cancelled_and_the_others_go_on(recorder, tmp_path, called):
    go_on = tmp_path / "go"
    context = context_of(recorder, tmp_path, waits_for(go_on), concurrency=2, ready=1, preparing=2)
    async with runner_of(context) as running:
        kept = group_of(tmp_path, 0, 1)
        dropped = Group(
            TASK, f"{tmp_path.name}-b", [f"{tmp_path.name}-b-{index}" for index in range(3)]
        )
        results = [await running.submit(kept)]
        for _ in kept.session_ids:  # both run, and no slot is left
            await called.get()
        results.append(await running.submit(dropped))
        running.cancel(kept.session_ids[0], "it is not needed")
        running.cancel(dropped.group_id, "its weights are too old")
        begun = await results[1]  # without waiting for a slot
        go_on.touch()
        ended = {session.session_id: session for session in await results[0]}
    assert {session.error for session in begun} <= {"its weights are too old"}
    assert [(ended[name].status, ended[name].error) for name in kept.session_ids] == [
        ("cancelled", "it is not needed"),
        ("completed", None),
    ]
    recorded = load_sessions(recorder.path)
    assert all(recorded[session.session_id].status == "cancelled" for session in begun)
    assert recorded[kept.session_ids[0]].error == "it is not needed"


async def test_a_session_is_as_old_as_its_first_call_and_without_one_it_is_not_too_old(
    recorder, tmp_path, engine
):
    runs, call, go_on = (tmp_path / name for name in ("runs", "call", "go"))
    script = f"touch {runs}; until [ -e {call} ]; do sleep 0.01; done; {waits_for(go_on)}"
    engine.otherwise = lambda request: Say("Hi.", weight_version="3")
    group = group_of(tmp_path, 0)
    (name,) = group.session_ids
    async with runner_of(context_of(recorder, tmp_path, script)) as running:
        result = await running.submit(group)
        await until(runs.exists)
        running.cancel_running(lambda version: True, "too old")
        assert running.running_versions() == {}
        call.touch()
        await until(running.running_versions)
        assert running.running_versions() == {name: "3"}
        running.cancel_running(lambda version: version != "3", "too old")
        running.cancel_running(lambda version: version == "3", "its weights are too old")
        (session,) = await result
    assert (session.status, session.error, session.policy_version) == (
        "cancelled",
        "its weights are too old",
        "3",
    )


async def test_a_group_of_forks_runs_beside_others(recorder, tmp_path):
    context = context_of(recorder, tmp_path, ONE_CALL)
    (first,) = await run([group_of(tmp_path, 0)], context)
    ((asked,),) = recorder.rows.of("calls", first.session_id, ("started_at",))
    groups = [group_of(tmp_path, 1)]
    for number, begun in enumerate((asked, asked + timedelta(seconds=1))):
        source = RecordedFrom(recorder.path.absolute(), first.session_id, begun)
        name = f"{tmp_path.name}-fork{number}"
        groups.append(Group(TASK, name, [f"{name}-0"], fork=source))
    ended = {session.group_id: session for session in await run(groups, context)}
    assert [
        (session.status, session.reward) for session in (ended[group.group_id] for group in groups)
    ] == [
        ("completed", 1.0),
        ("completed", 1.0),
        ("diverged", None),
    ]
    assert ended[groups[2].group_id].error == "diverged: it ended before the call at which it forks"


async def test_what_sessions_share_is_made_once_for_several_calls(recorder, tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    program.chmod(0o755)
    context = context_of(
        recorder, tmp_path, Harness(name="x", program=str(program), headless=["go"])
    )
    digests = []
    monkeypatch.setattr(Task, "digest", lambda task: digests.append(task.id) or "d")
    for number in range(2):
        await run([group_of(tmp_path, 2 * number, 2 * number + 1)], context)
    assert asked.read_text().split().count("--version") == 1
    assert digests == ["count"]


async def test_a_recorder_that_dies_during_a_session_is_an_error_of_its_own(
    engine, tmp_path, tokenizer_folder
):
    recorder = Recorder(tmp_path / "run", engine=engine.url, model=tokenizer_folder)
    with suppress(RecorderError), recorder:
        context = context_of(recorder, tmp_path, f"kill -9 {recorder._processes[0].pid}")
        with pytest.raises(RecorderError, match=r"the recorder (died|does not end)"):
            await run([group_of(tmp_path, 0)], context)
        (session,) = load_sessions(recorder.path).values()
        assert (session.status, session.reward) == ("infrastructure", None)
        assert "the recorder" in session.error
        recorder._processes[0]._process.wait()
        with pytest.raises(
            RecorderError, match="the recorder died with status -9"
        ):  # before a session
            await run([group_of(tmp_path, 1)], context)


class Played:
    """Sessions that run until the test ends them: `ends` has the future of each one's status, once
    it runs, and `contexts` its context."""

    def __init__(self):
        self.ends = {}
        self.contexts = {}
        self._running = defaultdict(asyncio.Event)

    async def run_session(self, context, attempt, enter):
        await enter("running")
        session = new_session(context, attempt)
        attempt.row = session
        session.status = "cancelled"
        self.contexts[session.session_id] = context
        self.ends[session.session_id] = asyncio.get_running_loop().create_future()
        self._running[session.session_id].set()
        try:
            session.status = await self.ends[session.session_id]
        except asyncio.CancelledError:
            session.error = attempt.why_stopped
            raise
        return Facts(completed_calls=session.status == "completed")

    async def runs(self, *names):
        """Wait until these sessions run."""
        for name in names:
            await self._running[name].wait()

    async def end(self, name, status="completed"):
        await self.runs(name)
        self.ends[name].set_result(status)


class TestWithoutPrograms:
    @pytest.fixture
    def played(self, monkeypatch):
        played = Played()
        monkeypatch.setattr(session_module, "run_session", played.run_session)
        return played

    @pytest.fixture
    def open_runner(self, recorder, tmp_path):
        def open_runner(advance=lambda *_: None, silent=(), **settings):
            return runner_of(
                context_of(recorder, tmp_path, "true", **settings), advance, silent=silent
            )

        return open_runner

    @staticmethod
    def group(name, *places):
        return Group(TASK, name, [f"{name}-{place}" for place in places])

    async def test_a_block_that_fails_ends_every_session_and_every_result(
        self, open_runner, played
    ):
        results = []

        async def fail():
            async with open_runner(concurrency=1) as running:
                results.extend([await running.submit(self.group(name, 0)) for name in ("a", "b")])
                await played.runs("a-0")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert [result.cancelled() for result in results] == [True, True]
        assert played.ends["a-0"].cancelled()

    async def test_a_block_is_left_when_its_groups_have_ended_after_their_retries_too(
        self, open_runner, played, monkeypatch
    ):
        monkeypatch.setattr(runner_module, "PAUSE_SECONDS", 0.0)
        async with open_runner(retries=1) as running:
            result = await running.submit(self.group("a", 0))
            ending = [
                asyncio.create_task(played.end(*each))
                for each in (("a-0", "infrastructure"), ("a-0~1", "completed"))
            ]
        await asyncio.gather(*ending)
        assert [session.session_id for session in result.result()] == ["a-0", "a-0~1"]

    async def test_one_who_waits_no_longer_for_a_group_stops_nobody(self, open_runner, played):
        async with open_runner() as running:
            given_up, other = [await running.submit(self.group(name, 0)) for name in ("a", "b")]
            await played.runs("a-0", "b-0")
            given_up.cancel()
            await played.end("a-0")
            await played.end("b-0")
            assert [session.status for session in await other] == ["completed"]

    async def test_a_block_that_waits_for_a_group_of_which_nobody_waits_for_the_result_is_idle(
        self, open_runner, played, monkeypatch
    ):
        loop = asyncio.get_running_loop()

        async def leave():
            async with open_runner() as running:
                (await running.submit(self.group("a", 0))).cancel()
                await played.runs("a-0")

        leaving = asyncio.create_task(leave())
        await played.runs("a-0")
        for _ in range(9):  # until it waits
            await asyncio.sleep(0)
        turns = []
        call_soon = loop.call_soon
        monkeypatch.setattr(
            loop, "call_soon", lambda *args, **how: turns.append(args) or call_soon(*args, **how)
        )
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(turns) == 9  # this test's own
        await played.end("a-0")
        await leaving

    async def test_a_group_with_a_name_that_is_used_leaves_the_first_as_it_is(
        self, open_runner, played
    ):
        async with open_runner() as running:
            first = await running.submit(self.group("a", 0))
            with pytest.raises(ValueError, match="is there already"):
                await running.submit(self.group("a", 0, 1))
            await played.end("a-0")
            assert [session.session_id for session in await first] == ["a-0"]

    async def test_the_progress_has_no_session_that_was_cancelled_before_its_retry(
        self, open_runner, played, monkeypatch
    ):
        monkeypatch.setattr(runner_module, "PAUSE_SECONDS", 600.0)
        told = []
        async with open_runner(
            lambda _, done, total: told.append((done, total)), retries=1
        ) as running:
            result = await running.submit(self.group("a", 0, 1))
            await played.end("a-0", "infrastructure")
            await until(lambda: running.counts["pausing"])
            running.cancel("a-0~1", "no more")
            await played.end("a-1")
            assert [session.session_id for session in await result] == ["a-0", "a-1"]
        assert told[-1] == (1, 1)

    async def test_sessions_that_are_stopped_are_no_failures_and_those_that_never_ran_are_not_counted(
        self, open_runner, played
    ):
        told = []
        async with open_runner(
            lambda _, done, total: told.append((done, total)), give_up_after=2
        ) as running:
            result = await running.submit(self.group("a", *range(5)))
            await played.runs("a-0", "a-1")
            running.cancel("a", "too old")
            assert {session.error for session in await result} == {"too old"}
        assert told[-1] == (2, 2)

    async def test_failures_of_a_group_that_is_apart_end_it_alone(self, open_runner, played):
        async with open_runner(retries=0, give_up_after=2, concurrency=4) as running:
            other = await running.submit(self.group("b", 0), apart=True)
            failing = await running.submit(self.group("a", *range(9)), apart=True)
            await played.end("a-0", "infrastructure")
            await played.end("a-1", "infrastructure")
            sessions = await failing
            await played.end("b-0")
            assert [session.status for session in await other] == ["completed"]
        last = sessions[-1]
        assert (last.session_id, last.status) == ("a-2", "cancelled")
        assert last.error.startswith(
            "its group was given up after 2 consecutive infrastructure failures; the last, a-1"
        )
        assert len(sessions) == 3

    async def test_failures_of_all_groups_count_together_while_an_engine_does_not_answer(
        self, open_runner, played
    ):
        async def run_three_groups_of_which_two_fail():
            async with open_runner(silent=["http://gone"], retries=0, give_up_after=2) as running:
                for name in "abc":
                    await running.submit(self.group(name, 0), apart=True)
                for name in "ab":
                    await played.end(f"{name}-0", "infrastructure")

        with pytest.raises(
            RecorderError,
            match="gave up after 2 consecutive infrastructure failures; the last, b-0",
        ):
            await run_three_groups_of_which_two_fail()

    async def test_a_session_that_fails_in_a_way_that_nobody_thought_of_is_data(
        self, open_runner, monkeypatch
    ):
        async def play(*_):
            raise OverflowError("cannot convert float infinity to integer")

        monkeypatch.setattr("rolltap.trainer.rollouts.session._play", play)
        async with open_runner(retries=2) as running:
            (session,) = await (await running.submit(self.group("nobody-thought-of-it", 0)))
        assert session.status == "infrastructure"
        assert (
            session.error
            == "the session could not be run: OverflowError('cannot convert float infinity to"
            " integer')"
        )

    async def test_a_stop_that_comes_after_the_outcome_changes_nothing_of_it(
        self, open_runner, monkeypatch
    ):
        has_outcome = asyncio.Event()

        async def run_session(context, attempt, enter):
            await enter("running")
            attempt.row = new_session(context, attempt)
            attempt.row.status, attempt.row.reward = "completed", 1.0
            has_outcome.set()
            await asyncio.Event().wait()  # as the end of its row

        monkeypatch.setattr(session_module, "run_session", run_session)
        async with open_runner(give_up_after=1) as running:
            result = await running.submit(self.group("a", 0))
            await has_outcome.wait()
            running.cancel("a-0", "too old")
            (session,) = await result
        assert (session.status, session.reward, session.error) == ("completed", 1.0, None)

    async def test_a_group_that_comes_after_a_failure_is_cancelled(self, open_runner):
        failing = open_runner()

        async def fail():
            async with failing:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert (await failing.submit(self.group("a", 0))).cancelled()

    async def test_a_task_that_cannot_be_read_is_data(
        self, recorder, tmp_path, open_runner, monkeypatch
    ):
        monkeypatch.setattr(Task, "digest", lambda task: Path(task.id, "none").read_text())
        async with open_runner(retries=0) as running:
            (session,) = await (await running.submit(self.group("unread", 0)))
        assert session.status == "infrastructure"
        assert "No such file or directory: 'count/none'" in session.error

    async def test_a_group_that_evaluates_has_a_context_of_its_own(
        self, recorder, tmp_path, played
    ):
        harness = Harness(name="other", program="sh", headless=[])
        rows = SimpleNamespace(first_version=lambda _: "7")
        own = SimpleNamespace(engine=recorder.engine, check=lambda: None, rows=rows)
        other = context_of(own, tmp_path, harness)
        evaluates = replace(self.group("b", 0), evaluates=True)
        async with runner_of(context_of(recorder, tmp_path, "true"), evaluation=other) as running:
            first = await running.submit(self.group("a", 0))
            second = await running.submit(evaluates, "7")
            await played.runs("a-0", "b-0")
            assert running.running_versions() == {}  # an evaluation is never too old
            await played.end("a-0")
            await played.end("b-0")
            (one,), (two,) = await first, await second
        assert (one.harness, two.harness, two.policy_version) == ("sh", "other", "7")
        assert (played.contexts["b-0"], played.contexts["a-0"] is other) == (other, False)

    async def test_the_recorder_of_an_evaluation_must_run_too(self, recorder, tmp_path, played):
        def check():
            raise RecorderError("the second recorder died")

        dead = context_of(SimpleNamespace(engine=recorder.engine, check=check), tmp_path, "true")
        with pytest.raises(RecorderError, match="the second recorder died"):
            async with runner_of(
                context_of(recorder, tmp_path, "true"), evaluation=dead
            ) as running:
                await running.submit(replace(self.group("b", 0), evaluates=True))

    async def test_groups_that_evaluate_have_their_share_from_the_start_and_then_what_is_left(
        self, recorder, tmp_path, played
    ):
        context, own = (
            context_of(recorder, tmp_path, "true", concurrency=4, ready=0) for _ in range(2)
        )
        async with runner_of(context, evaluation=own, share=0.5) as running:
            await running.submit(replace(self.group("b", 0, 1, 2), evaluates=True))
            first = await running.submit(self.group("a", 0, 1, 2))
            await played.runs("a-0", "a-1", "b-0", "b-1")
            assert len(played.ends) == 4
            await played.end("b-0")
            await played.runs("b-2")
            await played.end("b-1")
            await played.runs("a-2")
            for name in ("a-0", "a-1", "a-2"):
                await played.end(name)
            await played.end("b-2")
            assert [session.session_id for session in await first] == ["a-0", "a-1", "a-2"]
            assert {name for name, context in played.contexts.items() if context is own} == {
                "b-0",
                "b-1",
                "b-2",
            }


class PlayedNode:
    """A node whose sessions run until the test ends them, by an outcome or an error, or end
    `always` the same way."""

    def __init__(self, name, running=2, always=None):
        self.name = name
        self.always = always
        self.slots = Slots(preparing=running, ready=0, running=running, judging=running)
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
            raise
        except NodeLostError as error:
            attempt.row.status, attempt.row.error = "infrastructure", str(error)
            raise
        return Facts(completed_calls=1)

    def first_version(self, session_id):
        return "1"

    async def end(self, name, status="completed"):
        await self._running[name].wait()
        self.ends[name].set_result(status)

    async def die(self, name):
        await self._running[name].wait()
        self.ends[name].set_exception(NodeLostError("the machine is off"))


class TestNodes:
    @pytest.fixture(autouse=True)
    def without_pauses(self, monkeypatch):
        monkeypatch.setattr(runner_module, "PAUSE_SECONDS", 0.0)

    @staticmethod
    def open_runner(*nodes, retries=1, lost=None):
        return GroupRunner(nodes, lambda *_: None, retries=retries, give_up_after=2, lost=lost)

    async def test_sessions_of_a_lost_node_are_retried_on_another(self):
        first, second = PlayedNode("first"), PlayedNode("second")
        async with self.open_runner(first, second) as running:
            result = await running.submit(Group(TASK, "g", ["g-0", "g-1"]))
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
        node = PlayedNode("n")
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
        async with self.open_runner(lost=lambda *_: None, retries=0) as running:
            result = await running.submit(Group(TASK, "g", ["g-0"]))
            await self.lose_unbegun(running)
            last = PlayedNode("n")
            running.add_node(last)
            await last.end("g-0")
            assert [session.status for session in await result] == ["completed"]

    async def test_a_session_whose_preparation_ends_one_node_after_the_other_uses_its_retries(self):
        async with self.open_runner(lost=lambda *_: None, retries=1) as running:
            result = await running.submit(Group(TASK, "g", ["g-0"]))
            lost = [await self.lose_unbegun(running) for _ in range(4)]
            assert lost == ["g-0", "g-0", "g-0~1", "g-0~1"]
            assert await result == []

    async def test_a_session_that_began_to_run_on_a_lost_node_is_retried_without_a_row_too(self):
        async with self.open_runner(lost=lambda *_: None, retries=0) as running:
            result = await running.submit(Group(TASK, "g", ["g-0"]))
            node = PlayedNode("n")

            async def kill(attempt, enter):
                await enter("running")
                raise NodeLostError("the machine is off")

            node.run = kill
            running.add_node(node)
            assert await result == []

    async def test_a_session_that_loses_its_node_before_it_runs_is_retried_as_any_other(self):
        async with self.open_runner(lost=lambda *_: None, retries=1) as running:
            result = await running.submit(Group(TASK, "g", ["g-0"]))
            seen = []

            async def fail(attempt, enter):
                seen.append(attempt.session_id)
                raise NodeLostError("no recorder can be started for it")

            for number in range(2):
                node = PlayedNode("n")
                node.run = fail
                running.add_node(node)
                await until(lambda number=number: len(seen) > number and not running.nodes)
            assert await result == []
        assert seen == ["g-0", "g-0~1"]

    async def test_the_block_fails_with_its_last_node(self):
        async def fail():
            only = PlayedNode("only")
            async with self.open_runner(only) as running:
                await running.submit(Group(TASK, "g", ["g-0"]))
                await only.die("g-0")

        with pytest.raises(NodeLostError, match="the machine is off"):
            await fail()

    async def test_without_a_node_sessions_wait_for_the_next_of_its_name_if_somebody_is_told(self):
        told = []
        node, again = PlayedNode("n"), PlayedNode("n")
        async with self.open_runner(node, lost=lambda *lost: told.append(lost)) as running:
            result = await running.submit(Group(TASK, "g", ["g-0"]))
            await node.die("g-0")
            late = await running.submit(Group(TASK, "late", ["late-0"]), seconds=0.0)
            assert await late == []
            running.add_node(again)
            await again.end("g-0~1")
            assert [session.session_id for session in await result] == ["g-0", "g-0~1"]
        ((lost, why),) = told
        assert lost is node
        assert str(why) == "the machine is off"

    async def test_a_node_that_only_fails_gets_no_more_and_the_others_go_on(self):
        bad, good = (
            PlayedNode("bad", always="infrastructure"),
            PlayedNode("good", always="completed"),
        )
        async with self.open_runner(bad, good, retries=9) as running:
            groups = [Group(TASK, name, [f"{name}-0", f"{name}-1"]) for name in "abcdefgh"]
            results = [await running.submit(group) for group in groups]
            ended = [session for result in results for session in await result]
            assert running.nodes.keys() == {"good"}
        assert Counter(session.status for session in ended)["completed"] == 16

    async def test_a_node_that_comes_later_takes_what_waits(self):
        first, second = PlayedNode("first", running=1), PlayedNode("second", running=1)
        async with self.open_runner(first) as running:
            results = [await running.submit(Group(TASK, name, [f"{name}-0"])) for name in "ab"]
            await first._running["a-0"].wait()
            running.add_node(second)
            await second.end("b-0")
            assert running.nodes.keys() == {"first", "second"}
            await first.end("a-0")
            assert [len(await result) for result in results] == [1, 1]

    async def test_the_oldest_weights_are_asked_of_each_sessions_node(self):
        first, second = PlayedNode("first", running=1), PlayedNode("second", running=1)
        async with self.open_runner(first, second) as running:
            results = [await running.submit(Group(TASK, name, [f"{name}-0"])) for name in "ab"]
            await first._running["a-0"].wait()
            await second._running["b-0"].wait()
            assert running.running_versions() == {"a-0": "1", "b-0": "1"}
            running.cancel_running(lambda version: version == "1", "too old")
            assert [[session.status for session in await result] for result in results] == [
                ["cancelled"]
            ] * 2
        assert first.stopped + second.stopped == [("a-0", "too old"), ("b-0", "too old")]
