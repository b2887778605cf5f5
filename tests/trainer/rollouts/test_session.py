"""The way of one session, on a real recorder."""

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rolltap.addons.errors import InputError, RecorderError
from rolltap.addons.store.records import PHASES
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.boxes.process import ProcessBox, ProcessRuntime
from rolltap.trainer.boxes.runtime import BoxSpec
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.judges.verdict import Judged
from rolltap.trainer.rollouts import preparation, runner
from rolltap.trainer.rollouts import session as session_module
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.tasks.task import Limits, Task
from rolltap.trainer.traces.reader import load_sessions
from tests.boxes import sandboxed
from tests.harness.play import tool_call
from tests.scripted_engine import Say
from tests.trainer.rollouts.contexts import (
    ONE_CALL,
    ONE_CALL_TEXT,
    context_of,
    pass_time,
    run_groups,
)

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
ASK_WITH_TOOL = ONE_CALL_TEXT.replace("{'model': 'm',", f"{{'model': 'm', 'tools': [{TOOL!r}],")


@pytest.fixture
def play(recorder, request, tmp_path):
    async def play(script, *, runtime=None, retries=0, **fields):
        """Run one session. Return its row."""
        name = f"{request.node.name.partition('[')[0]}-{len(load_sessions(recorder.path))}"
        task = Task(id="t", instruction="go", **{"evaluate": ["true"], **fields})
        context = context_of(recorder, tmp_path, script, runtime, retries=retries)
        await run_groups([Group(task, name, [f"{name}-0"])], context)
        return load_sessions(recorder.path)[f"{name}-0"]

    return play


async def test_a_session_is_begun_before_it_runs_and_its_row_is_complete(play, recorder):
    row = await play(f"{ONE_CALL}; echo made > made.txt")
    events = read_rows(recorder.path, "events", [row.session_id])
    begun = [event["at"] for event in events if event["kind"] == "session_started"]
    assert begun == [row.started_at]
    assert (row.status, row.reward, row.runtime) == ("completed", 1.0, "process")
    assert row.evidence["changed"] == ["made.txt"]
    assert row.suspicions == {}


SECONDS = {f"{phase}_seconds" for phase in PHASES}


def timed(row):
    """Return the phases of which a row has the seconds."""
    return {name.removesuffix("_seconds") for name in SECONDS if getattr(row, name) is not None}


async def test_a_row_has_the_seconds_of_the_phases_that_its_session_reached(
    play, recorder, monkeypatch
):
    monkeypatch.setattr(runner, "PAUSE_SECONDS", 0.01)
    sent = []
    monkeypatch.setattr(
        session_module, "send_spans", lambda clock, attributes: sent.append((clock, attributes))
    )
    row = await play(ONE_CALL)
    assert timed(row) == {"queued", "preparing", "running", "judging"}
    assert row.running_seconds <= (row.finished_at - row.started_at).total_seconds()
    [(clock, attributes)] = sent
    assert {name: getattr(row, f"{name}_seconds") for name in timed(row)} == clock.seconds()
    assert (attributes["session_id"], attributes["status"], attributes["reward"]) == (
        row.session_id,
        "completed",
        1.0,
    )
    row = await play(ONE_CALL, runtime=Lacking(), retries=1)
    assert timed(row) == {"queued", "preparing"}
    assert timed(load_sessions(recorder.path)[f"{row.session_id}~1"]) == {"retried", "preparing"}


async def test_the_time_limit_of_preparing_begins_when_its_copy_does(play, monkeypatch):
    limits, copied = [], []
    timeout, in_folder_thread = asyncio.timeout, preparation.in_folder_thread

    def noted(seconds):
        limit = timeout(seconds)
        if seconds is None:
            limits.append(limit)
        return limit

    async def queued(function, *arguments):
        if function.__name__ != "copy":
            return await in_folder_thread(function, *arguments)
        assert [limit.when() for limit in limits] == [None]
        await in_folder_thread(function, *arguments)
        copied.append(limits[0].when())

    monkeypatch.setattr(preparation.asyncio, "timeout", noted)
    monkeypatch.setattr(preparation, "in_folder_thread", queued)
    assert (await play(ONE_CALL)).status == "completed"
    (end,) = copied
    assert end is not None


