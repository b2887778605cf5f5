"""The `rolltap` command as a program: what it prints, how it ends and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, Session, VersionSpan
from rolltap.addons.store.tables import RunWriter, read_rows
from rolltap.trainer.traces.reader import load_calls, load_sessions
from tests.addons.test_record import Recorder
from tests.scripted_engine import Say

ROLLTAP = Path(sys.executable).with_name("rolltap")
HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
ASK = f"""
import httpx, sys
reply = httpx.post("https://api.openai.com/v1/chat/completions", json={HELLO!r}, timeout=60)
print(reply.json()["choices"][0]["message"]["content"])
sys.exit(3)
"""


def rolltap(*arguments, **kwargs):
    command = [ROLLTAP, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def running(marker):
    """Processes with `marker` on their command line."""
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


def test_the_addons_path_is_a_script_that_mitmdump_can_load():
    assert "addons = " in Path(rolltap("addon").stdout.strip()).read_text()


def test_record_runs_a_command_and_ends_with_its_status(scripted_engine, tiny_model, tmp_path):
    scripted_engine.replies.append(Say("Hi."))
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tiny_model)
    ended = rolltap("record", *options, "--", sys.executable, "-c", ASK)
    assert (ended.returncode, ended.stdout) == (3, "Hi.\n")
    (session,) = load_sessions(tmp_path / "run").values()
    assert (session.status, session.exit_status, session.harness) == ("failed", 3, sys.executable)
    assert list(load_calls(tmp_path / "run")) == [session.session_id]


def test_record_starts_a_harness_by_its_preset_and_the_users_variables_win(scripted_engine, tiny_model, tmp_path):
    show = "import os, sys; print(sys.argv[1:], os.environ['WINDOW'], os.environ['KEY'], 'HTTPS_PROXY' in os.environ)"
    (tmp_path / "x.toml").write_text(
        f'name = "x"\nversion = "1"\nprogram = "{sys.executable}"\narguments = ["-c", "{show}", "--always"]\n'
        'headless = ["{instruction}"]\n[env]\nWINDOW = "{max_model_len}"\nKEY = "placeholder"\n'
    )
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tiny_model)
    ended = rolltap(
        "record", *options, "--harness", tmp_path / "x.toml", "--", "-p", "go", env={**os.environ, "KEY": "mine"}
    )
    assert (ended.returncode, ended.stdout) == (0, "['--always', '-p', 'go'] 8192 mine True\n")
    (session,) = load_sessions(tmp_path / "run").values()
    assert (session.status, session.harness) == ("completed", "x")


@pytest.fixture
def mitmdump(scripted_engine, tiny_model, tmp_path):
    """A recorder that somebody else started, with a secret."""
    recorder = Recorder(tmp_path, scripted_engine.url, tiny_model, env={"ROLLTAP_SECRET": "hidden"})
    yield recorder
    recorder.stop()


@pytest.mark.parametrize("form", ["shell", "docker", "json"])
def test_env_prints_what_a_program_needs_to_be_recorded(scripted_engine, mitmdump, tmp_path, form):
    scripted_engine.replies.append(Say("Hi."))
    ca = tmp_path / "conf" / "mitmproxy-ca-cert.pem"
    options = ("--session", "s 1", "--engine", scripted_engine.url, "--ca", ca, "--format", form)
    secret = {**os.environ, "ROLLTAP_SECRET": "hidden"}
    printed = rolltap("env", "--proxy", f"http://{mitmdump.address}", "--harness", "claude-code", *options, env=secret)
    assert printed.returncode == 0
    assert "start it as: claude\n" in printed.stderr
    assert str(ca.with_name("rolltap-ca-bundle.pem")) in printed.stderr
    show = "import os; print(os.environ['CLAUDE_CODE_MAX_CONTEXT_TOKENS'])"
    command, env = [sys.executable, "-c", show + ASK], {}
    if form == "shell":
        command = ["sh", "-c", 'eval "$0"; exec "$@"', printed.stdout, *command]
    elif form == "docker":
        env = dict(line.split("=", 1) for line in printed.stdout.splitlines())
    else:
        env = json.loads(printed.stdout)
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("8192\nHi.\n", 3), ended.stderr
    assert [call["session_id"] for call in mitmdump.rows("calls")] == ["s 1"]


def test_rollout_records_every_session_and_prints_the_summary_as_json(
    scripted_engine, tiny_model, tmp_path, tasks, preset
):
    scripted_engine.otherwise = lambda request: Say("0.5")
    harness = preset([sys.executable, "-c", ASK.replace("print(", "open('answer.txt', 'w').write(")])
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tiny_model, "--json")
    ended = rolltap("rollout", tasks, "--harness", harness, "-n", 3, *options)
    assert ended.returncode == 0
    summary = json.loads(ended.stdout)
    assert summary["sessions"] == {"failed": 3}
    assert summary["calls"] == {"completed": 3}
    assert summary["steps"][0]["mean_reward"] == 0.5
    ledger = summary["ledger"]
    assert ledger["sampled"] == ledger["trained"] > 0
    sessions = load_sessions(tmp_path / "run").values()
    assert len({session.group_id for session in sessions}) == 1
    assert {session.session_id for session in sessions} == set(load_calls(tmp_path / "run"))


def test_a_harness_that_takes_too_long_is_data(scripted_engine, tiny_model, tmp_path, tasks, preset):
    options = ("--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tiny_model)
    harness = preset(["sleep", "600"])
    assert rolltap("rollout", tasks, "--harness", harness, "-n", 1, "--timeout", 0.1, *options).returncode == 0
    (session,) = load_sessions(tmp_path / "run").values()
    assert (session.status, session.exit_status, session.error) == ("timeout", None, "stopped after 0.1 s")
    assert session.reward == 0.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_leaves_no_process_and_a_readable_run(scripted_engine, tiny_model, tmp_path, tasks, preset, number):
    marker = str(tmp_path)
    os.mkfifo(tmp_path / "started")
    harness = preset(["sh", "-c", f"sleep 600 & echo {marker} > {tmp_path}/started; wait"])
    options = ["--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tiny_model]
    command = [ROLLTAP, "rollout", tasks, "--harness", harness, "-n", "1", *options]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs inherit it ignored
    )
    (tmp_path / "started").read_text()
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert running(marker) == []
    assert list(read_rows(tmp_path / "run", "calls")) == []


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["inspect", "/nowhere"], "/nowhere is not a run folder"),
            (["record", "--out", "x", "--model", "m", "--", "no-such-harness"], "'no-such-harness' is not on the PATH"),
            (["record", "--out", "x", "--model", "m", "--set", "a", "--", "true"], "--set a: write it as NAME=VALUE"),
            (
                ["record", "--out", "x", "--model", "m", "--harness", "clod"],
                "no harness is named 'clod': choose",
            ),
            (["env", "--proxy", "127.0.0.1:8080"], "--proxy 127.0.0.1:8080: write it as http://HOST:PORT"),
            (["env", "--proxy", "http://h:1", "--ca", "none.pem"], "the recorder makes it when it first starts"),
            (["serve", "m", "--vllm", "no-such-vllm"], "'no-such-vllm' is not on the PATH"),
        ],
    )
    def test_a_users_mistake_is_a_message_and_status_1(self, arguments, message, tmp_path):
        ended = rolltap(*arguments, cwd=tmp_path)
        assert ended.returncode == 1
        assert message in " ".join(ended.stderr.split())
        assert "Traceback" not in ended.stderr

    def test_a_file_that_cannot_be_read_is_a_message_and_status_1(self, tmp_path):
        write_metadata(tmp_path, {})
        (tmp_path / "calls-0.arrow").mkdir()
        ended = rolltap("inspect", tmp_path)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert "calls-0.arrow" in ended.stderr
        assert "Traceback" not in ended.stderr

    def test_a_recorder_that_does_not_start_says_why(self, tmp_path):
        ended = rolltap("record", "--out", tmp_path / "run", "--model", tmp_path / "none", "--", "true")
        assert ended.returncode == 1
        assert "the recorder did not start" in ended.stderr
        assert "cannot load a tokenizer" in " ".join(ended.stderr.split())
        assert "Traceback" not in ended.stderr

    def test_an_unknown_option_is_status_2(self):
        assert rolltap("inspect", "--nonsense").returncode == 2

    def test_nothing_to_record_is_status_2(self):
        ended = rolltap("record", "--out", "x", "--model", "m")
        assert ended.returncode == 2
        assert "give a COMMAND after --, or --harness" in ended.stderr

    def test_a_finished_training_is_not_overwritten(self, tmp_path):
        (tmp_path / "run" / "model").mkdir(parents=True)
        (tmp_path / "r.toml").write_text("")
        ended = rolltap("train", tmp_path / "r.toml", "--out", tmp_path / "run")
        assert ended.returncode == 1
        assert "holds a finished training" in " ".join(ended.stderr.split())


def test_inspect_shows_rewards_and_the_ledger(tmp_path):
    write_metadata(tmp_path, {})
    writer = RunWriter(tmp_path)
    for i, reward in enumerate([0.0, 1.0, None]):
        writer.add_call(Call(f"s{i}", f"c{i}", [1], [2, 3], [-0.5, -0.5], [VersionSpan("4", 0, 2)]))
        writer.add_session(Session(f"s{i}", "t", "g", "h", "completed", 0, reward, policy_version="4"))
    writer.close()
    summary = json.loads(rolltap("inspect", tmp_path, "--json").stdout)
    assert summary["ledger"] == {"sampled": 6, "trained": 4, "left_out": {"no_reward": 2}}
    assert summary["steps"] == [{"policy_version": "4", "sessions": 3, "mean_reward": 0.5, "best_reward": 1.0}]
    table = rolltap("inspect", tmp_path).stdout
    assert "left out: no_reward" in table
    assert "0.500" in table


def test_without_the_extras_the_commands_for_run_folders_are_there():
    """The base install has no proxy, no torch and no vLLM."""
    extras = ["aiohttp", "orjson", "mitmproxy", "renderers", "transformers", "torch", "trl", "peft", "matplotlib"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({extras}))  # importing one of them fails
from rolltap.trainer.cli import rolltap
from rolltap.trainer.exports import atif
from rolltap.trainer.exports import hub
from rolltap.trainer.exports import messages
from rolltap.trainer.exports import openenv
from rolltap.trainer.exports import parquet
from rolltap.trainer.exports import trace_dataset
rolltap(["--help"])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "verify" in shown.stdout
