import json
import socket
import sys

import httpx
import pytest

from rolltap.trainer.engine.serve import EngineServer, check_engine, engine_command, is_cpu_build
from rolltap.trainer.errors import UserError

DEFAULTS = {"host": "127.0.0.1", "port": 8000, "max_model_len": None, "lora_rank": 0}


def flag(command, name):
    return command[command.index(name) + 1]


def test_on_a_gpu_vllm_keeps_its_own_defaults():
    command = engine_command("vllm", "model", **DEFAULTS, cpu=False)
    assert command[:3] == ["vllm", "serve", "model"]
    assert "--enable-scale-out" in command
    assert flag(command, "--logprobs-mode") == "processed_logprobs"
    assert not {"--dtype", "--enforce-eager", "--max-model-len", "--enable-lora"} & set(command)


def test_on_cpu_a_prefill_is_never_split():
    command = engine_command("vllm", "model", **DEFAULTS | {"max_model_len": 4096}, cpu=True)
    assert flag(command, "--max-num-batched-tokens") == flag(command, "--max-model-len") == "4096"
    assert "--no-enable-chunked-prefill" in command
    assert flag(command, "--dtype") == "float32"


def test_adapters_are_enabled_up_to_the_rank():
    command = engine_command("vllm", "model", **DEFAULTS | {"lora_rank": 16}, cpu=False)
    assert flag(command, "--max-lora-rank") == "16"


def fake_vllm(folder, script):
    """A program in the place of vLLM, beside the Python that it would run in."""
    (folder / "python").symlink_to(sys.executable)
    program = folder / "vllm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_an_engine_that_ends_before_it_answers_shows_its_log(tmp_path):
    vllm = fake_vllm(tmp_path, "echo out of memory; exit 7")
    server = EngineServer("m", vllm=vllm, port=9, log=tmp_path / "vllm.log")
    with pytest.raises(UserError, match=r"ended with status 7; the end of (.|\n)*out of memory"):
        server.start()


ANSWERING = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
paths = dict.fromkeys(["/inference/v1/generate", "/weight_info", "/collective_rpc"])
answers = {"/health": None, "/openapi.json": {"paths": paths}, "/version": {"version": "0.32.0"}}
class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answers[self.path]).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Engine).serve_forever()
"""


def test_an_engine_is_reached_whatever_proxy_the_caller_has(tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    (tmp_path / "answering.py").write_text(ANSWERING)
    vllm = fake_vllm(tmp_path, f'exec {sys.executable} {tmp_path}/answering.py "$@"')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = EngineServer("m", vllm=vllm, port=port, log=tmp_path / "vllm.log")
    server.start()
    with server:
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


def test_a_port_that_is_taken_is_named(scripted_engine, tmp_path, monkeypatch):
    monkeypatch.setattr("rolltap.trainer.engine.serve._answers", lambda url: True)
    server = EngineServer("m", vllm=fake_vllm(tmp_path, "exit 0"), port=9)
    with pytest.raises(UserError, match=r"something answers at http://127\.0\.0\.1:9 already"):
        server.start()


def test_this_environment_does_not_hold_the_cpu_build(tmp_path):
    assert is_cpu_build(fake_vllm(tmp_path, "")) is False


def test_a_program_without_its_python_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no working Python beside"):
        is_cpu_build(str(tmp_path / "vllm"))


class TestCheck:
    def test_something_else_than_vllm_is_named(self, scripted_engine):
        with pytest.raises(UserError, match="is not vLLM"):
            check_engine(scripted_engine.url)

    def test_a_vllm_that_is_too_old_says_what_is_missing(self, monkeypatch):
        answers = {"/openapi.json": {"paths": {"/collective_rpc": {}}}, "/version": {"version": "0.20.0"}}

        class Response:
            def __init__(self, url):
                self.url = url

            def json(self):
                return json.loads(json.dumps(answers["/" + self.url.rpartition("/")[2]]))

        monkeypatch.setattr("rolltap.trainer.engine.serve.httpx.get", lambda url, timeout: Response(url))
        with pytest.raises(UserError, match=r"vLLM 0\.20\.0 .* lacks /inference/v1/generate .*needs vLLM 0\.32"):
            check_engine("http://x")

    @pytest.mark.engine
    def test_the_engine_that_serve_starts_has_all_of_it(self, engine):
        check_engine(engine.url)
