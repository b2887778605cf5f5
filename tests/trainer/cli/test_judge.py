"""`rolltap judge`: what agents left is judged by another judge, as a rollout of the same answers
would judge it."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

import rolltap
from rolltap.addons.store.rewards import session_rows
from rolltap.rollouts import judge_again
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.checks.rejudge import rejudge
from rolltap.trainer.cli.main import rolltap as command
from rolltap.trainer.traces.reader import load_sessions
from tests.boxes import NO_SANDBOX
from tests.deep import cases
from tests.scripted_engine import Say, ScriptedEngine
from tests.trainer.cli.program import ROLLTAP, run_rolltap
from tests.trainer.judges.sessions import shell
from tests.trainer.service.served import HARNESS

AGENT = f"""{HARNESS}
import os
os.remove("notes.txt")
os.mkfifo("pipe")
open("conftest.py", "w").write("raise SystemExit(0)")
os.chmod("answer.txt", 0o755)
"""
ANSWERS = ["good work", "bad work", "no words"]


def write_tasks(tmp_path, script, **fields):
    """Write the tasks whose judge is a shell's script, and return the path of the file."""
    (tmp_path / "start").mkdir(exist_ok=True)
    for name in ("notes.txt", "test_it.py"):
        (tmp_path / "start" / name).write_text(
            "def test(): assert 'good' in open('answer.txt').read()\n"
        )
    task = {
        "id": "t",
        "instruction": "Say it.",
        "workspace": "start",
        "judge": shell(script),
        **fields,
    }
    path = tmp_path / f"tasks-{len(list(tmp_path.iterdir()))}.jsonl"
    path.write_text(json.dumps(task))
    return path


@pytest.fixture(scope="module")
def rolled_out(tmp_path_factory, tokenizer, tokenizer_folder):
    """Return a function that rolls out tasks, one session for each answer, and returns the run."""
    folder = tmp_path_factory.mktemp("harness")
    arguments = json.dumps(["-c", AGENT])
    harness = (
        f'name = "small"\nversion = "1"\nprogram = "{sys.executable}"\nheadless = {arguments}\n'
    )
    (folder / "harness.toml").write_text(harness)
    with ScriptedEngine(tokenizer) as engine:

        def rolled_out(tasks, run, runtime="process"):
            engine.replies.extend(map(Say, ANSWERS))
            given = [
                "--out",
                run,
                "--engine",
                engine.url,
                "--model",
                tokenizer_folder,
                "--runtime",
                runtime,
            ]
            given += ["--harness", folder / "harness.toml", "-n", len(ANSWERS), "--concurrency", 1]
            ended = run_rolltap("rollout", tasks, *given)
            assert ended.returncode == 0, ended.stderr
            return run

        yield rolled_out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, rolled_out):
    folder = tmp_path_factory.mktemp("recorded")
    return rolled_out(write_tasks(folder, WRONG), folder / "run")


@pytest.fixture
def run(tmp_path, recorded):
    """A run of three sessions of the task `t`, which a wrong judge has judged in the runtime
    `process`."""
    return shutil.copytree(recorded, tmp_path / "run")


def facts(run):
    """Return what a judgement decides of the sessions of a run."""
    own = ("reward_from", "log")
    return sorted(
        (
            json.dumps(
                {name: value for name, value in session.evidence.items() if name not in own}
            ),
            *(
                session.reward,
                session.status,
                session.error,
                session.suspicions,
                session.task_digest,
            ),
        )
        for session in load_sessions(run).values()
    )


def judge(*arguments):
    """Run the command here, and return its exit status and all that it says."""
    ended = CliRunner().invoke(command, ["judge", *map(str, arguments)])
    return ended.exit_code, ended.stdout or str(ended.exception)


WRONG, RIGHT = (
    "grep -q bad answer.txt",
    "grep -q good answer.txt && test -x answer.txt && test $(ls *.txt | wc -l) = 1",
)


SANDBOX = pytest.param("sandbox", marks=pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX))


@pytest.mark.parametrize("runtime", cases(["process", SANDBOX], 0))
def test_another_judge_gives_the_rewards_of_a_new_rollout_and_the_earlier_ones_stay(
    tmp_path, request, rolled_out, runtime
):
    chosen = ("--runtime", runtime)
    if runtime == "process":
        run = request.getfixturevalue("run")
    else:
        run = rolled_out(write_tasks(tmp_path, WRONG), tmp_path / "run", runtime)
    before = load_sessions(run)
    new = write_tasks(tmp_path, RIGHT)
    status, said = judge(run, "--tasks", new, *chosen, "--json")
    assert status == 0, said
    told = {
        each["session"]: (each["before"], each["reward"], each["result"])
        for each in json.loads(said)
    }
    assert sorted(told.values()) == [
        (0.0, 0.0, "judged"),
        (0.0, 1.0, "judged"),
        (1.0, 0.0, "judged"),
    ]
    assert facts(run) == facts(rolled_out(new, tmp_path / "new", runtime))
    for name, session in before.items():
        first, second = session_rows(run, name)
        assert (first, second.revision) == (session, 1)
        assert (first.reward, second.reward) == told[name][:2]
        assert (run / "logs" / second.evidence["log"]).is_file()
    opened = rolltap.open_run(run)
    assert opened.verify(progress=False).findings == []
    rewards = opened.traces().batch().rewards
    assert {name: given.reward for name, given in rewards.items()} == {
        name: told[name][1] for name in before
    }
    status, said = judge(run, "--tasks", new, *chosen)
    assert (status, said) == (0, "3 sessions: 3 left; no reward changed\n")


