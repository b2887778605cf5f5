import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

from rolltap.addons.errors import RecorderError
from rolltap.trainer.rollouts import schedule
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.schedule import run_groups
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import load_sessions
from tests.scripted_engine import Say
from tests.trainer.rollouts.stages import ONE_CALL, stage_of

TASK = Task(id="count", instruction="go", evaluate=["true"])


async def run(groups, stage, advance=lambda *_: None):
    return await run_groups(groups, stage, policy_version="7", advance=advance)


def group_of(folder, *places, task=TASK):
    """Return a group that no other test has: it is named after the test's folder."""
    return Group(task, folder.name, [f"{folder.name}-{place}" for place in places])


async def test_every_session_is_recorded_with_its_reward_and_its_group(recorder, tmp_path):
    steps, said = [], []

    def advance(what, done, total):
        steps.append((done, total))
        said.append(what)

    stage = stage_of(recorder, tmp_path, ONE_CALL)
    sessions = await run([group_of(tmp_path, 0, 1)], stage, advance)
    assert sorted({*steps}) == [(0, 2), (1, 2), (2, 2)]
    assert [phase for phase in ("preparing", "running", "judging") if phase not in " ".join(said)] == []
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
    (session,) = await run([group_of(tmp_path, 0)], stage_of(recorder, tmp_path, script))
    assert load_sessions(recorder.path)[session.session_id].policy_version == version


async def test_of_a_group_only_the_given_sessions_are_run(recorder, tmp_path):
    groups = [group_of(tmp_path, 2, 0), Group(TASK, "other", [])]
    sessions = await run(groups, stage_of(recorder, tmp_path, "true"))
    assert {(session.session_id, session.group_id, session.task_id) for session in sessions} == {
        (f"{tmp_path.name}-{place}", tmp_path.name, "count") for place in (0, 2)
    }


async def test_a_task_that_cannot_be_run_does_not_end_the_others_and_is_told_once(recorder, tmp_path, caplog):
    (tmp_path / "empty").mkdir()
    good = Task(id="good", instruction="go", evaluate=["true"])
    bad = Task(id="bad", instruction="go", evaluate=["true"], workspace=tmp_path / "empty", commit="0123456789abcdef")
    groups = [group_of(tmp_path, 0, 1, 2, task=bad), Group(good, "good-g", ["good-g-0"])]
    sessions = await run(groups, stage_of(recorder, tmp_path, ONE_CALL, retries=2, give_up_after=3))
    found = {each.session_id: (each.status, each.reward) for each in sessions}
    assert found == {"good-g-0": ("completed", 1.0), **dict.fromkeys(groups[0].session_ids, ("infrastructure", None))}
    assert caplog.text.count("no session of task bad can be run") == 1


async def test_a_session_that_waits_for_its_retry_leaves_its_place_to_others(recorder, tmp_path, monkeypatch):
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
    sessions = await run([group_of(tmp_path, 0, 1)], stage, advance)
    assert [session.session_id for session in sessions] == [f"{tmp_path.name}-{place}" for place in ("0", "1", "0~1")]


async def test_what_sessions_share_is_made_once_for_several_calls(recorder, tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    program.chmod(0o755)
    stage = stage_of(recorder, tmp_path, Harness(name="x", program=str(program), headless=["go"]))
    digests = []
    monkeypatch.setattr(Task, "digest", lambda task: digests.append(task.id) or "d")
    for number in range(2):
        await run([group_of(tmp_path, 2 * number, 2 * number + 1)], stage)
    assert asked.read_text().split().count("--version") == 1
    assert digests == ["count"]


async def test_a_recorder_that_dies_during_a_session_is_an_error_of_its_own(engine, tmp_path, tokenizer_folder):
    recorder = Recorder(tmp_path / "run", engine=engine.url, model=tokenizer_folder)
    with suppress(RecorderError), recorder:
        stage = stage_of(recorder, tmp_path, f"kill -9 {recorder._processes[0].pid}")
        with pytest.raises(RecorderError, match=r"the recorder (died|does not end)"):
            await run([group_of(tmp_path, 0)], stage)
        (session,) = load_sessions(recorder.path).values()
        assert (session.status, session.reward) == ("infrastructure", None)
        assert "the recorder" in session.error
        recorder._processes[0]._process.wait()
        with pytest.raises(RecorderError, match="the recorder died with status -9"):  # before a session
            await run([group_of(tmp_path, 1)], stage)
