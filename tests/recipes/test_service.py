"""The pages of recipes/service: both raise the reward of the quickstart's tiny model, with a real
vLLM on CPU."""

import importlib.util
import json
import shutil
from itertools import compress
from statistics import fmean

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION

import rolltap
from rolltap.addons.engine.policy import Policy
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.traces.reader import RecordedCalls
from tests.conftest import QUICKSTART, ROOT
from tests.trainer.service.served import serving

PAGES = ROOT / "recipes" / "service"
SESSIONS = 16
"""Sessions of a group in both pages."""
pytestmark = [
    pytest.mark.engine,
    pytest.mark.harness,
    pytest.mark.skipif(
        shutil.which("mini") is None,
        reason="mini-swe-agent is not installed: tests/run.sh installs it",
    ),
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
]


def page(name):
    """Return a page as a module."""
    spec = importlib.util.spec_from_file_location(name, PAGES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def places(service, folder):
    """Return the arguments of both pages."""
    return service.url, str(service.run / "service.token"), str(folder)


@pytest.fixture
def service(engine, tmp_path):
    """Serve the quickstart's task. The engine has no adapters afterwards."""
    task = json.loads((QUICKSTART / "tasks.jsonl").read_text())
    task["workspace"] = str(QUICKSTART / "workspace")
    where = [tmp_path / "run", engine.url, engine.model_dir, "mini-swe-agent"]
    how = ["--concurrency", "8", "--timeout", "1200"]
    with serving(*where, *how, tasks=[task]) as served:
        yield served
    admin = EngineAdmin(engine.url)
    for name in admin.models().adapters:
        admin.unload_adapter(name)


def check_learned(service, engine):
    """Assert that the policy learned from the first group.

    It prefers the sessions that earned a reward to the others, by 0.3 nats more than the base does.
    The rewards of another group would be an accident: it has few sessions.
    """
    client = rolltap.Client(service.url, service.token)
    admin = EngineAdmin(engine.url)
    accepted = (event.data["id"] for event in client.events() if event.kind == "accepted")
    first = client.get(next(accepted))
    traces = rolltap.open_run(first.run).traces().batch(first.session_ids).traces

    def preference(model):
        sums = {0.0: [], 1.0: []}
        for trace in traces:
            logprobs = admin.score(model, trace.prompt_ids, trace.completion_ids)
            sums[trace.reward].append(sum(compress(logprobs, trace.completion_mask)))
        return fmean(sums[1.0]) - fmean(sums[0.0])

    assert preference(client.policy().model) > preference(admin.models().base) + 0.3


def versions(service):
    """Return the versions that sampled the run's tokens, in the order of the sessions' starts."""
    found = []
    for calls in RecordedCalls(service.run).values():
        for call in calls:
            found += [span.version for span in call.weight_versions]
    return list(dict.fromkeys(found))


def test_the_loop_has_at_most_forty_lines():
    assert len((PAGES / "loop.py").read_text().splitlines()) <= 40


def test_the_loop_trains_a_step_and_publishes_it(service, engine, tmp_path):
    page("loop").train(*places(service, tmp_path), steps=1, sessions=4)
    client = rolltap.Client(service.url, service.token)
    assert client.policy() == Policy("loop.1", "policy-loop.1")
    assert EngineAdmin(engine.url).models().adapters == {"policy-loop.1"}
    client.wait(client.submit("count-lines", sessions=1).id)
    assert versions(service) == ["default", "loop.1"]


@pytest.mark.deep
def test_the_loop_raises_the_reward(service, engine, tmp_path):
    page("loop").train(*places(service, tmp_path))
    check_learned(service, engine)
    client = rolltap.Client(service.url, service.token)
    client.wait(client.submit("count-lines", sessions=1).id)
    assert versions(service) == ["default", "loop.1", "loop.2", "loop.3"]


def attend(
    module,
    query,
    key,
    value,
    _,
    *,
    tree_kv_index,
    tree_cu_seqlens_q,
    tree_cu_seqlens_k,
    scaling,
    **__,
):
    """Attend as TRL's `tree_attention`: each segment to the keys of its path. TRL's own needs a
    kernel for CUDA."""
    segments = []
    queries = query.split(tree_cu_seqlens_q.diff().tolist(), dim=2)
    paths = tree_kv_index.split(tree_cu_seqlens_k.diff().tolist())
    for own, path in zip(queries, paths, strict=True):
        length = own.shape[2]
        mask = torch.ones(length, len(path), dtype=torch.bool).tril(len(path) - length)
        keys = (key[:, :, path], value[:, :, path])
        segments.append(
            scaled_dot_product_attention(own, *keys, mask, scale=scaling, enable_gqa=True)
        )
    return torch.cat(segments, dim=2).transpose(1, 2), None


def train_by_trl(service, folder, monkeypatch, **settings):
    """Train by the page on a CPU. The first step's ratios are 1."""
    # it asks CUDA for a name
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    settings |= {"use_cpu": True, "bf16": False, "report_to": "none"}
    settings["gradient_checkpointing"] = False
    trainer = page("async_grpo").make_trainer(*places(service, folder), **settings)
    AttentionInterface.register(TREE_ATTENTION, attend)
    trainer.train()
    logged = [line for line in trainer.state.log_history if "ratio" in line]
    assert logged[0]["ratio"] == pytest.approx(1, abs=1e-3)


def test_trl_s_trainer_trains_a_step_and_publishes_it(service, engine, tmp_path, monkeypatch):
    small = {"sessions": 4, "max_steps": 1, "per_device_train_batch_size": 4}
    train_by_trl(service, tmp_path, monkeypatch, **small)
    policy = rolltap.Client(service.url, service.token).policy()
    assert policy.model in EngineAdmin(engine.url).models().adapters


@pytest.mark.deep
def test_trl_s_trainer_raises_the_reward(service, engine, tmp_path, monkeypatch):
    train_by_trl(service, tmp_path, monkeypatch)
    check_learned(service, engine)
