"""Plans of whole recipes: what is refused, with its fix, and what is said of the rest."""

import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from rolltap.trainer.planning import findings
from rolltap.trainer.planning.memory import GIB
from rolltap.trainer.planning.plan import plan
from rolltap.trainer.training.recipe import Machine, Recipe
from tests.trainer.grpo.tiny_models import FAMILIES

LORA = {"r": 4, "target_modules": "all-linear"}
GPU = {"gpu_gib": 80}


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny Qwen3, without weights."""
    FAMILIES["qwen3"][1].save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def planned(model, *, engine=None, processes=None, machine=GPU, **keys):
    keys = {"tasks": "tasks.jsonl", "harness": "pi", "steps": 10, "max_tokens": 1000, **keys}
    recipe = Recipe(model=model, machine=Machine(**machine) if machine else None, **keys)
    return plan(recipe, engine=engine, processes=processes)


def said(found, level):
    return [finding.text for finding in found.findings if finding.level == level]


def test_a_recipe_without_weights_and_tasks_can_start_and_is_told_what_is_missing(model):
    found = planned(model, lora=LORA, publish="lora")
    assert found.can_start
    assert said(found, "note") == ["the task file tasks.jsonl is not there", "the folder model has no weights"]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"publish": "lora"}, "no adapter"),
        ({"publish": "lora", "lora": {**LORA, "r": 1024}}, "rank 1024"),
        ({"publish": "lora", "lora": {**LORA, "use_dora": True}}, "use_dora"),
        ({"publish": "nccl"}, "needs vLLM"),
        ({"publish": "nccl", "machine": {**GPU, "shared_gpu": True}}, "one GPU"),
        ({"sessions_per_group": 2, "machine": {**GPU, "processes": 4}}, "only 2 sessions"),
        ({"processes": 2, "machine": {**GPU, "processes": 4}}, "for 4 processes, but 2"),
        ({"engine": "http://a:1,http://b:2", "machine": {**GPU, "engines": 3}}, "for 3 engines, but --engine names 2"),
        ({"max_tokens": 5000}, "more than the model's context"),
        ({"machine": None}, "tied embeddings"),
        ({"harness": "nobody"}, "nobody"),
        ({"grpo": {"num_iterations": 0}}, "num_iterations"),
        ({"grpo": {"loss_type": "grpo"}}, "loss_type"),
        ({"grpo": {"temperature": 0.5}, "recorder": {"rolltap_sampling": '{"temperature": 1}'}}, "temperature"),
        ({"lora": {"r": 4, "target_modules": ["nothing"]}}, "nothing"),
        ({"machine": {"gpu_gib": 0.001}}, "weights, gradients and optimizer"),
        ({"machine": {"gpu_gib": 1.582}}, "a trace of 1,000 tokens"),
        ({"machine": {"gpu_gib": 3.0}}, "does not hold a session"),
        ({"machine": GPU, "grpo": {"memory_gib": 90}}, "memory_gib"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_an_error_with_a_fix(model, keys, text):
    found = planned(model, **keys)
    assert not found.can_start
    named = [finding for finding in found.findings if finding.level == "error" and text in finding.text + finding.fix]
    assert named, found.findings
    assert all(finding.fix for finding in named)


def test_a_folder_without_a_model_is_one_error_and_no_plan(tmp_path):
    found = planned(tmp_path)
    assert len(said(found, "error")) == 1
    assert found.model is None
    assert not found.can_start
    json.dumps(found.to_json())


def test_linear_attention_without_kernels_is_a_warning(model, monkeypatch):
    monkeypatch.setattr(findings, "kernels", lambda _: {"a": False, "b": True})
    found = planned(model, lora=LORA)
    assert found.can_start
    assert any("no a" in text and "no b" not in text for text in said(found, "warning"))


def test_a_shared_gpu_is_divided_and_nothing_is_left_over_twice(model):
    found = planned(model, lora=LORA, machine={"gpu_gib": 8, "shared_gpu": True}, concurrency=3)
    memory = found.memory
    assert memory.engine.sessions == 3
    assert memory.always.total + memory.planned_traces + memory.engine.total <= 8 * GIB
    assert f"--gpu-memory-utilization {memory.engine.utilization:.2f}" in found.lines[1]
    assert memory.suggested_memory_gib == pytest.approx(memory.planned_traces / GIB, abs=0.1)


def test_given_memory_leaves_the_engine_the_rest(model):
    machine = {"gpu_gib": 8, "shared_gpu": True}
    found = planned(model, lora=LORA, machine=machine, grpo={"memory_gib": 1.5})
    assert found.memory.planned_traces == 1.5 * GIB
    assert found.memory.suggested_memory_gib is None


def test_lines_start_as_many_engines_and_processes_as_there_are(model):
    machine = {"processes": 3, "engines": 2, "gpu_gib": 80}
    found = planned(model, lora={**LORA, "r": 12}, publish="lora", machine=machine)
    first, second = (line for line in found.lines if "rolltap serve" in line)
    assert first.startswith("CUDA_VISIBLE_DEVICES=0 ")
    assert "--port 8001" in second
    assert "--lora-rank 16" in second
    assert "--max-model-len 1000" in second
    assert found.lines[-1].startswith("CUDA_VISIBLE_DEVICES=2,3,4 torchrun --nproc-per-node 3 -m rolltap train ")
    assert "--engine http://127.0.0.1:8000,http://127.0.0.1:8001" in found.lines[-1]


def test_given_urls_are_those_of_the_lines(model):
    found = planned(model, engine="http://host:9000", machine=None, lora=LORA)
    assert "--port 9000" in found.lines[1]
    assert "--engine http://host:9000 " in found.lines[2]


def test_work_is_counted(model):
    keys = {"groups_per_step": 3, "sessions_per_group": 4, "save_steps": 3, "grpo": {"num_iterations": 2}}
    work = planned(model, **keys).work
    assert (work.sessions_per_step, work.sessions, work.optimizer_steps, work.checkpoints) == (12, 120, 20, 3)


def test_a_plan_is_json_and_a_table(model):
    found = planned(model, lora=LORA, publish="lora")
    data = json.loads(json.dumps(found.to_json()))
    assert data["can_start"] is True
    assert data["memory"]["always"]["total"] == found.memory.always.total
    console = Console(width=100, record=True, file=SimpleNamespace(write=lambda _: None, flush=lambda: None))
    console.print(found)
    text = console.export_text()
    assert "This can start." in text
    assert "CUDA_VISIBLE_DEVICES=1 rolltap train" in text
