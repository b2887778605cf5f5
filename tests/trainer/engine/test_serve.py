import json
import signal
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from rolltap.addons.engine.client import ROUTED, Engine
from rolltap.addons.errors import EngineError, InputError
from rolltap.addons.store.routing import make_routing
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.serve import (
    EngineServer,
    Parts,
    engine_command,
    is_cpu_build,
    require_model,
)
from rolltap.trainer.training.recipe import Recipe
from tests import tiny_checkpoints
from tests.conftest import ROOT, free_port, vllm_program
from tests.factories import make_call
from tests.trainer.engine.answering import AS_VLLM


@pytest.fixture(autouse=True)
def _without_a_hub(monkeypatch):
    """Ask no Hub for the configuration of a model that is no folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def command(vllm="vllm", *, cpu=False, **settings):
    """Return the command line of an engine for a model without special parts."""
    defaults = {
        "host": "127.0.0.1",
        "port": 8000,
        "max_model_len": None,
        "lora_rank": 0,
        "max_staleness": 0,
        "has": Parts(),
    }
    return engine_command(vllm, "model", cpu=cpu, **defaults | settings)


def values(command, name):
    """Return the values of a flag, in order."""
    return [value for flag, value in pairwise(command) if flag == name]


def test_on_a_gpu_vllm_keeps_its_own_defaults():
    words = command()
    assert words[:3] == ["vllm", "serve", "model"]
    assert "--enable-scale-out" in words
    assert values(words, "--logprobs-mode") == ["processed_logprobs"]
    # the last one is outermost: the key
    middleware = ["rolltap_owner.OneOwner", "rolltap_key.RequireKey"]
    assert values(words, "--middleware") == middleware
    own = {"--dtype", "--enforce-eager", "--max-model-len", "--enable-lora"}
    assert own.isdisjoint(words)


@pytest.mark.parametrize(("max_staleness", "adapters"), [(0, 4), (5, 7)])
def test_an_engine_holds_the_adapters_of_a_training_and_a_new_one(max_staleness, adapters):
    words = command(lora_rank=16, max_staleness=max_staleness)
    recipe = Recipe(model="m", steps=1, max_staleness=max_staleness, publish="lora")
    assert recipe.adapters == adapters
    assert values(words, "--max-lora-rank") == ["16"]
    assert values(words, "--max-loras") == [str(max_staleness + 2)]
    assert int(*values(words, "--max-cpu-loras")) > adapters


@pytest.mark.parametrize("routing", [False, True])
def test_experts_are_returned_if_they_are_asked_for(routing):
    assert ("--enable-return-routed-experts" in command(routing=routing)) == routing


def test_on_cpu_a_prefill_is_never_split():
    words = command(cpu=True, max_model_len=4096)
    assert values(words, "--max-num-batched-tokens") == ["4096"]
    assert values(words, "--max-model-len") == ["4096"]
    assert "--no-enable-chunked-prefill" in words


@pytest.mark.parametrize("cpu", [False, True])
def test_an_engine_computes_64_calls_at_once_for_which_hybrid_models_have_blocks(cpu):
    assert values(command(cpu=cpu), "--max-num-seqs") == ["64"]


GDN = {"text_config": {"linear_num_value_heads": 2}, "vision_config": {}}


@pytest.mark.parametrize(
    ("config", "parts", "cpu_type"),
    [
        (GDN, Parts(vision=True, recurrent=True, gated_delta=True), "bfloat16"),
        ({"linear_num_value_heads": 2}, Parts(recurrent=True, gated_delta=True), "bfloat16"),
        ({"linear_attn_alpha_factor": 1}, Parts(recurrent=True), "bfloat16"),
        ({"mamba_d_state": 16}, Parts(recurrent=True), "bfloat16"),
        ({"text_config": {"hidden_size": 64}, "vision_config": {}}, Parts(vision=True), "float32"),
        ({"hidden_size": 64}, Parts(), "float32"),
    ],
)
def test_what_a_model_needs_is_read_in_its_configuration(tmp_path, config, parts, cpu_type):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = Parts.of(tmp_path)
    assert found == parts
    assert found.cpu_type == cpu_type
    on_cpu = command(cpu=True, has=found)
    assert values(on_cpu, "--dtype") == [cpu_type]
    assert ("--enable-chunked-prefill" in on_cpu) == parts.recurrent
    assert "--gdn-prefill-backend" not in on_cpu
    on_gpu = command(has=found)
    assert values(on_gpu, "--gdn-prefill-backend") == ["triton"] * parts.gated_delta
    assert "--dtype" not in on_gpu
    for words in (on_cpu, on_gpu):
        assert ("--language-model-only" in words) == parts.vision


def test_without_a_configuration_or_transformers_what_a_model_needs_is_left_to_the_user(
    tmp_path, monkeypatch
):
    assert Parts.of(tmp_path) == Parts()
    (tmp_path / "config.json").write_text(json.dumps(GDN))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert Parts.of(tmp_path) == Parts()


def fake_vllm(folder, script):
    """Return a program in place of vLLM, next to a Python executable."""
    (folder / "python").symlink_to(sys.executable)
    program = folder / "vllm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("script", "seconds", "message", "status"),
    [
        ("echo out of memory; exit 7", 600, r"status 7: m is no folder here, (.|\n)*of memory", 7),
        ("exec sleep 600", 0, r"http://.*:9 in 0 s; the end of .*vllm\.log", -signal.SIGTERM),
    ],
)
def test_an_engine_that_ends_or_does_not_answer_in_time_is_stopped_and_shows_its_log(
    tmp_path, monkeypatch, script, seconds, message, status
):
    monkeypatch.setattr("rolltap.trainer.engine.serve.START_SECONDS", seconds)
    server = EngineServer("m", vllm=fake_vllm(tmp_path, script), port=9, log=tmp_path / "vllm.log")
    with pytest.raises(EngineError, match=message):
        server.__enter__()
    assert server.wait() == status


def test_an_engine_is_reached_whatever_proxy_the_caller_has(tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no server listens there
    server = EngineServer("m", vllm=fake_vllm(tmp_path, AS_VLLM), port=free_port())
    with server:
        assert EngineAdmin(server.url).healthy()
    assert not EngineAdmin(server.url).healthy()


def test_a_port_that_is_taken_is_named(answering, tmp_path):
    vllm = fake_vllm(tmp_path, "exit 0")
    assert EngineServer("m", vllm=vllm, host="::1").url == "http://[::1]:8000"
    port = answering.server_address[1]
    taken = rf"a server answers at http://127\.0\.0\.1:{port} already"
    with pytest.raises(EngineError, match=taken):
        EngineServer("m", vllm=vllm, port=port).__enter__()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("model/config.json", "mistral/params.json", "weights/of/mine.gguf"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("{}")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_a_folder_is_served_by_its_absolute_path_so_that_every_folder_of_a_user_means_the_same(
    here,
):
    for model in ("Qwen/Qwen3-4B", "gpt2", "s3://bucket/models/mine", "weights/of/mine.gguf"):
        assert require_model(model) == model
    for model in ("model", "./mistral"):
        assert require_model(model) == str(here / model)


@pytest.mark.parametrize(
    "model",
    ["/no/such/model", "./no-model", "runs/first/model", "~/model-of-nobody", "empty/mine"],
)
def test_a_model_that_is_a_path_and_not_there_is_refused_before_vllm_starts(here, model):
    vllm = fake_vllm(here, "exit 0")
    with pytest.raises(InputError, match=f"there is no folder {model}"):
        EngineServer(model, vllm=vllm)
    with pytest.raises(InputError, match=r"the folder empty has no config\.json"):
        EngineServer("empty", vllm=vllm)


def test_this_environment_does_not_have_the_cpu_build(tmp_path):
    assert is_cpu_build(fake_vllm(tmp_path, "")) is False
    with pytest.raises(EngineError, match="there is no working Python beside"):
        is_cpu_build(str(tmp_path / "elsewhere" / "vllm"))


class TestKey:
    @pytest.fixture
    def key_file(self, tmp_path, monkeypatch):
        """Return a file for `ROLLTAP_ENGINE_KEY_FILE`, which is not set."""
        monkeypatch.delenv("ROLLTAP_ENGINE_KEY_FILE", raising=False)
        return tmp_path / "engine.key"

    @pytest.fixture
    def server(self, tmp_path, key_file):
        return EngineServer("m", vllm=fake_vllm(tmp_path, AS_VLLM), port=free_port())

    def test_without_a_file_each_engine_gets_a_key_of_its_own_that_ends_with_it(self, server):
        with server:
            own = server.key_file
            assert len(own.read_text().strip()) >= 43  # 256 bits
            assert stat.S_IMODE(own.stat().st_mode) == 0o600
            assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700
            EngineAdmin(server.url, own).require_endpoints()
            required = r"requires a key \(401\): set ROLLTAP_ENGINE_KEY_FILE"
            with pytest.raises(EngineError, match=required):
                EngineAdmin(server.url).require_endpoints()
        assert not own.parent.exists()

    def test_a_file_that_does_not_exist_is_made_and_stays(self, server, key_file, monkeypatch):
        monkeypatch.setenv("ROLLTAP_ENGINE_KEY_FILE", str(key_file))
        keys = set()
        for _ in range(2):
            with server:
                EngineAdmin(server.url).require_endpoints()
            keys.add(key_file.read_text())
        assert len(keys) == 1
        key_file.write_text("sesame")
        with pytest.raises(InputError, match="has 6 characters: it needs at least 32"):
            server.__enter__()

    def test_an_engine_that_answers_without_the_key_is_stopped(self, tmp_path):
        vllm = fake_vllm(tmp_path, f"unset ROLLTAP_ENGINE_KEY_SHA256; {AS_VLLM}")
        server = EngineServer("m", vllm=vllm, port=free_port())
        with pytest.raises(EngineError, match="answers without its key: it ignores --middleware"):
            server.__enter__()
        assert server.wait() == -signal.SIGTERM


PARSED = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
serve, parser = ServeSubcommand(), FlexibleArgumentParser()
serve.subparser_init(parser.add_subparsers())
arguments = parser.parse_args(sys.argv[1:])
serve.validate(arguments)
print(json.dumps([arguments.max_num_seqs, arguments.gdn_prefill_backend, arguments.max_loras]))
"""


