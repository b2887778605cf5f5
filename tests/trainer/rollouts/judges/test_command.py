import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from rolltap.trainer.rollouts.judges.command import judge_here
from rolltap.trainer.rollouts.runtimes.runtime import BoxSpec, Ended
from tests.trainer.rollouts.judges.sessions import Left, shell


@pytest.mark.parametrize(
    ("script", "result", "reward", "why"),
    [
        ("exit 0", None, 1.0, None),
        ("exit 1", None, 0.0, None),
        ("echo 0.25", None, 0.25, None),
        ("echo 0.5; exit 1", None, 0.5, None),
        ("printf '\\377\\n0.5'", None, 0.5, None),
        ("cat a.txt", None, 7.0, None),
        ("echo 'score: 0.3'", None, None, "'score: 0.3', is not one finite number"),
        ("exit 2", None, None, "ended with status 2, and only 0 and 1 are a verdict"),
        ("no-such-program", None, None, "'sh', or a program in it, is not there"),
        ("kill -9 $$", None, None, "ended by signal 9"),
        ("echo 1e300", None, None, "rewards are between -1,000,000 and 1,000,000"),
        ("echo 0.5 > $ROLLTAP_REWARD; echo 1; exit 1", "number", 0.5, None),
        ('echo \'{"reward": 0.5, "parts": {"a": 1}}\' > $ROLLTAP_REWARD', "number", 0.5, None),
        ("echo 0.5 > $ROLLTAP_REWARD; exit 3", "number", None, "ended with status 3"),
        ("echo x > $ROLLTAP_REWARD", "number", None, "'x' is not one number"),
        ("yes | head -c 70000 > $ROLLTAP_REWARD", "number", None, "more than 64 KiB"),
        ("echo 0.3 | tee $ROLLTAP_REWARD; exit 1", "status", 0.0, None),
    ],
)
async def test_the_reward_is_a_number_or_json_or_the_exit_status_and_all_else_is_unjudged(
    tmp_path, script, result, reward, why
):
    judged = await Left(tmp_path, {"a.txt": "7"}, did={"b.txt": "made"}).judge(shell(script, result=result))
    assert judged.reward == reward
    assert judged.unjudged is None if why is None else why in judged.unjudged


@pytest.mark.parametrize("program", ["no-such-evaluator", "/dev/null"])
async def test_a_judge_that_cannot_be_started_is_unjudged(tmp_path, program):
    judged = await Left(tmp_path, {}, did={"a.txt": "made"}).judge({"kind": "command", "command": [program]})
    assert f"the judge {program!r} could not be started" in judged.unjudged


@pytest.mark.parametrize(
    ("code", "reward"),
    [("import nosuch", None), ("import calc; calc.add", 0.0), ("import answer", 0.0), ("assert not 1", 0.0)],
)
async def test_a_judge_that_breaks_in_python_has_no_verdict_unless_the_agent_broke_it(tmp_path, code, reward):
    left = Left(tmp_path, {"calc.py": "add = 1"}, did={"calc.py": "ad = 1"})
    spec = {"kind": "command", "command": [sys.executable, "-c", code]}
    assert (await left.judge(spec, "Write the module answer.")).reward == reward


async def test_a_time_limit_is_unjudged_when_the_start_takes_as_long(tmp_path):
    judged = await Left(tmp_path, {}, did={"a.txt": "made"}).judge(shell("exec sleep 600", timeout=0.2))
    assert judged.unjudged == (
        "the judge took more than 0.2 s; its output is in t-0.judge.log; on the untouched start: "
        "the judge took more than 0.2 s; its output is in t-0.start.judge.log"
    )


async def test_the_environment_is_clean_and_has_the_judges_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    script = 'test -z "$SECRET_KEY" && test "$A" = b && test -z "$(ls -A $HOME)"'
    left = Left(tmp_path, {})
    (left.home / ".profile").write_text("planted")
    assert (await left.judge(shell(script, env={"A": "b"}))).reward == 1.0


async def test_only_what_paths_name_is_applied_and_never_what_is_protected(tmp_path):
    left = Left(tmp_path, {"src/a": "old", "b": "old", "src/c": "old"})
    left.do({"src/a": "new", "b": "new", "src/c": "new", "src/d": "new"})
    judged = await left.judge(shell("cat src/a b src/c src/d; exit 0", paths=["src/**"], protect=["**/c"]))
    assert left.log == "newoldoldnew"
    assert judged.evidence["refused"] == ["b: protected", "src/c: protected"]


