import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.addons.store.tables import read_rows
from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from tests.trainer.cli.program import ASK, ROLLTAP, rolltap


def running(marker):
    """Return the processes with `marker` on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if marker in command:
            found.append(command)
    return found


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "t", "instruction": "Say it.", "evaluate": ["sh", "-c", "cat answer.txt"]}))
    return path


@pytest.fixture
def preset(tmp_path):
    def preset(command):
        path = tmp_path / "harness.toml"
        program, *headless = map(json.dumps, command)
        path.write_text(f'name = "x"\nversion = "1"\nprogram = {program}\nheadless = [{", ".join(headless)}]\n')
        return path

    return preset


def test_rollout_records_every_session_and_prints_the_summary_as_json(
    scripted_engine, tokenizer_folder, tmp_path, tasks, preset
):
    scripted_engine.otherwise = lambda request: Say("0.5")
    harness = preset([sys.executable, "-c", ASK.replace("print(", "open('answer.txt', 'w').write(")])
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder, "--json")
    ended = rolltap("rollout", tasks, "--harness", harness, "-n", 3, "--recorders", 2, *options)
    assert ended.returncode == 0
    summary = json.loads(ended.stdout)
    assert summary["sessions"] == {"failed": 3}
    assert summary["calls"] == {"completed": 3}
    assert summary["steps"][0]["mean_reward"] == 0.5
    ledger = summary["ledger"]
    assert ledger["sampled"] == ledger["trained"] > 0
    sessions = load_sessions(tmp_path / "run").values()
    assert len({session.group_id for session in sessions}) == 1
    assert {session.session_id for session in sessions} == set(RecordedCalls(tmp_path / "run"))


def test_a_harness_that_takes_too_long_is_data(scripted_engine, tokenizer_folder, tmp_path, tasks, preset):
    scripted_engine.otherwise = lambda request: Say("0.5")
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    harness = preset([sys.executable, "-c", ASK.replace("sys.exit(3)", "import time; time.sleep(600)")])
    assert rolltap("rollout", tasks, "--harness", harness, "-n", 1, "--timeout", 8, *options).returncode == 0
    (session,) = load_sessions(tmp_path / "run").values()
    assert (session.status, session.exit_status, session.error) == ("timeout", None, "stopped after 8 s")
    assert session.reward == 0.0


@pytest.mark.parametrize("answered", [0, 1])
def test_sessions_without_a_reward_are_counted_and_when_it_is_all_of_them_the_status_is_1(
    scripted_engine, tokenizer_folder, tmp_path, tasks, preset, answered
):
    scripted_engine.replies.extend([Say("0.5")] * answered)
    out = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    options = (*out, "--set", "rolltap_patience=0", "-n", 2, "--concurrency", 1)
    ended = rolltap("rollout", tasks, "--harness", preset([sys.executable, "-c", ASK]), *options)
    assert ended.returncode == (0 if answered else 1)
    assert f"{2 - answered} of 2 sessions have no reward" in ended.stderr
    assert f"  {2 - answered} of them: " in ended.stderr
    assert "answered 500: the script is over" in ended.stderr


def test_sessions_without_a_model_call_are_told_with_what_to_try(
    scripted_engine, tokenizer_folder, tmp_path, tasks, preset
):
    out = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder)
    ended = rolltap("rollout", tasks, "--harness", preset(["true"]), *out, "-n", 2, "--retries", 0)
    assert ended.returncode == 1
    assert "2 of 2 sessions have no reward (2 infrastructure)" in ended.stderr
    assert "  2 of them: no model call came: did the program use the proxy?" in ended.stderr
    assert "rolltap doctor -- COMMAND" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_leaves_no_process_and_a_readable_run(
    scripted_engine, tokenizer_folder, tmp_path, tasks, preset, number
):
    marker = str(tmp_path)
    os.mkfifo(tmp_path / "started")
    harness = preset(["sh", "-c", f"sleep 600 & echo {marker} > {tmp_path}/started; wait"])
    options = ["--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder]
    command = [ROLLTAP, "rollout", tasks, "--harness", harness, "-n", "1", *options]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
    )
    (tmp_path / "started").read_text()
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert running(marker) == []
    assert list(read_rows(tmp_path / "run", "calls")) == []