AROUND = "http://127.0.0.1:9"  # the recorder's win
ENV = {"COLOUR": "blue", "HTTPS_PROXY": AROUND, "https_proxy": AROUND}
LATE = ("timeout", 1.0, "stopped after 600 s, the limit of --timeout or of the task's 'timeout'")
NEST = "import os\nfor _ in range(1500): os.mkdir('n'); os.chdir('n')"
LOOK = ["sh", "-c", "test -s pid || exit 1; ! kill -0 $(cat pid)"]
STOPPED = (
    "failed",
    1.0,
    "stopped: it had more processes than the limit, 'limits.processes' of the task",
)
SESSIONS = {
    "time limit": (
        "test $COLOUR = blue && touch $WORKS && exec sleep 3600",
        {"timeout": 600, "env": ENV},
        LATE,
    ),
    "dead before its judge looks": (
        "setsid sleep 600 & echo $! > pid",
        {"evaluate": LOOK},
        ("completed", 1.0, None),
    ),
    "limits": (
        "for i in 1 2 3 4 5 6 7 8 9; do sleep 600 & done; wait",
        {"limits": Limits(processes=6)},
        STOPPED,
    ),
    "folders nested a thousand times": (
        shlex.join([sys.executable, "-c", NEST]),
        {},
        ("completed", 1.0, None),
    ),
}


@pytest.mark.parametrize(("script", "fields", "expected"), SESSIONS.values(), ids=SESSIONS)
async def test_a_session_has_what_its_task_says_whatever_it_leaves(
    play, tmp_path, monkeypatch, script, fields, expected
):
    works = tmp_path / "works"
    passing = asyncio.create_task(pass_time(monkeypatch, 600, works))
    row = await play(f"{ONE_CALL}; WORKS={works}; {script}", **fields)
    passing.cancel()
    assert (row.status, row.reward, row.error) == expected


class Lacking(ProcessRuntime):
    def image_digest(self, image):
        raise InputError(f"no image {image}")

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[ProcessBox]:
        raise OSError("no room")
        yield


async def test_a_box_that_cannot_be_made_is_no_fault_of_the_agent(play):
    row = await play(ONE_CALL, runtime=Lacking())
    assert (row.status, row.reward, row.error) == (
        "infrastructure",
        None,
        "the session could not be run: no room",
    )


async def test_an_image_that_cannot_be_had_is_told_in_the_row_and_is_not_asked_for_again(
    play, recorder, caplog
):
    row = await play(ONE_CALL, runtime=Lacking(), retries=2, image="nope:1")
    assert (row.status, row.error) == (
        "infrastructure",
        "the session could not be run: no image nope:1",
    )
    assert f"{row.session_id}~1" not in load_sessions(recorder.path)
    assert caplog.text.count("no session of task t can be run") == 1


async def test_what_a_tool_call_does_is_in_the_suspicions_of_the_row(play, engine, monkeypatch):
    monkeypatch.setattr(
        engine, "otherwise", lambda request: Say(tool_call("bash", {"command": "git log --all"}))
    )
    row = await play(shlex.join([sys.executable, "-c", ASK_WITH_TOOL]))
    assert (row.status, row.suspicions) == ("completed", {"git_history": 1})


@pytest.fixture
def judges(monkeypatch):
    """Return a function that replaces the judge by one with this judgement or error."""

    def judges(result):
        async def judge(_):
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(session_module, "judge", judge)

    return judges


@pytest.mark.parametrize(
    ("result", "status", "error"),
    [
        (
            KeyError("of the agent's making"),
            "unjudged",
            'the judge failed: KeyError("of the agent\'s making")',
        ),
        (
            OSError("No space left on device"),
            "infrastructure",
            "the session could not be run: No space left on device",
        ),
    ],
)
async def test_a_judge_that_breaks_is_no_verdict_and_the_rollout_goes_on(
    play, judges, result, status, error
):
    judges(result)
    row = await play(ONE_CALL)
    assert (row.status, row.reward, row.error) == (status, None, error)
    judges(Judged(reward=0.25, parts={"speed": 0.5}, evidence={"judge": "command"}))
    row = await play(ONE_CALL)
    assert (row.reward, row.parts, row.evidence) == (0.25, {"speed": 0.5}, {"judge": "command"})


