"""Plans of whole recipes: refusals with their fixes, remarks on the rest, and the printed plan."""

import io
import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from rich.console import Console

from rolltap.trainer.cli.train import train_command
from rolltap.trainer.training.plan import findings
from rolltap.trainer.training.plan import model as model_module
from rolltap.trainer.training.plan.memory import GIB, SLACK, machine_of
from rolltap.trainer.training.plan.plan import plan
from rolltap.trainer.training.recipe import Machine, Recipe
from tests.conftest import ROOT
from tests.trainer.training.step.small_models import configuration

LORA = {"r": 4, "target_modules": "all-linear"}
ADAPTER = {"lora": LORA, "publish": "lora"}
GPU = {"gpu_gib": 80}
NO_WEIGHTS = "the folder model has no weights"


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny Qwen3, without weights."""
    configuration("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def hybrid(tmp_path):
    """The folder of a tiny Qwen3.5, without weights."""
    configuration("qwen3.5").save_pretrained(tmp_path / "hybrid")
    return tmp_path / "hybrid"


def planned(model, *, engine=None, processes=None, machine=GPU, runs=(), **keys):
    given = {"tasks": "tasks.jsonl", "harness": "pi", "steps": 10, "max_tokens": 1000}
    if machine is not None:
        given["machine"] = Machine(**machine)
    recipe = Recipe(model=model, **{**given, **keys})
    return plan(recipe, engine=engine, processes=processes, runs=runs)


def text_of(found):
    """Return a plan as it is printed."""
    console = Console(width=100, file=io.StringIO())
    console.print(found)
    return console.file.getvalue()


def said(found, level):
    return [finding.text for finding in found.findings if finding.level == level]


def about(found, text):
    """Return the only finding with a text."""
    (finding,) = [each for each in found.findings if text in each.text]
    return finding


def test_a_recipe_without_weights_and_tasks_can_start_and_is_told_what_is_missing(model):
    found = planned(model, **ADAPTER)
    assert found.can_start
    assert said(found, "note") == [NO_WEIGHTS, "the task file tasks.jsonl is not there"]
    without = planned(model, harness=None, **ADAPTER)
    assert without.can_start
    assert about(without, "there is no key 'harness'").fix == "add harness"


def test_a_folder_of_tasks_is_there_and_its_tasks_are_counted(model):
    harbor = ROOT / "recipes" / "swe" / "mini"  # of which one folder is a task
    assert said(planned(model, tasks=harbor, **ADAPTER), "note") == [NO_WEIGHTS]
    found = planned(model, tasks=harbor, groups_per_step=2, **ADAPTER)
    assert "has 1 tasks" in said(found, "error")[0]


FOUR = {**GPU, "processes": 4}
REFUSED = {
    "lora.r = 1024": {"publish": "lora", "lora": {**LORA, "r": 1024}},
    "only 2 sessions": {"sessions": 2, "machine": FOUR},
    "machine.processes is 4, but": {"processes": 2, "machine": FOUR},
    "processes = 3 is no multiple of nodes = 2": {"machine": {**GPU, "processes": 3, "nodes": 2}},
    "machine.engines is 3, but": {
        "engine": "http://a:1,http://b:2",
        "machine": {**GPU, "engines": 3},
    },
    "more than the model's context": {"max_tokens": 5000},
    "tied embeddings": {"machine": None},
    "has no experts": {"grpo": {"routing": "recorded"}},
    "num_iterations": {"grpo": {"num_iterations": 0}},
    "temperature": {
        "grpo": {"temperature": 0.5},
        "recorder": {"rolltap_sampling": '{"temperature": 1}'},
    },
    'runtime = "ssh" needs a machine': {"runtime": "ssh"},
    "ssh = 'machine' has no meaning": {"runtime": "sandbox", "ssh": "machine"},
    "weights, gradients and optimizer": {"machine": {"gpu_gib": 0.001}},
    "a smaller max_tokens": {"machine": {"gpu_gib": 1.6}},
    "does not hold a session": {"machine": {"gpu_gib": 3.0}},
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_work_is_an_error_with_a_fix(model, text):
    found = planned(model, **REFUSED[text])
    assert not found.can_start
    errors = [finding for finding in found.findings if finding.level == "error"]
    assert any(text in error.text + error.fix for error in errors), found.findings
    assert all(error.fix for error in errors)


@pytest.mark.parametrize(
    ("use_cpu", "nodes", "refused"),
    [(False, 1, True), (True, 1, False), (False, 2, False)],
)
def test_each_process_that_trains_on_this_machines_gpus_has_one(
    monkeypatch,
    tmp_path,
    use_cpu,
    nodes,
    refused,
):
    gpu = SimpleNamespace(total_memory=80 * GIB)
    here = {"is_available": True, "device_count": 1, "get_device_properties": gpu}
    for name, value in here.items():
        monkeypatch.setattr(f"torch.cuda.{name}", Mock(return_value=value))
    machine = Machine(processes=2, nodes=nodes)
    recipe = Recipe(model=tmp_path, steps=1, machine=machine, grpo={"use_cpu": use_cpu})
    found = findings.of_recipe(recipe, machine_of(recipe, None, None, online=False))
    texts = [finding.text for finding in found]
    assert ("2 processes on a machine with 1 GPUs" in texts) == refused


def test_a_folder_without_a_model_is_one_error_and_no_plan(tmp_path):
    found = planned(tmp_path)
    assert len(said(found, "error")) == 1
    assert found.model is None
    assert not found.can_start
    assert "This cannot start." in text_of(found)
    json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("gpu", "here", "installed", "fast"),
    [
        (True, False, False, True),
        (True, True, True, True),
        (True, True, False, False),
        (False, False, True, False),
    ],
    ids=["of another machine", "here, installed", "here, not installed", "none"],
)
def test_a_gpu_has_the_kernels_that_are_installed_here_or_those_of_the_documented_installation(
    hybrid, gpu, here, installed, fast, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: here)
    monkeypatch.setattr(model_module, "kernels", lambda _: {"flash-linear-attention": installed})
    recipe = Recipe(model=hybrid, steps=1)
    assert model_module.model_numbers(recipe, "bfloat16", gpu=gpu).fla == fast


@pytest.mark.parametrize(
    ("machine", "level", "used"),
    [
        (GPU, "note", "FlexAttention; flash-linear-attention"),
        (None, "warning", "torch's FlashAttention; torch"),
    ],
)
def test_a_plan_says_which_kernels_it_counts_with_and_how_to_install_them(
    hybrid,
    machine,
    level,
    used,
    monkeypatch,
):
    monkeypatch.setattr(findings, "kernels", lambda _: {"flash-linear-attention": False})
    found = planned(hybrid, lora=LORA, machine=machine)
    assert found.can_start
    assert f"kernels  {used} computes linear attention" in text_of(found)
    finding = about(found, "no flash-linear-attention here")
    assert finding.level == level
    assert finding.fix == "pip install '.[train,kernels]' in a clone, on the machine with the GPU"


def test_kernels_that_are_compiled_with_nvcc_are_a_remark(model, monkeypatch):
    there = {"flash-linear-attention": True, "causal-conv1d": False, "mamba-ssm": False}
    monkeypatch.setattr(findings, "kernels", lambda _: there)
    found = planned(model, lora=LORA)
    assert not any("linear attention" in text for text in said(found, "warning"))
    note = about(found, "no causal-conv1d and no mamba-ssm")
    assert note.level == "note"
    assert "pip install --no-build-isolation causal-conv1d mamba-ssm" in note.fix


def test_an_engine_of_a_hybrid_with_fewer_blocks_than_calls_is_an_error(hybrid):
    found = planned(hybrid, lora=LORA, concurrency=50)
    assert found.can_start
    assert found.memory.engine.sequences == 100
    assert "100 at once in an engine: 2 for each session" in text_of(found)
    short = replace(found.memory, engine=replace(found.memory.engine, blocks=99))
    every = findings.of_engine(found.recipe, found.machine, found.model, found.micro_batch, short)
    (error,) = [finding for finding in every if finding.level == "error"]
    assert error.fix == "a smaller concurrency"
    assert "has 99 blocks, and each of its 100 calls needs one" in error.text


def test_an_engine_that_shares_a_gpu_has_a_block_for_each_call_however_short_sessions_are(hybrid):
    shared = {"gpu_gib": 8, "shared_gpu": True}
    found = planned(hybrid, lora=LORA, machine=shared, max_tokens=16, concurrency=1)
    assert found.memory.engine.blocks >= found.memory.engine.sequences == 16


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
def test_an_adapter_on_experts_is_planned(tmp_path):
    configuration("qwen3-moe").save_pretrained(tmp_path)
    assert planned(tmp_path, lora=LORA).can_start


def row_of(model, *, room, **keys):
    """Plan eight sessions on a GPU that leaves `room` for their row, in shares of it."""
    memory = planned(model, lora=LORA, **keys).memory
    needed = memory.always.total + room * memory.row.total
    return planned(model, lora=LORA, **keys, machine={"gpu_gib": needed / SLACK / GIB})


def test_a_row_that_fits_is_no_finding(model):
    found = row_of(model, room=1.01)
    assert not any("sessions of 1,000 tokens at once" in each.text for each in found.findings)
    assert found.memory.longest_row >= found.micro_batch.tokens


@pytest.mark.parametrize(
    ("room", "grpo", "fix"),
    [
        (0.98, {}, "grpo.offload_checkpoints = true, or grpo.gradient_accumulation_steps = 2"),
        (0.3, {}, "grpo.gradient_accumulation_steps = 4"),
        (0.3, {"gradient_accumulation_steps": 2}, "grpo.gradient_accumulation_steps = 8"),
    ],
)
def test_a_row_that_does_not_fit_is_a_warning_with_the_number_of_micro_batches_that_do(
    model,
    room,
    grpo,
    fix,
):
    found = row_of(model, room=room, grpo=grpo)
    warning = about(found, "sessions of 1,000 tokens at once")
    assert warning.level == "warning"
    assert warning.fix.startswith(fix)
    assert found.memory.longest_row < found.micro_batch.tokens
    assert f"for a row of at most {found.memory.longest_row:,} tokens" in text_of(found)


def test_a_shared_gpu_is_divided_and_nothing_is_left_over_twice(model):
    shared = {"gpu_gib": 8, "shared_gpu": True}
    found = planned(model, lora=LORA, machine=shared, concurrency=3)
    memory = found.memory
    engine = memory.engine
    assert engine.sessions >= 3
    assert memory.always.total + memory.room + engine.sizes.total <= 8 * GIB
    assert memory.row.total <= memory.room
    assert engine.sizes.total == int(engine.utilization * 8 * GIB)
    assert f"--gpu-memory-utilization {engine.utilization:.2f}" in found.lines[1]


def test_recorded_runs_need_no_engine_and_no_rollouts(model):
    machine = {**GPU, "engines": 2, "shared_gpu": True}
    found = planned(model, runs=[Path("runs/a")], harness=None, tasks=None, machine=machine)
    assert found.can_start, found.findings
    assert found.memory.engine is None
    assert not any("serve" in line for line in found.lines)
    assert "on recorded runs" in text_of(found)
    for finding in found.findings:
        assert "engine" not in finding.text
        assert "harness" not in finding.text


@pytest.mark.parametrize(
    ("dtype", "machine", "expected", "option"),
    [
        (None, GPU, "bfloat16", "--dtype bfloat16"),
        (None, None, "float32", ""),
        ("bfloat16", None, "bfloat16", "--dtype bfloat16"),
        ("float32", GPU, "float32", "--dtype float32"),
    ],
)
def test_the_type_is_the_recipes_or_follows_from_the_planned_gpu(
    model, dtype, machine, expected, option
):
    found = planned(model, dtype=dtype, machine=machine, lora=LORA)
    assert found.machine.dtype == expected
    assert option in found.lines[1]
    assert ("--dtype" in found.lines[1]) == bool(option)
    assert ("the default with" in text_of(found)) == (dtype is None)
    assert found.to_json()["recipe"]["dtype"] == dtype


def test_without_a_gpu_linear_attention_is_planned_in_the_type_that_vllm_computes_it_in():
    recipe = Recipe(model=ROOT / "tests" / "models" / "qwen3.5-4b", steps=1)
    assert machine_of(recipe, None, None, online=True).dtype == "bfloat16"
    assert machine_of(recipe, None, None, online=False).dtype == "float32"


def test_what_rollouts_of_the_model_lack_is_a_warning_with_its_fix(model, save_tokenizer):
    template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    save_tokenizer(model, template)
    warning = about(planned(model, lora=LORA), "cannot be read")
    assert warning.level == "warning"
    assert "rolltap_tool_parser" in warning.fix
    chosen = planned(model, lora=LORA, recorder={"rolltap_tool_parser": "hermes"})
    assert not any("cannot be read" in finding.text for finding in chosen.findings)


def test_arguments_of_the_model_reach_the_plan(model):
    plain = planned(model)
    short = planned(model, grpo={"model_init_kwargs": {"num_hidden_layers": 1}})
    assert short.model.token < plain.model.token
    assert short.memory.row.total < plain.memory.row.total


def test_work_is_counted_without_replaced_groups(model):
    keys = {"groups_per_step": 3, "sessions": 4, "save_steps": 3, "grpo": {"num_iterations": 2}}
    found = planned(model, replace_zero_variance=5, **keys)
    assert list(found.work.values())[:5] == [10, 12, 120, 20, 4]
    assert found.micro_batch.sessions == 12


def test_a_plan_is_json_and_a_table(model):
    machine = {**GPU, "processes": 4, "nodes": 2}
    found = planned(model, **ADAPTER, max_staleness=3, machine=machine)
    data = json.loads(json.dumps(found.to_json()))
    assert data["can_start"] is True
    assert data["memory"]["always"] == found.memory.always
    text = text_of(found)
    assert "This can start." in text
    assert "training processes: 4 on 2 nodes, engines: 1" in text
    assert "published as lora, 5 adapters loaded" in text
    assert "CUDA_VISIBLE_DEVICES=1,2 torchrun" in text
    alone = planned(model, **ADAPTER, max_staleness=3, machine={**machine, "nodes": 1})
    assert (alone.memory, alone.work) == (found.memory, found.work)


LONG = "a model with a long name that has spaces"
RECIPE = f"""
model = "{LONG}"
tasks = "tasks.jsonl"
harness = "pi"
steps = 10
max_tokens = 1000
publish = "lora"
lora = {{r = 4, target_modules = "all-linear"}}
machine = {{engines = 4, processes = 4, gpu_gib = 80}}
"""


@pytest.mark.parametrize("columns", ["80", "20", None], ids=["terminal", "narrow", "pipe"])
def test_commands_are_printed_whole(tmp_path, columns):
    recipe = tmp_path / "recipe.toml"
    configuration("qwen3").save_pretrained(tmp_path / LONG)
    recipe.write_text(RECIPE)
    environment = {"COLUMNS": columns, "ROLLTAP_ENGINE": None}
    printed = CliRunner().invoke(train_command, [str(recipe), "--dry-run"], env=environment)
    assert printed.exit_code == 0, printed.output
    lines = [shlex.split(line) for line in printed.stdout.splitlines() if "CUDA_VISIBLE" in line]
    assert len(lines) == 5
    assert lines.pop()[-2] == "--out"
    for words in lines:
        assert words[3] == str(tmp_path / LONG)
        assert words[-2:] == ["--dtype", "bfloat16"]
