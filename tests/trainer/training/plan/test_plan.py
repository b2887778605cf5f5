"""Plans of whole recipes: what is refused, with its fix, what is said of the rest, and how it is printed."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from rolltap.trainer.cli.train import train_command
from rolltap.trainer.training.plan import findings, trace
from rolltap.trainer.training.plan import model as model_module
from rolltap.trainer.training.plan.memory import GIB, SLACK, machine_of
from rolltap.trainer.training.plan.plan import NODE, plan
from rolltap.trainer.training.recipe import Machine, Recipe
from tests.trainer.training.step.small_models import configuration

LORA = {"r": 4, "target_modules": "all-linear"}
GPU = {"gpu_gib": 80}
MODELS = Path(__file__).resolve().parents[3] / "models"


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(trace, "LENGTHS", (256, 512, 1024))
    monkeypatch.setattr(trace, "FEW", 64)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)  # tokens of the small models: 200


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny Qwen3, without weights."""
    configuration("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def planned(model, *, engine=None, processes=None, machine=GPU, runs=(), out=None, **keys):
    keys = {"tasks": "tasks.jsonl", "harness": "pi", "steps": 10, "max_tokens": 1000, **keys}
    recipe = Recipe(model=model, machine=Machine(**machine) if machine else None, **keys)
    return plan(recipe, engine=engine, processes=processes, runs=runs, out=out)


def text_of(found):
    """Return a plan as it is printed."""
    console = Console(width=100, record=True, file=SimpleNamespace(write=lambda _: None, flush=lambda: None))
    console.print(found)
    return console.export_text()


def said(found, level):
    return [finding.text for finding in found.findings if finding.level == level]


def test_a_recipe_without_weights_and_tasks_can_start_and_is_told_what_is_missing(model):
    found = planned(model, lora=LORA, publish="lora")
    assert found.can_start
    assert said(found, "note") == ["the folder model has no weights", "the task file tasks.jsonl is not there"]


def test_a_folder_of_tasks_is_there_and_its_tasks_are_counted(model):
    harbor = MODELS.parents[1] / "recipes" / "swe" / "mini"  # of which one folder is a task
    assert said(planned(model, tasks=harbor, lora=LORA, publish="lora"), "note") == ["the folder model has no weights"]
    found = planned(model, tasks=harbor, groups_per_step=2, lora=LORA, publish="lora")
    assert "has 1 tasks" in said(found, "error")[0]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"publish": "lora", "lora": {**LORA, "r": 1024}}, "lora.r = 1024"),
        ({"sessions": 2, "machine": {**GPU, "processes": 4}}, "only 2 sessions"),
        ({"processes": 2, "machine": {**GPU, "processes": 4}}, "machine.processes is 4, but"),
        ({"machine": {**GPU, "processes": 3, "nodes": 2}}, "processes = 3 is no multiple of nodes = 2"),
        ({"engine": "http://a:1,http://b:2", "machine": {**GPU, "engines": 3}}, "machine.engines is 3, but"),
        ({"max_tokens": 5000}, "more than the model's context"),
        ({"machine": None}, "tied embeddings"),
        ({"harness": "nobody"}, "nobody"),
        ({"grpo": {"num_iterations": 0}}, "num_iterations"),
        ({"grpo": {"loss_type": "none"}}, "loss_type"),
        ({"grpo": {"temperature": 0.5}, "recorder": {"rolltap_sampling": '{"temperature": 1}'}}, "temperature"),
        ({"lora": {"r": 4, "target_modules": ["nothing"]}}, "nothing"),
        ({"machine": {"gpu_gib": 0.001}}, "weights, gradients and optimizer"),
        ({"machine": {"gpu_gib": 1.6}}, "a smaller max_tokens"),
        ({"machine": {"gpu_gib": 3.0}}, "does not hold a session"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_an_error_with_a_fix(model, keys, text):
    found = planned(model, **keys)
    assert not found.can_start
    named = [finding for finding in found.findings if finding.level == "error" and text in finding.text + finding.fix]
    assert named, found.findings
    assert all(finding.fix for finding in named)


@pytest.mark.parametrize(("use_cpu", "nodes", "refused"), [(False, 1, True), (True, 1, False), (False, 2, False)])
def test_each_process_that_trains_on_this_machines_gpus_has_one(monkeypatch, tmp_path, use_cpu, nodes, refused):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    recipe = Recipe(model=tmp_path, steps=1, machine=Machine(processes=2, nodes=nodes), grpo={"use_cpu": use_cpu})
    found = findings.of_recipe(recipe, machine_of(recipe, None, None, online=False))
    assert any("2 processes on a machine with 1 GPUs" in finding.text for finding in found) == refused


def test_a_folder_without_a_model_is_one_error_and_no_plan(tmp_path):
    found = planned(tmp_path)
    assert len(said(found, "error")) == 1
    assert found.model is None
    assert not found.can_start
    json.dumps(found.to_json())


def test_linear_attention_without_its_kernels_is_a_warning_with_a_command_that_works(model, monkeypatch):
    monkeypatch.setattr(findings, "kernels", lambda _: {"flash-linear-attention": False, "causal-conv1d": True})
    found = planned(model, lora=LORA)
    assert found.can_start
    (warning,) = [finding for finding in found.findings if "linear attention" in finding.text]
    assert (warning.level, warning.fix) == (
        "warning",
        "pip install '.[train,kernels]' in a clone, on the machine with the GPU",
    )


@pytest.fixture
def hybrid(tmp_path):
    """The folder of a tiny Qwen3.5, without weights."""
    configuration("qwen3.5").save_pretrained(tmp_path / "hybrid")
    return tmp_path / "hybrid"


@pytest.mark.parametrize(
    ("gpu", "here", "installed", "fast"),
    [(True, False, False, True), (True, True, True, True), (True, True, False, False), (False, False, True, False)],
    ids=["of another machine", "here, installed", "here, not installed", "none"],
)
def test_a_gpu_has_the_kernels_that_are_installed_here_or_those_of_the_documented_installation(
    hybrid, gpu, here, installed, fast, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: here)
    monkeypatch.setattr(model_module, "kernels", lambda _: {"flash-linear-attention": installed})
    assert model_module.model_numbers(Recipe(model=hybrid, steps=1), "bfloat16", gpu=gpu).fla == fast


@pytest.mark.parametrize(("machine", "level"), [(GPU, "note"), (None, "warning")])
def test_a_plan_says_which_kernels_it_counts_with(hybrid, machine, level, monkeypatch):
    monkeypatch.setattr(findings, "kernels", lambda _: {"flash-linear-attention": False})
    found = planned(hybrid, lora=LORA, machine=machine)
    package = "flash-linear-attention" if machine else "torch"
    attention = "FlexAttention" if machine else "torch's FlashAttention"
    assert f"kernels  {attention}; {package} computes linear attention" in text_of(found)
    (finding,) = [finding for finding in found.findings if "no flash-linear-attention here" in finding.text]
    assert finding.level == level


def test_an_engine_of_a_hybrid_with_fewer_blocks_than_calls_is_an_error(hybrid):
    found = planned(hybrid, lora=LORA, concurrency=50)
    assert (found.memory.engine.sequences, found.can_start) == (100, True)
    assert "100 at once in an engine: 2 for each session" in text_of(found)
    short = replace(found.memory, engine=replace(found.memory.engine, blocks=99))
    every = findings.of_engine(found.recipe, found.machine, found.model, found.micro_batch, short)
    (error,) = [finding for finding in every if finding.level == "error"]
    assert (error.level, error.fix) == ("error", "a smaller concurrency")
    assert "has 99 blocks, and each of its 100 calls needs one" in error.text


def test_an_engine_that_shares_a_gpu_has_a_block_for_each_call_however_short_sessions_are(hybrid):
    found = planned(hybrid, lora=LORA, machine={"gpu_gib": 8, "shared_gpu": True}, max_tokens=16, concurrency=1)
    assert found.memory.engine.blocks >= found.memory.engine.sequences == 16


def test_kernels_that_are_compiled_with_nvcc_are_a_remark(model, monkeypatch):
    there = {"flash-linear-attention": True, "causal-conv1d": False, "mamba-ssm": False}
    monkeypatch.setattr(findings, "kernels", lambda _: there)
    found = planned(model, lora=LORA)
    assert not any("linear attention" in text for text in said(found, "warning"))
    (note,) = [finding for finding in found.findings if "causal-conv1d" in finding.text]
    assert (note.level, "mamba-ssm" in note.text) == ("note", True)
    assert "pip install --no-build-isolation causal-conv1d mamba-ssm" in note.fix


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
def test_an_adapter_on_experts_is_planned_and_is_not_served(tmp_path):
    configuration("qwen3-moe").save_pretrained(tmp_path)
    assert planned(tmp_path, lora=LORA).can_start
    refused = planned(tmp_path, lora=LORA, publish="lora")
    assert not refused.can_start
    assert "vLLM does not serve an adapter on parameters" in said(refused, "error")[0]


def row_of(model, *, room, **keys):
    """Plan eight sessions on a GPU that leaves `room` for their row, in shares of it."""
    found = planned(model, lora=LORA, **keys)
    needed = found.memory.row.total
    gib = (found.memory.always.total + room * needed) / SLACK / GIB
    return planned(model, lora=LORA, **keys, machine={"gpu_gib": gib})


def fixes(found):
    return [finding.fix for finding in found.findings if "sessions of 1,000 tokens at once" in finding.text]


@pytest.mark.parametrize(
    ("room", "grpo", "fix"),
    [
        (1.01, {}, None),
        (0.98, {}, "grpo.offload_checkpoints = true, or grpo.gradient_accumulation_steps = 2"),
        (0.3, {}, "grpo.gradient_accumulation_steps = 4"),
        (0.3, {"gradient_accumulation_steps": 2}, "grpo.gradient_accumulation_steps = 8"),
    ],
)
def test_a_row_that_does_not_fit_is_a_warning_with_the_number_of_micro_batches_that_do(model, room, grpo, fix):
    found = row_of(model, room=room, grpo=grpo)
    warned = fixes(found)
    assert [given.startswith(fix) for given in warned] == ([] if fix is None else [True])
    assert (found.memory.longest_row >= found.micro_batch.tokens) == (fix is None)
    assert f"for a row of at most {found.memory.longest_row:,} tokens" in text_of(found)


def test_a_shared_gpu_is_divided_and_nothing_is_left_over_twice(model):
    found = planned(model, lora=LORA, machine={"gpu_gib": 8, "shared_gpu": True}, concurrency=3)
    memory = found.memory
    assert memory.engine.sessions >= 3
    assert memory.always.total + memory.room + memory.engine.sizes.total <= 8 * GIB
    assert memory.row.total <= memory.room
    assert memory.engine.sizes.total == int(memory.engine.utilization * 8 * GIB)
    assert f"--gpu-memory-utilization {memory.engine.utilization:.2f}" in found.lines[1]


def test_lines_start_as_many_engines_and_processes_as_there_are(model):
    machine = {"processes": 3, "engines": 2, "gpu_gib": 80}
    found = planned(model, lora={**LORA, "r": 12}, publish="lora", machine=machine, out=Path("o"))
    served = f"rolltap serve {model} --port 800%d --max-model-len 1000 --lora-rank 16"
    served += " -- --max-num-seqs 16 --dtype bfloat16"
    program = "torchrun --standalone --nproc-per-node 3 -m rolltap train recipe.toml"
    engines = "http://127.0.0.1:8000,http://127.0.0.1:8001"
    assert found.lines[1:] == [
        *(f"CUDA_VISIBLE_DEVICES={i} {served % i}" for i in range(2)),
        f"CUDA_VISIBLE_DEVICES=2,3,4 {program} --engine {engines} --out o",
    ]
    found = planned(model, lora=LORA, publish="lora", ahead=3)
    assert " --lora-rank 8 --ahead 3 -- " in found.lines[1]
    assert "published as lora, 5 adapters loaded" in text_of(found)


def test_one_line_starts_the_training_on_each_node(model):
    machine = {"processes": 4, "nodes": 2, "engines": 1, "gpu_gib": 80}
    found = planned(model, lora=LORA, machine=machine, out=Path("o"))
    where = "--nnodes 2 --node-rank $NODE --master-addr $HEAD --nproc-per-node 2"
    train = "rolltap train recipe.toml --engine http://127.0.0.1:8000 --out o"
    assert found.lines[2:] == [NODE, f"CUDA_VISIBLE_DEVICES=1,2 torchrun {where} -m {train}"]
    assert "training processes: 4 on 2 nodes, engines: 1" in text_of(found)
    alone = planned(model, lora=LORA, machine={**machine, "nodes": 1}, out=Path("o"))
    assert (alone.memory, alone.work) == (found.memory, found.work)


def test_engines_of_other_machines_have_lines_and_gpus_of_their_own(model):
    urls = "http://127.0.0.1:9000,http://a:8000,http://a:8001,http://b"
    machine = {**GPU, "engines": 4, "processes": 2}
    found = planned(model, engine=urls, machine=machine, lora=LORA, out=Path("runs/x"))
    served = f"rolltap serve {model}"
    starts = [line.partition(" --max-model-len")[0] for line in found.lines[1:-1]]
    assert starts == [
        f"CUDA_VISIBLE_DEVICES=0 {served} --port 9000",
        "# on a, with a copy of engine.key:",
        f"CUDA_VISIBLE_DEVICES=0 {served} --host a --port 8000",
        f"CUDA_VISIBLE_DEVICES=1 {served} --host a --port 8001",
        "# on b, with a copy of engine.key:",
        f"CUDA_VISIBLE_DEVICES=0 {served} --host b --port 80",
        "# here:",
    ]
    assert found.lines[-1].startswith("CUDA_VISIBLE_DEVICES=1,2 torchrun --standalone ")
    assert found.lines[-1].endswith(f" --engine {urls} --out runs/x")


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.2:1", "http://[::1]:1"])
def test_a_loopback_address_is_this_machine(model, url):
    assert not any("--host" in line or line.startswith("#") for line in planned(model, engine=url).lines)


def test_recorded_runs_need_no_engine_and_no_rollouts(model):
    machine = {**GPU, "engines": 2, "shared_gpu": True}
    keys = {"harness": None, "tasks": None, "machine": machine}
    found = planned(model, runs=[Path("runs/a"), Path("runs/b")], out=Path("runs/x"), **keys)
    assert found.can_start, found.findings
    assert found.lines == ["CUDA_VISIBLE_DEVICES=0 rolltap train recipe.toml --from runs/a --from runs/b --out runs/x"]
    assert found.memory.engine is None
    assert not any("engine" in finding.text or "harness" in finding.text for finding in found.findings)


@pytest.mark.parametrize(
    ("dtype", "machine", "expected"),
    [(None, GPU, "bfloat16"), (None, None, "float32"), ("bfloat16", None, "bfloat16"), ("float32", GPU, "float32")],
)
def test_the_type_is_the_recipes_or_follows_from_the_planned_gpu(model, dtype, machine, expected):
    found = planned(model, dtype=dtype, machine=machine, lora=LORA)
    assert found.machine.dtype == expected
    assert ("--dtype" in found.lines[1]) == bool(dtype or machine)
    assert f"--dtype {expected}" in found.lines[1] or not (dtype or machine)
    assert ("the default with" in text_of(found)) == (dtype is None)
    assert found.to_json()["recipe"]["dtype"] == dtype


def test_without_a_gpu_linear_attention_is_planned_in_the_type_that_vllm_computes_it_in(tmp_path):
    shutil.copytree(MODELS / "qwen3.5-4b", tmp_path / "model")
    assert machine_of(Recipe(model=tmp_path / "model", steps=1), None, None, online=True).dtype == "bfloat16"
    assert machine_of(Recipe(model=tmp_path / "model", steps=1), None, None, online=False).dtype == "float32"


def test_what_rollouts_of_the_model_lack_is_a_warning_with_its_fix(model, save_tokenizer):
    save_tokenizer(model, "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}")
    (finding,) = [finding for finding in planned(model, lora=LORA).findings if "cannot be read" in finding.text]
    assert (finding.level, "rolltap_tool_parser" in finding.fix) == ("warning", True)
    chosen = planned(model, lora=LORA, recorder={"rolltap_tool_parser": "hermes"})
    assert not any("cannot be read" in finding.text for finding in chosen.findings)


def test_arguments_of_the_model_reach_the_plan(model):
    plain, short = planned(model), planned(model, grpo={"model_init_kwargs": {"num_hidden_layers": 1}})
    assert short.model.token < plain.model.token
    assert short.memory.row.total < plain.memory.row.total


@pytest.mark.parametrize(("limit", "steps", "number"), [(None, 10, 3), (1, 10, 2), (0, 10, 10), (5, 3, 3)])
def test_one_checkpoint_more_than_are_kept_is_there_while_it_is_written(model, limit, steps, number):
    found = planned(model, steps=steps, grpo={} if limit is None else {"save_total_limit": limit})
    one = 3 * 4 * found.model.trained  # with AdamW's moments, in float32
    assert (found.work["checkpoints_at_once"], found.work["checkpoint_bytes"]) == (number, one)


def test_work_is_counted_without_replaced_groups(model):
    keys = {"groups_per_step": 3, "sessions": 4, "save_steps": 3, "grpo": {"num_iterations": 2}}
    found = planned(model, replace_zero_variance=5, **keys)
    assert list(found.work.values())[:5] == [10, 12, 120, 20, 4]
    assert found.micro_batch.sessions == 12


def test_a_plan_is_json_and_a_table(model):
    found = planned(model, lora=LORA, publish="lora")
    data = json.loads(json.dumps(found.to_json()))
    assert data["can_start"] is True
    assert data["memory"]["always"] == found.memory.always
    text = text_of(found)
    assert "This can start." in text
    assert "CUDA_VISIBLE_DEVICES=1 rolltap train" in text


RECIPE = """
model = "a model with a long name that has spaces"
tasks = "tasks.jsonl"
harness = "pi"
steps = 10
max_tokens = 1000
publish = "lora"
lora = {r = 4, target_modules = "all-linear"}
machine = {engines = 4, processes = 4, gpu_gib = 80}
"""


@pytest.mark.parametrize("columns", ["80", "20", None], ids=["terminal", "narrow", "pipe"])
def test_commands_are_printed_whole(tmp_path, columns):
    model, recipe = tmp_path / "a model with a long name that has spaces", tmp_path / "recipe.toml"
    configuration("qwen3").save_pretrained(model)
    recipe.write_text(RECIPE)
    environment = {"COLUMNS": columns, "ROLLTAP_ENGINE": None}
    printed = CliRunner().invoke(train_command, [str(recipe), "--dry-run"], env=environment)
    assert printed.exit_code == 0, printed.output
    printed_lines = printed.stdout.splitlines()
    served = [shlex.split(line) for line in printed_lines if "rolltap serve" in line]
    assert [words[3] for words in served] == [str(model)] * 4
    assert all(words[-2:] == ["--dtype", "bfloat16"] for words in served)
    trained = shlex.split(next(line for line in printed_lines if "torchrun" in line))
    urls = ",".join(f"http://127.0.0.1:{8000 + i}" for i in range(4))
    assert urls in trained
    assert trained[-2] == "--out"


def test_experts_are_asked_for_and_a_model_without_them_is_refused(model):
    assert any("has no experts" in text for text in said(planned(model, grpo={"routing": "recorded"}), "error"))