@pytest.mark.parametrize(
    ("harness", "error"),
    [
        (
            Harness(name="gone", program="no-such-program", headless=[]),
            "the harness no-such-program cannot be started",
        ),
        ("no-such-program", "sh: 1: no-such-program: not found; a shell could not run a command"),
        (
            "touch agent; ./agent",
            "sh: 1: ./agent: Permission denied; a shell could not run a command",
        ),
    ],
)
async def test_a_program_that_cannot_be_run_is_named_and_is_not_started_again(
    play, recorder, harness, error
):
    row = await play(harness, retries=2)
    assert row.status == "infrastructure"
    assert error in row.error
    assert f"{row.session_id}~1" not in load_sessions(recorder.path)


@sandboxed
async def test_a_program_that_failed_in_a_box_before_its_first_call_is_told_what_a_box_shows(play):
    row = await play("cat /opt/none", runtime=SandboxRuntime())
    assert row.error.startswith("cat: /opt/none: No such file or directory; no model call came")
    assert row.error.endswith("show other folders with --tools DIR (tools in a recipe)")


@sandboxed
async def test_a_program_in_a_box_is_recorded_through_the_boxs_own_loopback(play, recorder):
    row = await play(f"echo $HTTPS_PROXY > proxy; {ONE_CALL}", runtime=SandboxRuntime())
    assert (row.status, row.reward) == ("completed", 1.0)
    assert len([*read_rows(recorder.path, "calls", [row.session_id])]) == 1
    diff = (recorder.path / "logs" / f"{row.session_id}.diff").read_text()
    assert "@127.0.0.1:3128" in diff


async def test_a_rollout_ends_when_the_judge_cannot_judge_many_sessions_in_a_row(
    recorder, tmp_path, judges
):
    judges(Judged(unjudged="no key"))
    context = context_of(recorder, tmp_path, ONE_CALL, concurrency=1, give_up_after=2)
    task = Task(id="t", instruction="go", evaluate=["true"])
    groups = [Group(task, "unjudged", [f"unjudged-{number}" for number in range(3)])]
    with pytest.raises(
        RecorderError, match=r"gave up after 2 consecutive .*; the last, unjudged-1: no key"
    ):
        await run_groups(groups, context)


async def run_tasks(context, name, *tasks):
    """Run two sessions of each task. Return the rows by their ids."""
    groups = [
        Group(task, f"{name}-{task.id}", [f"{name}-{task.id}-{n}" for n in range(2)])
        for task in tasks
    ]
    rows = await run_groups(groups, context)
    return {row.session_id.removeprefix(f"{name}-"): row for row in rows}


def counting(folder, script):
    """Return the command of a judge that counts how often it is asked."""
    return ["sh", "-c", f"echo x >> {folder}/asked; {script}"]


def asked(folder):
    return (folder / "asked").read_text().count("x")


async def test_a_judge_that_cannot_run_on_the_start_ends_its_tasks_sessions_before_they_run(
    recorder, tmp_path
):
    judge = counting(tmp_path, "echo first; no-such-judge")
    bad = Task(id="bad", instruction="go", evaluate=judge)
    good = Task(id="good", instruction="go", evaluate=["true"])
    context = context_of(recorder, tmp_path, ONE_CALL, retries=2)
    rows = await run_tasks(context, "untried", bad, good)
    assert {name: row.status for name, row in rows.items()} == {
        "bad-0": "infrastructure",
        "bad-1": "infrastructure",
        "good-0": "completed",
        "good-1": "completed",
    }
    assert asked(tmp_path) == 1
    for name in ("bad-0", "bad-1"):
        assert (
            rows[name].error
            == f"the session could not be run: task 'bad': its judge, {shlex.join(judge)}, has no"
            " verdict on the untouched start: the judge ended with status 127, and only 0 and 1"
            " are a verdict: 'sh', or a program in it, is not there; its output is in"
            " bad.start.judge.log; its last line: sh: 1: no-such-judge: not found. Install it"
            " for the judge, or name another program in its command"
        )
    assert (
        recorder.path / "logs" / "bad.start.judge.log"
    ).read_text() == "first\nsh: 1: no-such-judge: not found\n"
    events = read_rows(recorder.path, "events", ["untried-bad-0", "untried-bad-1"])
    assert "session_started" not in {event["kind"] for event in events}


