"""The transfer over NCCL: its requests, with stand-ins for vLLM's sender; and vLLM's own names and signatures."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.engine import publish_transfer
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish import make_publisher
from rolltap.trainer.engine.publish_transfer import BASE_MODULE, NCCL_MODULE, reachable_address
from tests.trainer.engine.acting import acting, agreed
from tests.trainer.training.grpo.tiny import tiny_model

ROUTES = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
VERSION = "1a2b3c4d.1.0"


@dataclass
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class InitInfo:
    master_address: str
    master_port: int
    world_size: int
    rank: int


class Sender:
    """Sends as vLLM 0.32 does, but for the broadcast."""

    def __init__(self, info, client, source):
        self.client, self.source = client, source
        client.init_weight_transfer_engine(
            {"master_address": info.master_address, "rank_offset": 1, "world_size": info.world_size, "packed": True}
        )

    @classmethod
    def trainer_init(cls, init_info, *, client, source):
        return cls(init_info, client, source)

    def send_weights(self):
        meta = self.source.metadata()
        assert [each.name for each in meta] == [name for name, _ in self.source]
        self.client.start_weight_update()
        self.client.update_weights({"names": [each.name for each in meta]})
        self.client.finish_weight_update()


@pytest.fixture
def vllm(monkeypatch):
    """Put stand-ins for vLLM's modules in place, on a machine that says it has a GPU."""
    for name, content in {
        BASE_MODULE: {"ParamMeta": ParamMeta},
        NCCL_MODULE: {"NCCLTrainerInitInfo": InitInfo, "NCCLTrainerWeightTransferEngine": Sender},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(publish_transfer, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def pair(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    with acting(tmp_path / "base") as one, acting(tmp_path / "base") as two:
        for engine, workers in ((one, 2), (two, 4)):
            engine.answers |= {path: {"message": "done"} for path in ROUTES}
            engine.answers["/get_world_size"] = {"world_size": workers}
        yield one, two


@pytest.fixture
def publisher(pair, tmp_path):
    def publisher():
        engines = Engines([each.url for each in pair])
        base = tmp_path / "base"
        return make_publisher("nccl", engines, folder=tmp_path / "p", run=tmp_path, base=base, adapters=2)

    return publisher


def bodies(engine, path):
    return [body for asked, body in engine.requests if asked == path]


def test_all_workers_join_one_group_and_every_version_is_sent_to_paused_engines(vllm, pair, publisher, tmp_path):
    publishes = publisher()
    assert publishes.publish(tiny_model(), VERSION, agreed) is None
    assert publishes.publish(tiny_model(), "1a2b3c4d.2.0", agreed) is None
    joined = [bodies(each, ROUTES[0]) for each in pair]
    assert [[body["init_info"]["rank_offset"] for body in each] for each in joined] == [[1], [3]]
    assert {body["init_info"]["world_size"] for each in joined for body in each} == {7}
    for each in pair:
        steps = [path for path in each.paths if path in {*ROUTES[1:], "/pause", "/resume"}]
        assert steps == ["/pause", *ROUTES[1:], "/resume"] * 2
        assert sorted(bodies(each, "/update_weights")[0]["update_info"]["names"]) == sorted(tiny_model().state_dict())
        assert (each.version, each.paused) == ("1a2b3c4d.2.0", False)
    assert json.loads((tmp_path / "policy.json").read_text()) == {"model": None, "version": "1a2b3c4d.2.0"}


# peft 0.21 uses a name that transformers 5.23 deprecates
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_merged(vllm, pair, publisher):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    publisher().publish(model, VERSION, agreed)
    assert sorted(bodies(pair[0], "/update_weights")[0]["update_info"]["names"]) == sorted(tiny_model().state_dict())


@pytest.mark.parametrize("step", [*ROUTES[1:], None])
def test_when_one_engine_refuses_or_does_not_agree_all_load_the_base_model(vllm, pair, publisher, tmp_path, step):
    def disagree(name):
        raise EngineError("no agreement")

    if step is not None:
        pair[1].answers[step] = (500, "no")
    why = "no agreement" if step is None else f"{pair[1].url}{step}: 500 .*"
    publishes = publisher()
    with pytest.raises(EngineError, match=rf"{why}; all engines serve the weights 1a2b3c4d\.0\.0"):
        publishes.publish(tiny_model(), VERSION, disagree)
    assert [(each.weights, each.version, each.paused) for each in pair] == [("base", "1a2b3c4d.0.0", False)] * 2
    assert not (tmp_path / "policy.json").exists()
    assert publishes._source.weights is None


def test_an_engine_that_was_started_without_the_backend_says_so_and_is_not_paused(vllm, pair, publisher):
    pair[0].answers[ROUTES[0]] = (500, "Weight transfer not configured")
    with pytest.raises(EngineError, match=r'start vLLM with --weight-transfer-config \'\{"backend": "nccl"\}\''):
        publisher().publish(tiny_model(), VERSION, agreed)
    assert not {"/pause", "/collective_rpc"} & {*pair[0].paths, *pair[1].paths}


def test_without_vllm_or_a_gpu_it_says_what_is_missing(pair, publisher, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(publish_transfer, "find_spec", lambda name: None)
    for start in (publisher, publish_transfer.require_transfer):
        with pytest.raises(InputError, match=r"vLLM in the trainer's environment and a CUDA GPU for the trainer: or"):
            start()
    monkeypatch.setattr(publish_transfer, "find_spec", lambda name: object())
    with pytest.raises(InputError, match=r'"nccl" needs a CUDA GPU for the trainer: or set publish = "checkpoint"'):
        publisher()
    assert reachable_address(["http://127.0.0.1:8000", "http://localhost:8001"]) == "127.0.0.1"


SIGNATURES = f"""
import importlib, inspect, json
base, nccl = (importlib.import_module(name) for name in ({BASE_MODULE!r}, {NCCL_MODULE!r}))
base.ParamMeta("a", None, (1,))
nccl.NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=1, world_size=3, rank=0)
sender = nccl.NCCLTrainerWeightTransferEngine
inspect.signature(sender.trainer_init).bind(None, client=None, source=None)
inspect.signature(sender.send_weights).bind(None)
client = {{name for name in vars(base.VLLMWeightSyncClient) if "weight" in name}}
print(json.dumps(sorted(client)))
"""


@pytest.mark.engine
def test_vllm_has_the_names_and_signatures_that_are_used():
    vllm = shutil.which(os.environ.get("ROLLTAP_VLLM", "vllm"))
    if vllm is None:
        pytest.skip("vLLM is not installed: tests/run.sh installs it, or set ROLLTAP_VLLM")
    python = Path(vllm).with_name("python")
    printed = subprocess.run([python, "-c", SIGNATURES], capture_output=True, text=True, check=True, timeout=300).stdout
    used = {name for name in vars(publish_transfer._Client) if "weight" in name}
    assert set(json.loads(printed.splitlines()[-1])) == used


@pytest.mark.engine
def test_vllm_has_the_routes_that_are_used(engine):
    paths = engine.http.get("/openapi.json").json()["paths"]
    assert {*ROUTES, "/get_world_size"} <= paths.keys()