async def test_a_judge_of_the_session_sees_the_agents_own_folders(tmp_path):
    left = Left(tmp_path, {"a.txt": "old", "check.sh": "exit 0"}, did={"a.txt": "new"})
    os.mkfifo(left.workspace / "fifo")
    (left.home / "note").write_text("in the home")
    write = tmp_path / "tests/check.sh"
    write.parent.mkdir()
    write.write_text('cat a.txt "$HOME/note"; test -p fifo; echo 0.75 > "$ROLLTAP_REWARD"')

    spec = shell(". ./check.sh", where="session", tests=str(write.parent), result="number")
    async with left.runtime.box(BoxSpec(name="s", workspace=left.workspace, workdir="/w", home=left.home)) as box:
        with patch.object(type(box), "settle", autospec=True, side_effect=type(box).settle) as settle:
            judged = await left.judge(spec, session_box=box)
    assert (judged.reward, settle.call_count) == (0.75, 1), left.log
    assert left.log == "newin the home"
    assert (await left.judge(spec)).unjudged == "the session's box is gone, and its judge asks for it"


class Mounted:
    """A runtime that has paths of its own: what is written in the box is written to its mounts."""

    name, isolated = "mounted", True
    workdir, home, proxy = "/workspace", "/root", None

    def __init__(self, files):
        self.files = files

    @asynccontextmanager
    async def box(self, spec):
        self.spec = spec
        yield self

    async def run(self, command, *, env, timeout, log):
        log.write_bytes(b"")
        for name, text in self.files.items():
            mount = next(mount for mount in self.spec.mounts if name.startswith(mount.target + "/"))
            assert mount.writable
            (mount.source / name.removeprefix(mount.target + "/")).write_text(text)
        return Ended(7)


@pytest.mark.parametrize(("text", "reward"), [("0.5\n", 0.5), ('{"reward": 0.25}', 0.25), (None, None), ("pass", None)])
async def test_a_reward_file_is_read_from_a_writable_folder_whatever_the_status(tmp_path, text, reward):
    name = "/logs/verifier/reward.txt"
    left = Left(tmp_path, {}, Mounted({name: text} if text is not None else {}))
    (tmp_path / "tests").mkdir()
    mounts = {"/tests": str(tmp_path / "tests")}
    judged = await left.judge(shell("x", reward_file=name, mounts=mounts, writable=["/logs/verifier"]))
    assert judged.reward == reward
    mounts = {mount.target: (mount.source, mount.writable) for mount in left.runtime.spec.mounts}
    assert mounts["/tests"] == (tmp_path / "tests", False)
    assert left.runtime.spec.proxy is None


async def test_nothing_of_the_judging_is_left(tmp_path):
    deep = "import os\nfor i in range(1500):\n    os.mkdir('d' * 9)\n    os.chdir('d' * 9)\n"
    left = Left(tmp_path, {}, did={"deep.py": deep})
    await left.judge(shell("python3 deep.py; mkdir closed; chmod 0 closed"))
    assert sorted(path.name for path in Path(left.workspace.parent).iterdir()) == ["home", "workspace"]


@pytest.fixture
def judge(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda command: judge_here(command, tmp_path / "logs" / "s.evaluate.log")


def test_a_verdict_is_a_status_a_number_or_json(judge):
    judged = judge("""echo '{"reward": 0.5, "parts": {"speed": 1}}'""")
    assert (judged.reward, judged.parts, judged.evidence["log"]) == (0.5, {"speed": 1.0}, "s.evaluate.log")
    assert judge("sh -c 'echo 5 passed; exit 1'").reward == 0.0
    assert judge("sh -c 'echo many words; echo 0.25'").reward == 0.25


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo score: 0.3", "score: 0.3"),
        ("python3 -c '1 / 0'", "ZeroDivisionError: division by zero"),
        ("sh -c 'kill -9 $$'", "status -9"),
        ("no-such-program", "No such file"),
        ("'", "is no command"),
        ("", "is no command"),
    ],
)
def test_all_else_is_no_verdict(judge, command, why):
    judged = judge(command)
    assert (judged.reward, why in judged.unjudged) == (None, True), judged.unjudged


def test_what_it_leaves_running_ends_with_it(judge, tmp_path):
    judged = judge("sh -c 'setsid sleep 1000 & echo $! > pid; echo 1'")
    assert judged.reward == 1.0
    pid = (tmp_path / "pid").read_text().strip()
    with pytest.raises(FileNotFoundError):
        Path(f"/proc/{pid}/stat").read_text()
