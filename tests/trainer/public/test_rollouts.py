import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rolltap
from rolltap.errors import EngineError, InputError, RecorderError, RunError
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.rollouts import runner
from rolltap.trainer.rollouts.mitmdump import rollout_lock
from tests.deep import cases
from tests.scripted_engine import Say
from tests.trainer.cli.program import ASK

COMMAND = ["sh", "-c", "cat answer.txt > $ROLLTAP_REWARD_FILE"]
JUDGE = {"kind": "command", "command": COMMAND, "result": "number"}
TASK = rolltap.Task(id="t", instruction="Say it.", judge=JUDGE)
ANSWER = ASK.replace("print(", "open('answer.txt', 'w').write(").replace("sys.exit(3)", "")
HARNESS = rolltap.Harness(name="x", program=sys.executable, headless=["-c", ANSWER])


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
    ends = [(session.status, session.reward, session.harness) for session in run.sessions()]
    assert ends == [("completed", 0.5, "x")] * 2
    batch = run.traces(strategy="prefix_merging").batch()
    assert {labelled.reward for labelled in batch.rewards.values()} == {0.5}
    assert batch.ledger.trained == batch.ledger.sampled > 0


async def test_a_rollout_runs_where_an_event_loop_runs_as_in_a_notebook_and_its_batch_is_labelled(
    arguments,
):
    run = rolltap.rollout([TASK], **arguments)
    check(run)
    session = run.sessions()[0]
    assert session.harness_version == ".".join(map(str, sys.version_info[:3]))
    assert (session.runtime, session.task_digest, session.preset_digest) == (
        "process",
        TASK.digest(),
        HARNESS.digest(),
    )
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
    "given", [{"tools": ["/usr"]}, {"container_engine": "podman"}, {"container_arguments": ["x"]}]
)
def test_settings_of_a_runtime_are_refused_beside_one_that_is_made(arguments, given):
    with pytest.raises(
        InputError, match=f"{min(given)} is for runtimes that are chosen by name: give it to"
    ):
        rolltap.rollout([TASK], runtime=ProcessRuntime(), **arguments, **given)


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
    harness = rolltap.Harness(name="x", program="sh", headless=["-c", script])
    rolling = asyncio.create_task(
        rolltap.rollout_async([TASK], **{**arguments, "harness": harness, "sessions": 1})
    )
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
    assert [(session.status, session.reward) for session in run.sessions()] == [("cancelled", None)]


def test_a_task_file_and_more_sessions_in_the_same_run(arguments, tmp_path, scripted_engine):
    counts = f"echo x >> {tmp_path}/judged; {COMMAND[-1]}"
    judge = TASK.judge.model_copy(update={"command": ["sh", "-c", counts]})
    task = TASK.model_copy(update={"judge": judge})
    (tmp_path / "tasks.jsonl").write_text(task.model_dump_json(exclude_none=True))
    for number, version in enumerate(("0", "1"), start=1):
        scripted_engine.otherwise = lambda request, version=version: Say(
            "0.5", weight_version=version
        )
        scripted_engine.weight_version = version
        run = rolltap.rollout(tmp_path / "tasks.jsonl", **{**arguments, "sessions": 1})
        assert len(run.sessions()) == number
        (new,) = [
            session for session in run.sessions() if session.session_id in run.new_session_ids
        ]
        assert new.policy_version == version
        assert run.traces().batch(run.new_session_ids).rewards.keys() == {new.session_id}
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
    assert not set(further.new_session_ids) & set(first.new_session_ids)
    assert len({session.group_id for session in further.sessions()}) == 2


def test_a_rollout_gives_up_after_so_many_failures_in_a_row_and_goes_on_when_it_is_mended(
    arguments, tmp_path
):
    calls, mended = tmp_path / "calls", tmp_path / "mended"
    script = (
        f"open({str(calls)!r}, 'a').write('x')\nimport os\nif not os.path.exists({str(mended)!r}):"
        " exit(1)\n"
    )
    harness = rolltap.Harness(name="x", program=sys.executable, headless=["-c", script + ANSWER])
    how = {**arguments, "harness": harness, "sessions": 4, "concurrency": 1}
    with pytest.raises(
        RecorderError, match=r"gave up after 3 consecutive .* failures.* no model call came"
    ):
        rolltap.rollout([TASK], **how, retries=1, give_up_after=3)
    assert calls.read_text() == "xxx"
    mended.touch()
    run = rolltap.rollout([TASK], **how)
    rewards = [
        session.reward for session in run.sessions() if session.session_id in run.new_session_ids
    ]
    assert sorted(rewards, key=str) == [0.5] * 4 + [None] * 3
    assert len(run.traces().batch(run.new_session_ids).rewards) == 4


def test_a_session_is_tried_again_when_it_failed_because_of_infrastructure(
    arguments, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "PAUSE_SECONDS", 0.0)
    tried = tmp_path / "tried"
    script = (
        f"import os, sys\nif not os.path.exists({str(tried)!r}): open({str(tried)!r}, 'w');"
        " sys.exit(1)\n"
    )
    harness = rolltap.Harness(name="x", program=sys.executable, headless=["-c", script + ANSWER])
    run = rolltap.rollout([TASK], **{**arguments, "harness": harness, "sessions": 1})
    first, second = (run.inspect_session(name).session for name in run.new_session_ids)
    assert second.session_id == f"{first.session_id}~1"
    assert (first.status, first.reward, second.status, second.reward) == (
        "infrastructure",
        None,
        "completed",
        0.5,
    )
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
        ({"recorders": 0}, "'recorders' is 0: Input should be greater"),
        ({"give_up_after": 0}, "'give_up_after' is 0: Input should be greater"),
        ({"retries": -1}, "'retries' is -1"),
        ({"budget": {"calls": 0}}, r"'budget\.calls' is 0"),
        ({"timeout": float("nan")}, "'timeout' is nan"),
        (
            {"recorder": {"rolltap_samplin": "{}"}},
            "rolltap_samplin is no option .* did you mean rolltap_sampling",
        ),
        ({"timeouts": 9}, "unknown key 'timeouts'"),
        (
            {"recorder": {"rolltap_max_calls": "3"}},
            r"set budget\.calls \(--max-calls\) instead of rolltap_max_calls",
        ),
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
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/v1/models: no engine answers"):
        rolltap.rollout(
            [TASK], **{**arguments, "engine": f"{arguments['engine']},http://127.0.0.1:9"}
        )
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
