"""Flags, routes and fields that rolltap uses of vLLM, held against the code of each version.

No engine is started.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from rolltap.addons.engine import client, own_model
from rolltap.addons.engine.client import Chunk, decode
from rolltap.addons.engine.key import make_key
from rolltap.addons.store.records import VersionSpan
from rolltap.trainer.engine import admin, serve
from rolltap.trainer.engine.serve import Parts, engine_command, engine_environment

VERSIONS = {"0.32": "ROLLTAP_VLLM", "0.33": "ROLLTAP_VLLM_NEXT"}
"""Minor version of vLLM -> the variable that names its program. With a GPU the first has another
one."""
ANSWERED = {
    "/collective_rpc": "results",
    "/is_paused": "is_paused",
    "/reset_prefix_cache": "success",
    "/server_info": "vllm_config",
    "/version": "version",
    "/weight_info": "weight_version",
}
"""Path -> the key of its answer that is read."""
FIELDS = {
    "CompletionResponseChoice": {"prompt_logprobs", "logprobs", "token_ids"},
    "ModelCard": {"id", "root", "parent", "max_model_len"},
    "TokenizeResponse": {"tokens"},
}
"""Class of an answer -> its fields that are read."""


def command_lines() -> list[list[str]]:
    """Return what `rolltap serve` can give to vLLM: with everything, on a CPU and on a GPU."""
    everything = Parts(vision=True, recurrent=True, gated_delta=True)
    address = {"host": "127.0.0.1", "port": 8000}
    how = {**address, "max_model_len": 4096, "lora_rank": 8, "max_staleness": 1, "routing": True}
    return [
        engine_command("vllm", "model", cpu=True, has=Parts(), **how),
        engine_command("vllm", "model", cpu=True, has=everything, **how),
        engine_command("vllm", "model", cpu=False, has=everything, **how),
    ]


@pytest.fixture(scope="module", params=VERSIONS.values(), ids=VERSIONS)
def vllm(request, tmp_path_factory):
    """Return what a vLLM says of itself, in the environment of an engine."""
    program = os.environ.get(request.param, "")
    if shutil.which(program) is None:
        pytest.skip(f"{request.param} names no vLLM: tests/run.sh installs it")
    key = tmp_path_factory.mktemp("key") / "engine.key"
    make_key(key)
    lines = [line[1:] for line in command_lines()]
    said = subprocess.run(
        [Path(program).with_name("python"), Path(__file__).with_name("vllm_says.py")],
        input=json.dumps([*lines, ["serve", "model", "--nonsense"]]),
        env=engine_environment(key, cpu=True, lora_rank=8),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return SimpleNamespace(**json.loads(said.stdout))


def test_it_takes_every_flag_that_an_engine_is_given(vllm):
    flags = {word for line in command_lines() for word in line if word.startswith("--")}
    assert flags == {*re.findall(r'"(--[a-z-]+)"', inspect.getsource(engine_command))}
    (refusal,) = vllm.refused
    assert "--nonsense" in refusal


def test_it_has_every_route_that_is_asked_with_its_parameters(vllm):
    asked = set()
    literal = re.compile(r'"(/[a-z_0-9/]+)(?:\?([a-z_]+)=[^"]*)?"')
    for module in (client, own_model, admin, serve):
        asked |= set(literal.findall(inspect.getsource(module)))
    assert {path for path, _ in asked} >= {
        "/inference/v1/generate",
        "/is_paused",
        "/pause",
        "/resume",
    }
    for path, parameter in asked:
        assert path == "/metrics" or path in vllm.parameters
        assert not parameter or parameter in vllm.parameters[path]


def test_its_answers_have_the_fields_that_are_read(vllm):
    for path, key in ANSWERED.items():
        assert f'"{key}"' in vllm.code[path], path
    for answer, fields in FIELDS.items():
        assert fields <= {*vllm.fields[answer]}, answer
    for name in admin._LOAD:
        assert f'"{name}"' in vllm.metrics


def test_an_event_that_its_own_classes_write_is_read_in_full(vllm):
    versions = [VersionSpan(version="default", start=0, end=1)]
    chunk = Chunk([5], [-0.5], "stop", "END", versions, cached_tokens=3, routed_experts="AAAA")
    assert decode(vllm.event, ["END"]) == chunk
