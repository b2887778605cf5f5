import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

from rolltap.addons.errors import RecorderError
from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.rollouts import schedule
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.schedule import run_groups
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import load_sessions
from tests.trainer.rollouts.stages import ONE_CALL, stage_of
from tests.trainer.rollouts.test_recorder import kill


@pytest.fixture
def recorder(tmp_path, scripted_engine, tokenizer_folder):
    scripted_engine.otherwise = lambda request: Say("Hi.")
    recorder = Recorder(tmp_path / "run", engine=scripted_engine.url, model=str(tokenizer_folder))
    with suppress(RecorderError), recorder:  # some tests kill it
        yield recorder


async def run(groups, stage, advance=lambda *_: None):
    return await run_groups(groups, stage, policy_version="7", advance=advance)


async def play(recorder, script):
    task = Task(id="count", instruction="go", evaluate=["true"])
    steps: list[tuple[int, int]] = []
    groups = [Group(task, "count-g", ["count-g-0", "count-g-1"])]
    stage = stage_of(recorder, recorder.path.parent, script)
    sessions = await run(groups, stage, lambda what, done, total: steps.append((done, total)))
    return sessions, steps


async def test_every_session_is_recorded_with_its_reward_and_its_group(recorder):
    sessions, steps = await play(recorder, ONE_CALL)
    assert steps == [(1, 2), (2, 2)]
    recorded = load_sessions(recorder.path)
    assert [recorded[session.session_id] for session in sessions] == sessions
    assert {(session.status, session.reward) for session in sessions} == {("completed", 1.0)}
    assert len({session.group_id for session in sessions}) == 1


@pytest.mark.parametrize(("script", "expected", "version"), [(ONE_CALL, "7", "3"), ("true", "7", "7")])
async def test_a_session_has_the_version_of_its_calls_and_without_one_the_expected_version(
    recorder, scripted_engine, script, expected, version
):
    scripted_engine.otherwise = lambda request: Say("Hi.", weight_version="3")
    sessions, _ = await play(recorder, script)
    recorded = load_sessions(recorder.path)
    assert [recorded[session.session_id].policy_version for session in sessions] == [version] * 2


async def test_of_a_group_only_the_given_sessions_are_run(recorder, tmp_path):
    task = Task(id="count", instruction="go", evaluate=["true"])
    groups = [Group(task, "count-g", ["count-g-2", "count-g-0"]), Group(task, "count-h", [])]
    sessions = await run(groups, stage_of(recorder, tmp_path, "true"))
    assert {(session.session_id, session.group_id, session.task_id) for session in sessions} == {
        ("count-g-0", "count-g", "count"),
        ("count-g-2", "count-g", "count"),
    }


async def test_a_task_that_cannot_be_run_does_not_end_the_others_and_is_told_once(recorder, tmp_path, caplog):
    (tmp_path / "empty").mkdir()
    good = Task(id="good", instruction="go", evaluate=["true"])
    bad = Task(id="bad", instruction="go", evaluate=["true"], workspace=tmp_path / "empty", commit="0123456789abcdef")
    groups = [Group(bad, "bad-g", [f"bad-g-{i}" for i in range(3)]), Group(good, "good-g", ["good-g-0"])]
    await run(groups, stage_of(recorder, tmp_path, ONE_CALL, retries=2, give_up_after=3))
    found = {name: (each.status, each.reward) for name, each in load_sessions(recorder.path).items()}
    assert found == {"good-g-0": ("completed", 1.0), **dict.fromkeys(groups[0].session_ids, ("infrastructure", None))}
    assert caplog.text.count("no session of task bad can be run") == 1


async def test_a_session_that_waits_to_be_tried_again_leaves_its_place_to_others(recorder, tmp_path, monkeypatch):
    ended, go_on = [], asyncio.Event()

    async def wait(_):
        await go_on.wait()

    def advance(what, done, total):
        ended.append(done)
        if done:
            go_on.set()  # without the place that the first leaves, nothing would be done

    monkeypatch.setattr(schedule, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": wait}))
    script = f"test -e {tmp_path}/tried || {{ touch {tmp_path}/tried; exit 1; }}; {ONE_CALL}"
    stage = stage_of(recorder, tmp_path, script, retries=1, concurrency=1)
    task = Task(id="count", instruction="go", evaluate=["true"])
    groups = [Group(task, "count-g", ["count-g-0", "count-g-1"])]
    async with asyncio.timeout(60):
        sessions = await run(groups, stage, advance)
    assert [session.session_id for session in sessions] == ["count-g-0", "count-g-1", "count-g-0~1"]


async def test_what_sessions_share_is_made_once_for_several_calls(recorder, tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    program.chmod(0o755)
    stage = stage_of(recorder, tmp_path, Harness(name="x", program=str(program), headless=["go"]))
    digests = []
    monkeypatch.setattr(Task, "digest", lambda task: digests.append(task.id) or "d")
    task = Task(id="count", instruction="go", evaluate=["true"])
    for number in range(2):
        await run([Group(task, f"count-{number}", [f"count-{number}-{i}" for i in range(2)])], stage)
    assert asked.read_text().split().count("--version") == 1
    assert digests == ["count"]


async def test_a_recorder_that_dies_is_an_error_of_its_own(recorder):
    kill(recorder._processes[0])
    with pytest.raises(RecorderError, match="the recorder died with status -9"):
        await play(recorder, "true")


async def test_a_recorder_that_dies_during_a_session_is_an_error_of_its_own(recorder):
    with pytest.raises(RecorderError, match=r"the recorder (died|does not end)"):
        await play(recorder, f"kill -9 {recorder._processes[0].pid}")
    (session, *_) = load_sessions(recorder.path).values()
    assert (session.status, session.reward) == ("infrastructure", None)
    assert "the recorder" in session.error
