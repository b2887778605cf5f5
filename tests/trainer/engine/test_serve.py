import signal
import socket
import sys

import pytest

from rolltap.addons.errors import EngineError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.serve import EngineServer, engine_command, is_cpu_build
from tests.trainer.engine import answering as answering_program

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
    """Return a program in place of vLLM, next to a Python executable."""
    (folder / "python").symlink_to(sys.executable)
    program = folder / "vllm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_an_engine_that_ends_before_it_answers_shows_its_log(tmp_path):
    vllm = fake_vllm(tmp_path, "echo out of memory; exit 7")
    server = EngineServer("m", vllm=vllm, port=9, log=tmp_path / "vllm.log")
    with pytest.raises(EngineError, match=r"ended with status 7; the end of (.|\n)*out of memory"):
        server.__enter__()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_an_engine_is_reached_whatever_proxy_the_caller_has(tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no server listens there
    vllm = fake_vllm(tmp_path, f'exec {sys.executable} {answering_program.__file__} "$@"')
    server = EngineServer("m", vllm=vllm, port=free_port())
    with server:
        assert EngineAdmin(server.url).healthy()
    assert not EngineAdmin(server.url).healthy()


def test_an_engine_that_does_not_answer_in_time_is_stopped_and_shows_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("rolltap.trainer.engine.serve.START_SECONDS", 0)
    vllm = fake_vllm(tmp_path, "exec sleep 600")
    server = EngineServer("m", vllm=vllm, port=9, log=tmp_path / "vllm.log")
    with pytest.raises(
        EngineError, match=r"vLLM did not answer at http://127\.0\.0\.1:9 in 0 s; the end of .*vllm\.log"
    ):
        server.__enter__()
    assert server.wait() == -signal.SIGTERM


def test_a_port_that_is_taken_is_named(answering, tmp_path):
    port = answering.server_address[1]
    with pytest.raises(EngineError, match=rf"a server answers at http://127\.0\.0\.1:{port} already"):
        EngineServer("m", vllm=fake_vllm(tmp_path, "exit 0"), port=port).__enter__()


def test_an_address_of_ip_version_6_is_a_url(tmp_path):
    assert EngineServer("m", vllm=fake_vllm(tmp_path, "exit 0"), host="::1").url == "http://[::1]:8000"


def test_this_environment_does_not_have_the_cpu_build(tmp_path):
    assert is_cpu_build(fake_vllm(tmp_path, "")) is False


def test_a_program_without_its_python_is_named(tmp_path):
    with pytest.raises(EngineError, match="there is no working Python beside"):
        is_cpu_build(str(tmp_path / "vllm"))


@pytest.mark.engine
def test_the_engine_that_serve_starts_has_all_endpoints(engine):
    EngineAdmin(engine.url).require_endpoints()
