import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rolltap
from rolltap.errors import EngineError, InputError, RecorderError, RunError
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.locks import rollout_lock
from tests.deep import cases
from tests.scripted_engine import Say
from tests.trainer.cli.program import ASK

COMMAND = ["sh", "-c", "cat answer.txt > $ROLLTAP_REWARD_FILE"]
JUDGE = {"kind": "command", "command": COMMAND, "result": "number"}
TASK = rolltap.Task(id="t", instruction="Say it.", judge=JUDGE)
ANSWER = ASK.replace("print(", "open('answer.txt', 'w').write(").replace("sys.exit(3)", "")


def python(script):
    """Return a harness that runs a script."""
    return rolltap.Harness(name="x", program=sys.executable, headless=["-c", script])


HARNESS = python(ANSWER)


@pytest.fixture
def arguments(scripted_engine, tokenizer_folder, tmp_path):
    scripted_engine.otherwise = lambda request: Say("0.5")
    out = tmp_path / "run"
    return {
        "harness": HARNESS,
        "engine": scripted_engine.url,
        "model": tokenizer_folder,
        "out": out,
        "sessions": 2,
    }


def check(run):
    for session in run.sessions():
        assert session.status == "completed"
        assert session.reward == 0.5
        assert session.harness == "x"
    batch = run.traces(strategy="prefix_merging").batch()
    assert [label.reward for label in batch.rewards.values()] == [0.5, 0.5]
    assert batch.ledger.trained == batch.ledger.sampled > 0


async def test_a_rollout_runs_where_an_event_loop_runs_as_in_a_notebook_and_its_batch_is_labelled(
    arguments,
):
    run = rolltap.rollout([TASK], **arguments)
    check(run)
    session = run.sessions()[0]
    assert session.harness_version == ".".join(map(str, sys.version_info[:3]))
    assert session.runtime == "process"
    assert session.task_digest == TASK.digest()
    assert session.preset_digest == HARNESS.digest()
    assert len(session.program_digest) == 64


async def test_the_async_twin_does_not_block_the_event_loop(arguments, monkeypatch):
    loop = asyncio.get_running_loop()

    called = []

    def needs_the_loop(owner, name):
        original = getattr(owner, name)

        def wrapped(*args):
            called.append(name)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=60)
            return original(*args)

        monkeypatch.setattr(owner, name, wrapped)

    for name in ("__enter__", "end", "__exit__"):
        needs_the_loop(rolltap.Recorder, name)
    needs_the_loop(rolltap.Task, "digest")
    check(await rolltap.rollout_async([TASK], **arguments))
    assert called.count("digest") == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [("tools", ["/usr"]), ("container_engine", "podman"), ("container_arguments", ["x"])],
)
def test_settings_of_a_runtime_are_refused_beside_one_that_is_made(arguments, setting, value):
    message = f"{setting} is for runtimes that are chosen by name: give it to"
    with pytest.raises(InputError, match=message):
        rolltap.rollout([TASK], runtime=ProcessRuntime(), **arguments, **{setting: value})


@pytest.fixture
async def recorders(monkeypatch):
    """A queue of the recorders whose process has been started and is not ready yet."""
    loop, started, original = asyncio.get_running_loop(), asyncio.Queue(), rolltap.Recorder._start

    def start(recorder, *args):
        original(recorder, *args)
        loop.call_soon_threadsafe(started.put_nowait, recorder)

    monkeypatch.setattr(rolltap.Recorder, "_start", start)
    return started


@pytest.mark.parametrize("times", cases([2, 1]))
async def test_cancelling_it_while_the_recorder_starts_leaves_no_process(
    arguments, recorders, times
):
    rolling = asyncio.create_task(rolltap.rollout_async([TASK], **arguments))
    recorder = await recorders.get()
    for _ in range(times):
        rolling.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await rolling
    assert all(process.ended for process in recorder._processes)


async def test_cancelling_it_stops_the_harness_and_the_recorder(arguments, recorders, tmp_path):
    os.mkfifo(tmp_path / "started")
    script = f"echo $$ > {tmp_path / 'started'}; exec sleep 600"
    arguments["harness"] = rolltap.Harness(name="x", program="sh", headless=["-c", script])
    arguments["sessions"] = 1
    rolling = asyncio.create_task(rolltap.rollout_async([TASK], **arguments))
    recorder = await recorders.get()
    process = int(await asyncio.to_thread((tmp_path / "started").read_text))
    rolling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rolling
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert all(process.ended for process in recorder._processes)
    run = rolltap.open_run(arguments["out"])
    assert list(run.calls) == []
    (session,) = run.sessions()
    assert session.status == "cancelled"
    assert session.reward is None


def test_a_task_file_and_more_sessions_in_the_same_run(arguments, tmp_path, scripted_engine):
    counts = f"echo x >> {tmp_path}/judged; {COMMAND[-1]}"
    judge = TASK.judge.model_copy(update={"command": ["sh", "-c", counts]})
    task = TASK.model_copy(update={"judge": judge})
    (tmp_path / "tasks.jsonl").write_text(task.model_dump_json(exclude_none=True))
    arguments["sessions"] = 1
    known = set()
    for version in "01":
        said = Say("0.5", weight_version=version)
        scripted_engine.otherwise = lambda request, said=said: said
        scripted_engine.weight_version = version
        run = rolltap.rollout(tmp_path / "tasks.jsonl", **arguments)
        sessions = {session.session_id: session for session in run.sessions()}
        (new,) = run.new_session_ids
        assert sessions.keys() - known == {new}
        assert sessions[new].policy_version == version
        assert run.traces().batch([new]).rewards.keys() == {new}
        known = sessions.keys()
    assert (tmp_path / "judged").read_text() == "x\n" * 3  # once on the start, by the first rollout


