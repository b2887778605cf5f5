"""The way of one session, on a real recorder."""

import asyncio
import shlex
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError, RecorderError
from rolltap.addons.store.records import PHASES
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.boxes.process import ProcessRuntime
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


class Lacking(ProcessRuntime):
    """A runtime without images, whose boxes cannot be made for this reason."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def image_digest(self, image):
        raise InputError(f"no image {image}")

    @asynccontextmanager
    async def box(self, spec):
        raise self.error
        yield


def timed(row):
    """Return the phases of which a row has the seconds."""
    return {phase for phase in PHASES if getattr(row, f"{phase}_seconds") is not None}


async def test_a_row_has_the_seconds_of_the_phases_that_its_session_reached(
    play, recorder, monkeypatch
):
    sent = []
    monkeypatch.setattr(runner, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(session_module, "send_spans", lambda *spans: sent.append(spans))
    row = await play(ONE_CALL)
    assert timed(row) == {"queued", "preparing", "running", "judging"}
    assert row.running_seconds <= (row.finished_at - row.started_at).total_seconds()
    ((clock, attributes),) = sent
    assert clock.seconds() == {phase: getattr(row, f"{phase}_seconds") for phase in timed(row)}
    assert attributes["session_id"] == row.session_id
    assert (attributes["status"], attributes["reward"]) == ("completed", 1.0)
    row = await play(ONE_CALL, runtime=Lacking(OSError("no room")), retries=1)
    assert (row.status, row.reward) == ("infrastructure", None)
    assert row.error == "the session could not be run: no room"
    assert timed(row) == {"queued", "preparing"}
    assert timed(load_sessions(recorder.path)[f"{row.session_id}~1"]) == {"retried", "preparing"}


async def test_the_time_limit_of_preparing_begins_when_its_copy_does(play, monkeypatch):
    loop = asyncio.get_running_loop()
    now = loop.time
    in_folder_thread = preparation.in_folder_thread

    async def queued(function, *arguments):
        if function.__name__ == "copy":  # it waits for a thread for longer than the limit
            monkeypatch.setattr(loop, "time", lambda: now() + 3600)
        return await in_folder_thread(function, *arguments)

    monkeypatch.setattr(preparation, "in_folder_thread", queued)
    assert (await play(ONE_CALL)).status == "completed"
    assert loop.time() > now() + 3000


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


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"image": "nope:1"}, "no image nope:1"),
        ({"workspace": Path("/no/workspace")}, "/no/workspace"),
        ({}, "OverflowError('of infinity')"),  # in a way that nobody thought of
    ],
    ids=["no image", "no workspace", "no box"],
)
async def test_what_cannot_be_prepared_is_no_fault_of_the_agent_and_is_not_tried_again(
    play, recorder, fields, why
):
    row = await play(ONE_CALL, runtime=Lacking(OverflowError("of infinity")), retries=2, **fields)
    assert (row.status, row.reward) == ("infrastructure", None)
    assert row.error.startswith("the session could not be run: ")
    assert why in row.error
    assert f"{row.session_id}~1" not in load_sessions(recorder.path)


async def test_what_a_tool_call_does_is_in_the_suspicions_of_the_row(play, engine):
    engine.replies.append(Say(tool_call("bash", {"command": "git log --all"})))
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
        (KeyError("its file"), "unjudged", "the judge failed: KeyError('its file')"),
        (OSError("disk full"), "infrastructure", "the session could not be run: disk full"),
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
    group = Group(task, "unjudged", ["unjudged-0", "unjudged-1", "unjudged-2"])
    why = r"gave up after 2 consecutive .*; the last, unjudged-1: no key"
    with pytest.raises(RecorderError, match=why):
        await run_groups([group], context)


class TestTheJudgeOnTheStart:
    """Programs that judge a task are tried on its start before its first session runs."""

    @pytest.fixture
    def run(self, recorder, tmp_path):
        async def run(*tasks, script=ONE_CALL, judged=()):
            """Run two sessions of each task. Return task -> rows."""
            context = context_of(recorder, tmp_path, script, retries=2)
            context.judged = judged
            rows = {}
            groups = []
            for task in tasks:
                name = f"{tmp_path.name}-{task.id}-{len(load_sessions(recorder.path))}"
                groups.append(Group(task, name, [f"{name}-0", f"{name}-1"]))
                rows[task.id] = []
            for row in await run_groups(groups, context):
                rows[row.task_id].append(row)
            return rows

        return run

    @pytest.fixture
    def counting(self, tmp_path):
        """Return a function of a script. It returns the command of a judge that counts how often it
        is asked, in the file `asked`."""

        def counting(script):
            return ["sh", "-c", f"echo x >> {tmp_path}/asked; {script}"]

        return counting

    async def test_one_that_cannot_run_ends_its_tasks_sessions_before_they_run(
        self, run, recorder, tmp_path, counting
    ):
        judges = [  # a model and a function are not tried
            {"kind": "llm", "rubric": "r", "url": "http://127.0.0.1:1", "model": "m"},
            {"kind": "python", "function": "no_such_module:judge"},
            {"kind": "command", "command": counting("echo first; no-such-judge")},
        ]
        several = [{"name": judge["kind"], "judge": judge} for judge in judges]
        bad = Task(id="bad", instruction="go", judge={"kind": "several", "judges": several})
        good = Task(id="good", instruction="go", evaluate=["true"])
        rows = await run(bad, good)
        assert [row.status for row in rows["good"]] == ["completed"] * 2
        assert [row.status for row in rows["bad"]] == ["infrastructure"] * 2
        assert (tmp_path / "asked").read_text() == "x\n"
        said = "sh: 1: no-such-judge: not found"
        for row in rows["bad"]:
            assert row.error.startswith(
                "the session could not be run: task 'bad': its judge, sh -c"
            )
            assert "the judge ended with status 127" in row.error
            assert f"bad.start.judge.log; its last line: {said}. Install it" in row.error
        log = recorder.path / "logs" / "bad.start.judge.log"
        assert log.read_text() == f"first\n{said}\n"
        events = read_rows(recorder.path, "events", [row.session_id for row in rows["bad"]])
        assert "session_started" not in {event["kind"] for event in events}

    async def test_one_of_pytest_without_pytest_names_its_python(self, run):
        command = [sys.executable, "-S", "-m", "pytest"]
        task = Task(id="t", instruction="go", judge={"kind": "pytest", "command": command})
        for row in (await run(task))["t"]:
            assert f"{sys.executable}: No module named pytest. Install it for the" in row.error

    async def test_it_is_tried_once_and_not_where_it_has_judged_sessions_of_the_run(
        self, run, tmp_path, counting
    ):
        task = Task(id="t", instruction="go", evaluate=counting("exit 1"))
        rows = await run(task)
        assert [(row.reward, row.error) for row in rows["t"]] == [(0.0, None)] * 2
        assert (tmp_path / "asked").read_text() == "x\n" * 3
        await run(task, judged={task.digest()})
        assert (tmp_path / "asked").read_text() == "x\n" * 5

    async def test_one_that_runs_and_has_no_verdict_is_told_once_and_the_sessions_run(
        self, run, caplog
    ):
        task = Task(id="t", instruction="go", evaluate=["grep", "-q", "good", "answer.txt"])
        rows = await run(task, script=f"{ONE_CALL}; echo good > answer.txt")
        assert [row.reward for row in rows["t"]] == [1.0, 1.0]
        (message,) = [record.message for record in caplog.records if "verdict" in record.message]
        assert message.startswith("task t: its judge, grep -q good answer.txt, has no verdict on")
        assert "its last line: grep: answer.txt: No such file or directory" in message

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
    async def test_one_of_what_the_agent_is_to_make_lacks_nothing(self, run, judge):
        task = Task(id="t", instruction="Write solve.sh. Install frobnicate.", evaluate=judge)
        make = "printf '#!/bin/sh\n' > solve.sh && chmod +x solve.sh"
        rows = await run(task, script=f"{ONE_CALL}; {make}")
        assert {row.status for row in rows["t"]} <= {"completed", "unjudged"}


async def test_rules_that_fail_on_what_an_agent_did_do_not_end_the_rollout(
    play, monkeypatch, caplog
):
    def broken(*_):
        raise KeyError("of the agent's making")

    monkeypatch.setattr(session_module, "suspicions", broken)
    row = await play(ONE_CALL)
    assert (row.status, row.reward) == ("completed", 1.0)
    assert "the suspicions of session" in caplog.text