@pytest.mark.engine
def test_an_argument_of_the_user_wins_over_the_same_one_of_rolltap():
    vllm = vllm_program()
    everything = Parts(True, True, True)
    words = command(vllm, lora_rank=16, max_staleness=1, has=everything, routing=True)
    users = ["--max-num-seqs", "7", "--gdn-prefill-backend", "flashinfer"]
    for extra, expected in (([], [64, "triton", 3]), (users, [7, "flashinfer", 3])):
        python = [Path(vllm).with_name("python"), "-c", PARSED]
        ended = subprocess.run([*python, *words[1:], *extra], capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout.splitlines()[-1]) == expected


@pytest.mark.engine
async def test_vllm_returns_the_experts_of_all_tokens_but_the_last(monkeypatch, tmp_path):
    vllm = vllm_program()
    if is_cpu_build(vllm):
        pytest.skip("vLLM's CPU build cannot return experts: it needs Triton")
    model = tiny_checkpoints.qwen3_moe(tmp_path / "model", ROOT / "tests" / "models" / "qwen3-4b")
    monkeypatch.setenv("ROLLTAP_ENGINE_KEY_FILE", str(tmp_path / "engine.key"))
    with EngineServer(
        model, vllm=vllm, port=free_port(), routing=True, max_model_len=1024
    ) as server:
        engine = Engine(server.url, server.key_file.read_text().strip())
        for start in (0, 3):
            call = make_call(1, [5, 6, 7, 8], [], prefix_length=start + 1 if start else 0)
            sampling = {"max_tokens": 3, "ignore_eos": True, ROUTED: start}
            async for chunk in engine.generate(list(call.prompt_ids), sampling, None):
                call.completion_ids += chunk.token_ids
                encoded = chunk.routed_experts
            routing = make_routing(call, encoded)
            assert (routing.missing, routing.layers, routing.top_k) == (None, 2, 2)
        await engine.close()


@pytest.mark.engine
def test_every_route_of_vllm_but_health_requires_the_key(engine):
    """The routes are those that vLLM itself lists. None is carried out."""
    listed = engine.http.get("/openapi.json").json()["paths"]
    assert {"/pause", "/collective_rpc", "/update_weights", "/v1/load_lora_adapter"} <= {*listed}
    routes = [("OPTIONS", "/pause")]
    routes += [("GET", path) for path in ("/openapi.json", "/docs", "/metrics")]
    routes += [(method, "/rolltap/owner") for method in ("GET", "PUT", "DELETE")]
    for path, methods in listed.items():
        routes += [(method.upper(), path) for method in methods]
    for method, path in routes:
        if path != "/health":
            answer = httpx.request(method, engine.url + path, timeout=120)
            assert answer.status_code == 401, (method, path)
    assert httpx.get(f"{engine.url}/health").status_code == 200
    assert engine.http.get("/is_paused").json() == {"is_paused": False}
    EngineAdmin(engine.url).require_endpoints()
