import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.trainer.engine.admin import EngineAdmin
from tests.trainer.cli.program import ROLLTAP
from tests.trainer.engine import answering


@pytest.fixture
def vllm(tmp_path):
    """Return a program in place of vLLM, next to a Python executable."""
    (tmp_path / "python").symlink_to(sys.executable)
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {answering.__file__} "$@"\n')
    program.chmod(0o755)
    return program


def test_serve_prints_what_other_commands_need_to_know_of_the_key(vllm, monkeypatch):
    monkeypatch.delenv("ROLLTAP_ENGINE_KEY_FILE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [ROLLTAP, "serve", "a-model", "--vllm", vllm, "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == f"vLLM serves a-model at http://127.0.0.1:{port}\n"
        (key_file,) = re.fullmatch(r"export ROLLTAP_ENGINE_KEY_FILE=(\S+)\n", process.stderr.readline()).groups()
        EngineAdmin(f"http://127.0.0.1:{port}", key_file).require_endpoints()
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert not Path(key_file).exists()


def test_a_key_file_is_an_option_of_every_command_that_asks_the_engine(tmp_path):
    for command in ("record", "rollout", "train", "check", "serve"):
        usage = subprocess.run([ROLLTAP, command, "--help"], capture_output=True, text=True, check=True).stdout
        assert "--engine-key-file" in usage
        assert "ROLLTAP_ENGINE_KEY_FILE" in usage


def test_the_key_file_is_given_as_an_option(scripted_engine, tokenizer_folder, tmp_path):
    scripted_engine.key = "k" * 40
    (tmp_path / "engine.key").write_text(scripted_engine.key)
    ask = 'import httpx; print(httpx.get("https://api.openai.com/v1/models").json()["data"][0]["id"])'
    options = ["--out", tmp_path / "run", "--engine", scripted_engine.url, "--model", tokenizer_folder]
    options += ["--engine-key-file", tmp_path / "engine.key"]
    command = [ROLLTAP, "record", *options, "--", sys.executable, "-c", ask]
    env = {name: value for name, value in os.environ.items() if name != "ROLLTAP_ENGINE_KEY_FILE"}
    ended = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ended.stdout == "scripted\n", ended.stderr