def test_a_judging_that_is_killed_goes_on_where_it_was(tmp_path, run):
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "shut").touch()
    asked, shut, gate = (tmp_path / name for name in ("asked", "shut", "gate"))
    waits = (
        f"echo >> {asked}; if [ -e {shut} ] && [ $(wc -l < {asked}) = 2 ]; then cat {gate}; fi;"
        f" {RIGHT}"
    )
    new = write_tasks(tmp_path, waits)
    judging = [ROLLTAP, "judge", run, "--tasks", new, "--concurrency", "1"]
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(
        judging, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
    )
    with gate.open("w"):  # returns when the second judge reads
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert sorted(session.revision for session in load_sessions(run).values()) == [0, 0, 1]
    shut.unlink()
    ended = run_rolltap("judge", run, "--tasks", new, env=env)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert "3 sessions: 2 judged, 1 left; " in ended.stdout
    assert asked.read_text().count("\n") == 4
    assert [session.revision for session in load_sessions(run).values()] == [1, 1, 1]
    assert sorted(session.reward for session in load_sessions(run).values()) == [0.0, 0.0, 1.0]
    assert rolltap.open_run(run).verify(progress=False).findings == []


def test_sessions_that_cannot_be_judged_again_say_why_and_stay_as_they_are(tmp_path, run):
    tasks = write_tasks(tmp_path, WRONG)
    first, second, third = before = load_sessions(run)
    (run / "logs" / f"{first}.changes.json.gz").unlink()
    (run / "logs" / f"{second}.changes.json.gz").write_bytes(b"x")
    rolltap.open_run(run).reward(third, 0.25, change=True)
    status, told = judge(run, "--tasks", tasks)
    assert status == 1
    assert (
        f"{first}: refused: the agent's changes were not kept: there is no"
        f" {run}/logs/{first}.changes.json.gz" in told
    )
    assert f"{second}: refused: {run}/logs/{second}.changes.json.gz is damaged" in told
    assert "3 sessions: 1 left, 2 refused; no reward changed" in told
    (found,) = judge_again(run, tasks, only=[third], progress=False)
    assert (found["result"], found["why"]) == ("left", "its reward was given by rolltap reward")
    assert {name: session.revision for name, session in load_sessions(run).items()} == {
        **dict.fromkeys(before, 0),
        third: 1,
    }


def test_wrong_tasks_and_runtimes_are_refused_by_name(tmp_path, run):
    tasks = write_tasks(tmp_path, WRONG)
    for given, words in [
        ({"id": "other"}, "refused: these tasks have no task 't' that can be judged here"),
        (
            {"files": {"more.txt": "start/notes.txt"}},
            "its task starts with other files than the session",
        ),
        ({"judge": {"kind": "python", "function": "no_module:f"}}, "task t, judge.function"),
    ]:
        status, told = judge(run, "--tasks", write_tasks(tmp_path, RIGHT, **given))
        assert status == 1
        assert words in told
    assert "has no session" in judge(run, "--tasks", tasks, "--session", "nobody")[1]
    own = ProcessRuntime()
    own.name = "other"
    found = asyncio.run(
        rejudge(run, rolltap.load_tasks(tasks), own, only=[], concurrency=1, progress=False)
    )
    assert {each["why"] for each in found} == {
        "it ran in the runtime process, and is judged in that one alone: use --runtime process"
    }
    assert {session.revision for session in load_sessions(run).values()} == {0}


def test_a_session_without_a_verdict_is_unjudged_and_judged_by_the_next_call(tmp_path, run):
    tasks = write_tasks(tmp_path, f"test -e {tmp_path}/ready || kill -9 $$; {RIGHT}")
    name, *others = load_sessions(run)
    status, told = judge(run, "--tasks", tasks, "--session", name)
    assert status == 1
    assert f"{name}: unjudged: the judge was ended by signal 9" in told
    session = load_sessions(run)[name]
    assert (session.status, session.reward, session.evidence["ended"]) == (
        "unjudged",
        None,
        "completed",
    )
    (tmp_path / "ready").touch()
    assert judge(run, "--tasks", tasks, "--session", name)[0] == 0
    sessions = load_sessions(run)
    session = sessions[name]
    assert (session.status, session.reward, session.error, session.revision) == (
        "completed",
        1.0,
        None,
        2,
    )
    assert {sessions[other].revision for other in others} == {0}
