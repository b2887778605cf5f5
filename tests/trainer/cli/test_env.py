import json
import subprocess
import sys

import pytest

from rolltap.trainer.doctor.scripted_engine import Say
from tests.recorder_process import Recorder
from tests.trainer.cli.program import ASK, rolltap


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("hidden\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def mitmdump(scripted_engine, tokenizer_folder, tmp_path, secret_file):
    """Start a recorder with a secret, as another user would."""
    recorder = Recorder(tmp_path, scripted_engine.url, tokenizer_folder, f"rolltap_secret_file={secret_file}")
    yield recorder
    recorder.stop()


@pytest.mark.parametrize("form", ["shell", "docker", "json"])
def test_env_prints_what_a_program_needs_to_be_recorded(scripted_engine, mitmdump, secret_file, tmp_path, form):
    scripted_engine.replies.append(Say("Hi."))
    ca = tmp_path / "conf" / "mitmproxy-ca-cert.pem"
    options = ("--session", "s 1", "--engine", scripted_engine.url, "--ca", ca, "--format", form)
    proxy = ("--proxy", f"http://{mitmdump.address}", "--secret-file", secret_file)
    printed = rolltap("env", *proxy, "--harness", "claude-code", *options)
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