async def test_a_pytest_judge_without_pytest_names_its_python_before_a_session_runs(
    recorder, tmp_path
):
    command = [sys.executable, "-S", "-m", "pytest"]
    task = Task(id="t", instruction="go", judge={"kind": "pytest", "command": command})
    rows = await run_tasks(context_of(recorder, tmp_path, ONE_CALL), "lacking", task)
    assert rows["t-0"].error.endswith(
        f"; its last line: {sys.executable}: No module named pytest. Install it for the "
        "judge, or name another program in its command"
    )


async def test_a_judge_is_tried_once_and_not_where_it_has_judged_sessions_of_the_run(
    recorder, tmp_path
):
    task = Task(id="t", instruction="go", evaluate=counting(tmp_path, "exit 1"))
    context = context_of(recorder, tmp_path, ONE_CALL)
    rows = await run_tasks(context, "once", task)
    assert [(row.reward, row.error) for row in rows.values()] == [(0.0, None), (0.0, None)]
    assert asked(tmp_path) == 3
    resumed = context_of(recorder, tmp_path, ONE_CALL)
    resumed.judged = {task.digest()}
    assert len(await run_tasks(resumed, "again", task)) == 2
    assert asked(tmp_path) == 5


async def test_a_judge_that_runs_and_has_no_verdict_on_the_start_is_told_once_and_its_sessions_run(
    recorder, tmp_path, caplog
):
    task = Task(id="t", instruction="go", evaluate=["grep", "-q", "good", "answer.txt"])
    context = context_of(recorder, tmp_path, f"{ONE_CALL}; echo good > answer.txt")
    rows = await run_tasks(context, "told", task)
    assert [row.reward for row in rows.values()] == [1.0, 1.0]
    (message,) = [record.message for record in caplog.records if "verdict" in record.message]
    assert (
        message
        == "task t: its judge, grep -q good answer.txt, has no verdict on the untouched start: the"
        " judge ended with status 2, and only 0 and 1 are a verdict; its output is in"
        " t.start.judge.log; its last line: grep: answer.txt: No such file or directory. A"
        " session that leaves it so is unjudged"
    )


@pytest.mark.parametrize(
    "judge",
    [
        ["./solve.sh"],
        ["sh", "-c", "./solve.sh"],
        ["sh", "-c", "echo the server could not be started >&2; exit 3"],
        ["sh", "-c", "echo it ended with status 127 >&2; exit 3"],
        ["sh", "-c", "frobnicate"],
    ],
    ids=shlex.join,
)
async def test_a_judge_of_what_the_agent_is_to_make_lacks_nothing(recorder, tmp_path, judge):
    task = Task(id="t", instruction="Write solve.sh. Install frobnicate.", evaluate=judge)
    make = "printf '#!/bin/sh\n' > solve.sh && chmod +x solve.sh"
    rows = await run_tasks(
        context_of(recorder, tmp_path, f"{ONE_CALL}; {make}"),
        f"made-{len(shlex.join(judge))}",
        task,
    )
    assert {row.status for row in rows.values()} <= {"completed", "unjudged"}


async def test_a_function_and_a_model_are_not_tried_and_programs_among_several_judges_are(
    recorder, tmp_path, monkeypatch
):
    model = {"kind": "llm", "rubric": "r", "url": "http://127.0.0.1:1", "model": "m"}
    function = {"kind": "python", "function": "no_such_module:judge"}
    program = {"kind": "command", "command": counting(tmp_path, "no-such-judge")}
    judges = [{"name": judge["kind"], "judge": judge} for judge in (model, function, program)]
    task = Task(id="t", instruction="go", judge={"kind": "several", "judges": judges})
    rows = await run_tasks(context_of(recorder, tmp_path, ONE_CALL), "several", task)
    assert "ended with status 127" in rows["t-0"].error
    assert asked(tmp_path) == 1


async def test_rules_that_fail_on_what_an_agent_did_do_not_end_the_rollout(
    play, monkeypatch, caplog
):
    def broken(*_):
        raise KeyError("of the agent's making")

    monkeypatch.setattr(session_module, "suspicions", broken)
    row = await play(ONE_CALL)
    assert (row.status, row.reward) == ("completed", 1.0)
    assert "the suspicions of session" in caplog.text
