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
WRONG = "grep -q bad answer.txt"
RIGHT = "grep -q good answer.txt && test -x answer.txt && test $(ls *.txt | wc -l) = 1"
TEST = "def test(): assert 'good' in open('answer.txt').read()\n"


def write_tasks(folder, script, **fields):
    """Write the tasks whose judge is a shell's script, and return the path of the file."""
    (folder / "start").mkdir(exist_ok=True)
    (folder / "start" / "notes.txt").write_text(TEST)
    (folder / "start" / "test_it.py").write_text(TEST)
    task = {"id": "t", "instruction": "Say it.", "workspace": "start", "judge": shell(script)}
    path = folder / f"tasks-{len(list(folder.iterdir()))}.jsonl"
    path.write_text(json.dumps(task | fields))
    return path


@pytest.fixture(scope="module")
def rolled_out(tmp_path_factory, tokenizer, tokenizer_folder):
    """Return a function that rolls out tasks, one session for each answer, and returns the run."""
    harness = tmp_path_factory.mktemp("harness") / "harness.toml"
    harness.write_text(
        f'name = "small"\nversion = "1"\nprogram = "{sys.executable}"\n'
        f"headless = {json.dumps(['-c', AGENT])}\n"
    )
    with ScriptedEngine(tokenizer) as engine:
        how = ["--harness", harness, "--engine", engine.url, "--model", tokenizer_folder]
        how += ["-n", len(ANSWERS), "--concurrency", 1]

        def rolled_out(tasks, run, runtime="process"):
            engine.replies.extend(map(Say, ANSWERS))
            ended = run_rolltap("rollout", tasks, *how, "--out", run, "--runtime", runtime)
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
    found = []
    for session in load_sessions(run).values():
        evidence = dict(session.evidence, reward_from=None, log=None)
        why = (session.error, session.suspicions, session.task_digest)
        found.append((json.dumps(evidence), session.reward, session.status, *why))
    return sorted(found)


def judge(*arguments):
    """Run the command here, and return its exit status and all that it says."""
    ended = CliRunner().invoke(command, ["judge", *map(str, arguments)])
    return ended.exit_code, ended.stdout or str(ended.exception)


def revisions(run):
    return [session.revision for session in load_sessions(run).values()]


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
    told = {each["session"]: each for each in json.loads(said)}
    changes = sorted((each["before"], each["reward"]) for each in told.values())
    assert changes == [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0)]
    assert facts(run) == facts(rolled_out(new, tmp_path / "new", runtime))
    opened = rolltap.open_run(run)
    rewards = opened.traces().batch().rewards
    for name, session in before.items():
        first, second = session_rows(run, name)
        assert first == session
        assert second.revision == 1
        assert told[name]["result"] == "judged"
        assert told[name]["before"] == first.reward
        assert told[name]["reward"] == second.reward == rewards[name].reward
        assert (run / "logs" / second.evidence["log"]).is_file()
    assert opened.verify(progress=False).findings == []
    again = judge(run, "--tasks", new, *chosen)
    assert again == (0, "3 sessions: 3 left; no reward changed\n")


def test_a_judging_that_is_killed_goes_on_where_it_was(tmp_path, run):
    asked, shut, gate, tmp = (tmp_path / name for name in ("asked", "shut", "gate", "tmp"))
    os.mkfifo(gate)
    shut.touch()
    tmp.mkdir()
    is_second = f"[ -e {shut} ] && [ $(wc -l < {asked}) = 2 ]"
    new = write_tasks(tmp_path, f"echo >> {asked}; if {is_second}; then cat {gate}; fi; {RIGHT}")
    line = ["judge", run, "--tasks", new]
    env = {**os.environ, "TMPDIR": str(tmp)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([ROLLTAP, *line, "--concurrency", "1"], env=env, **quiet)
    with gate.open("w"):  # returns when the second judge reads
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert sorted(revisions(run)) == [0, 0, 1]
    shut.unlink()
    ended = run_rolltap(*line, env=env)
    assert list(tmp.iterdir()) == []
    assert "3 sessions: 2 judged, 1 left; " in ended.stdout
    assert asked.read_text().count("\n") == 4
    assert revisions(run) == [1, 1, 1]
    assert sorted(session.reward for session in load_sessions(run).values()) == [0.0, 0.0, 1.0]
    assert rolltap.open_run(run).verify(progress=False).findings == []


def test_sessions_that_cannot_be_judged_again_say_why_and_stay_as_they_are(tmp_path, run):
    tasks = write_tasks(tmp_path, WRONG)
    first, second, third = load_sessions(run)
    unkept = run / "logs" / f"{first}.changes.json.gz"
    unkept.unlink()
    damaged = run / "logs" / f"{second}.changes.json.gz"
    damaged.write_bytes(b"x")
    rolltap.open_run(run).reward(third, 0.25, change=True)
    status, told = judge(run, "--tasks", tasks)
    assert status == 1
    why = f"{first}: refused: the agent's changes were not kept: there is no {unkept}"
    assert why in told
    assert f"{second}: refused: {damaged} is damaged" in told
    assert "3 sessions: 1 left, 2 refused; no reward changed" in told
    (found,) = judge_again(run, tasks, only=[third], progress=False)
    assert found["result"] == "left"
    assert found["why"] == "its reward was given by rolltap reward"
    assert revisions(run) == [0, 0, 1]


OTHERS = [
    ({"id": "other"}, "refused: these tasks have no task 't' that can be judged here"),
    ({"files": {"more.txt": "start/notes.txt"}}, "task starts with other files than the session"),
    ({"judge": {"kind": "python", "function": "no_module:f"}}, "task t, judge.function"),
]


@pytest.mark.parametrize(("fields", "words"), OTHERS)
def test_wrong_tasks_are_refused_by_name(tmp_path, run, fields, words):
    status, told = judge(run, "--tasks", write_tasks(tmp_path, RIGHT, **fields))
    assert status == 1
    assert words in told
    assert revisions(run) == [0, 0, 0]


def test_an_unknown_session_and_another_runtime_are_refused_by_name(tmp_path, run):
    tasks = write_tasks(tmp_path, WRONG)
    assert "has no session" in judge(run, "--tasks", tasks, "--session", "nobody")[1]
    other = ProcessRuntime()
    other.name = "other"
    how = {"only": [], "concurrency": 1, "progress": False}
    found = asyncio.run(rejudge(run, rolltap.load_tasks(tasks), other, **how))
    why = "it ran in the runtime process, and is judged in that one alone: use --runtime process"
    assert {each["why"] for each in found} == {why}
    assert revisions(run) == [0, 0, 0]


def test_a_session_without_a_verdict_is_unjudged_and_judged_by_the_next_call(tmp_path, run):
    tasks = write_tasks(tmp_path, f"test -e {tmp_path}/ready || kill -9 $$; {RIGHT}")
    name, *_ = load_sessions(run)
    line = [run, "--tasks", tasks, "--session", name]
    status, told = judge(*line)
    assert status == 1
    assert f"{name}: unjudged: the judge was ended by signal 9" in told
    session = load_sessions(run)[name]
    assert session.status == "unjudged"
    assert session.reward is None
    assert session.evidence["ended"] == "completed"
    (tmp_path / "ready").touch()
    assert judge(*line)[0] == 0
    session = load_sessions(run)[name]
    assert session.status == "completed"
    assert session.reward == 1.0
    assert session.error is None
    assert revisions(run) == [2, 0, 0]