def test_the_same_rollout_again_uses_what_has_ended_and_further_groups_are_begun_on_request(
    arguments, scripted_engine
):
    first = rolltap.rollout([TASK], **arguments)
    asked = len(scripted_engine.requests)
    again = rolltap.rollout([TASK], **arguments)
    assert again.new_session_ids == first.new_session_ids
    assert len(scripted_engine.requests) == asked
    further = rolltap.rollout([TASK], **arguments, new_groups=True)
    assert len(further.new_session_ids) == 2
    assert not {*further.new_session_ids} & {*first.new_session_ids}
    assert len({session.group_id for session in further.sessions()}) == 2


def test_a_rollout_gives_up_after_so_many_failures_in_a_row_and_goes_on_when_it_is_mended(
    arguments, tmp_path
):
    calls = tmp_path / "calls"
    mended = tmp_path / "mended"
    fails = f"""
import os
open({str(calls)!r}, "a").write("x")
if not os.path.exists({str(mended)!r}):
    exit(1)
"""
    arguments |= {"harness": python(fails + ANSWER), "sessions": 4, "concurrency": 1}
    message = r"gave up after 3 consecutive .* failures.* no model call came"
    with pytest.raises(RecorderError, match=message):
        rolltap.rollout([TASK], **arguments, retries=0, give_up_after=3)
    assert calls.read_text() == "xxx"
    mended.touch()
    run = rolltap.rollout([TASK], **arguments)
    rewards = [run.inspect_session(name).session.reward for name in run.new_session_ids]
    assert sorted(rewards, key=str) == [0.5] * 4 + [None] * 3
    assert len(run.traces().batch(run.new_session_ids).rewards) == 4


def test_a_session_is_tried_again_when_it_failed_because_of_infrastructure(arguments, tmp_path):
    tried = str(tmp_path / "tried")
    fails = f"""
import os
if not os.path.exists({tried!r}):
    open({tried!r}, "w")
    exit(1)
"""
    arguments |= {"harness": python(fails + ANSWER), "sessions": 1}
    run = rolltap.rollout([TASK], **arguments)
    first, second = [run.inspect_session(name).session for name in run.new_session_ids]
    assert second.session_id == f"{first.session_id}~1"
    assert [first.status, first.reward] == ["infrastructure", None]
    assert [second.status, second.reward] == ["completed", 0.5]
    assert first.group_id == second.group_id


def test_a_second_rollout_into_the_folder_is_refused_while_one_runs(arguments):
    with (
        rollout_lock(arguments["out"]),
        pytest.raises(RunError, match="another rollout or training runs sessions in"),
    ):
        rolltap.rollout([TASK], **arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"harness": "clod"}, "no harness is named 'clod': choose"),
        (
            {"harness": rolltap.Harness(name="x", program="no-such", headless=[])},
            "'no-such' is not on the PATH",
        ),
        ({"sessions": 0}, "'sessions' is 0: Input should be greater"),
        ({"concurrency": 0}, "'concurrency' is 0: Input should be greater"),
        ({"give_up_after": 0}, "'give_up_after' is 0: Input should be greater"),
        ({"timeout": float("nan")}, "'timeout' is nan"),
        (
            {"recorder": {"rolltap_samplin": "{}"}},
            "rolltap_samplin is no option .* did you mean rolltap_sampling",
        ),
        ({"timeouts": 9}, "unknown key 'timeouts'"),
        ({"tasks": []}, "the list of tasks is empty"),
        ({"tasks": TASK}, "tasks is one task: give a list"),
        (
            {"tasks": [{"id": "t"}]},
            "a task is {'id': 't'}: give rolltap.Task objects, or the path of a task file",
        ),
        (
            {"tasks": [TASK.model_copy(update={"workspace": Path("/none")})]},
            "task 't': the workspace /none is not a",
        ),
        ({"tasks": [TASK, TASK]}, "2 tasks have the id 't'"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_started(arguments, changed, message):
    with pytest.raises(InputError, match=message):
        rolltap.rollout(**{"tasks": [TASK], **arguments, **changed})
    assert not arguments["out"].exists()


def test_an_engine_that_does_not_answer_is_an_error_before_anything_is_started(arguments):
    arguments["engine"] += ",http://127.0.0.1:9"
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/v1/models: no engine answers"):
        rolltap.rollout([TASK], **arguments)
    assert not arguments["out"].exists()


def test_a_program_of_ones_own_is_recorded_with_a_reward(arguments, tmp_path):
    del arguments["harness"], arguments["sessions"]
    with rolltap.Recorder(arguments.pop("out"), **arguments) as recorder:
        environment = {"PATH": "/usr/bin", **recorder.environment("mine")}
        subprocess.run([sys.executable, "-c", ANSWER], env=environment, cwd=tmp_path, check=True)
        recorder.end(
            rolltap.Session(session_id="mine", group_id="g", status="completed", reward=1.0)
        )
    batch = rolltap.open_run(tmp_path / "run").traces().batch()
    assert batch.rewards == {"mine": rolltap.GroupReward(group_id="g", reward=1.0)}
    assert len(batch.traces) == 1
