"""One task file gives the same rows wherever its sessions run, but for names and times."""

import json

import psutil
import pytest

from rolltap.addons.store.tables import read_rows
from tests.boxes import sandboxed
from tests.machines import SshMachine
from tests.scripted_engine import Say
from tests.trainer.cli.program import HELLO, run_rolltap

AGENT = f"""
import json, urllib.request
request = urllib.request.Request(
    "https://api.openai.com/v1/chat/completions",
    json.dumps({HELLO!r}).encode(),
    {{"content-type": "application/json"}},
)
reply = json.load(urllib.request.urlopen(request))
open("answer.txt", "w").write(reply["choices"][0]["message"]["content"])
open("given.txt", "a").write("more")
"""
JUDGE = "cat given.txt; cat answer.txt > $ROLLTAP_REWARD_FILE"
NAMES = {"session_id", "call_id", "parent_id", "group_id", "digest"}
TIMES = {"at", "started_at", "finished_at", "first_token_at"}
PLACES = {"runtime", "key", "program_digest"}
"""Columns that say where a session ran. Only a program of this machine has a digest."""
LEFT_OUT = NAMES | TIMES | PLACES


@pytest.fixture
def arguments(scripted_engine, tokenizer_folder, tmp_path):
    """Arguments of a rollout of two sessions, but for its run folder and the place of its
    sessions."""
    scripted_engine.otherwise = lambda request: Say("0.5")
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "given.txt").write_text("given, ")
    judge = {"kind": "command", "command": ["sh", "-c", JUDGE], "result": "number"}
    task = {
        "id": "t",
        "instruction": "Say it.",
        "judge": {**judge, "paths": ["answer.txt"]},
        "workspace": str(tmp_path / "start"),
    }
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(task))
    harness = tmp_path / "harness.toml"
    harness.write_text(
        'name = "x"\nversion = "1"\nprogram = "/usr/bin/python3"\n'
        f"headless = {json.dumps(['-c', AGENT])}\n"
    )
    engine = ["--engine", scripted_engine.url, "--model", tokenizer_folder]
    return ["rollout", tasks, "--harness", harness, "-n", 2, *engine]


def rows(run):
    """Return the rows of a run's tables and its logs, without names and times."""
    found = {}
    sessions = sorted(row["session_id"] for row in read_rows(run, "sessions"))
    for table in ("sessions", "calls", "events"):
        found[table] = []
        for row in read_rows(run, table):
            if str(row.get("detail")).startswith("{"):
                row["detail"] = compared(json.loads(row["detail"]))
            text = json.dumps(compared(row), sort_keys=True, default=str)
            found[table].append(text.replace(row["session_id"], "SESSION"))
        found[table].sort()
    for suffix in (".log", ".diff", ".judge.log"):
        logs = [run / "logs" / f"{session}{suffix}" for session in sessions]
        found[suffix] = [log.read_text() for log in logs]
    return found


def compared(row):
    kept = {}
    for key, value in row.items():
        if key not in LEFT_OUT and not key.endswith("_seconds"):
            kept[key] = value
    return kept


def behind_ssh(folder):
    """Return the options of a rollout whose sessions run on a machine of the tests."""
    options = ["--runtime", "ssh"]
    for key, value in SshMachine(folder / "machine").keys().items():
        if key == "ssh_arguments":
            options += [f"--ssh-argument={argument}" for argument in value]
        else:
            options += [f"--{key.replace('_', '-')}", value]
    return options


@sandboxed
def test_sessions_behind_ssh_have_the_rows_of_sessions_here(arguments, tmp_path):
    here = run_rolltap(*arguments, "--out", tmp_path / "here", "--runtime", "sandbox")
    assert here.returncode == 0, here.stderr
    options = behind_ssh(tmp_path)
    there = run_rolltap(*arguments, "--out", tmp_path / "there", *options)
    assert there.returncode == 0, there.stderr
    expected = rows(tmp_path / "here")
    assert [json.loads(row)["reward"] for row in expected["sessions"]] == [0.5, 0.5]
    assert expected[".judge.log"] == ["given, ", "given, "]
    assert "answer.txt" in expected[".diff"][0]
    assert rows(tmp_path / "there") == expected


@sandboxed
@pytest.mark.deep
def test_a_session_whose_connection_was_lost_is_tried_again(arguments, tmp_path, scripted_engine):
    killed = []

    def answer(request):
        if not killed:
            for process in psutil.Process().children(recursive=True):
                if process.name() == "sshd":
                    process.kill()
                    killed.append(process)
        return Say("0.5")

    scripted_engine.otherwise = answer
    run = tmp_path / "run"
    ended = run_rolltap(*arguments, "-n", 1, "--out", run, *behind_ssh(tmp_path))
    assert ended.returncode == 0, ended.stderr
    lost, completed = sorted(read_rows(run, "sessions"), key=lambda row: row["session_id"])
    assert lost["status"] == "infrastructure"
    assert completed["status"] == "completed"
    assert "the session could not be run: the connection to the machine" in lost["error"]
