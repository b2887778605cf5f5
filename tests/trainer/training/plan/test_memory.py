"""The planner's bytes against real tensors, and by hand."""

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile

from rolltap.trainer.models.merging import merge_again
from rolltap.trainer.training.plan import trace
from rolltap.trainer.training.plan.memory import Machine, Micro, fixed, memory_of, micro_batch
from rolltap.trainer.training.plan.model import fake_step, model_numbers
from rolltap.trainer.training.plan.trace import ATTENTION, StepMemory, at, delta_rules, without_values
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.step.model import prepare
from rolltap.trainer.training.step.pack import Pack
from tests.conftest import ROOT
from tests.deep import cases
from tests.trainer.training.step.small_models import configuration, make_row, small_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:The following:RuntimeWarning",  # PEFT, of patterns for experts
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)

LORA = {"r": 4, "target_modules": "all-linear"}
LAYERS = 8
TRACED = (256, 512, 1024)
"""Tokens of the rows of small models."""


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(trace, "LENGTHS", TRACED)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)


@pytest.fixture
def recipe_of(tmp_path):
    """A function: a family, and keys of a recipe -> a recipe of its small model."""

    def recipe_of(family="qwen3", **keys):
        configuration(family, num_hidden_layers=LAYERS).save_pretrained(tmp_path)
        return Recipe(model=tmp_path, steps=1, **keys)

    return recipe_of


def machine(processes=1, *, dtype="float32", gpu=None):
    return Machine(processes, nodes=1, engines=(), gpu=gpu, shared_gpu=False, dtype=dtype)


def traced(recipe, *, dtype="float32", offload=False):
    step = fake_step(recipe, model_numbers(recipe, dtype, gpu=True), dtype, sharded=False)
    return step.memory(offload=offload)


def bytes_of_a_step(model, tokens):
    """Return the most bytes that torch holds during a step of a row, more than before it."""
    ids = np.arange(tokens) % 100

    def step():
        model(**Pack([[make_row(ids)]]).inputs()).log_probs.sum().backward()

    with without_values(delta_rules(model)):  # whose kernels have no values here either
        step()  # gradients are in place, as the plan counts them elsewhere
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(np.cumsum([event.nbytes() for event in events]))


CASES = [("qwen3", {}), ("qwen3.5", LORA), ("qwen3", LORA), ("qwen3-moe", {}), ("qwen3-moe", LORA), ("deepseek-v3", {})]


@pytest.mark.parametrize(("family", "lora"), cases(CASES, 0, 1))
def test_a_step_of_all_layers_takes_what_is_traced_with_few_of_them(recipe_of, family, lora):
    recipe = recipe_of(family, lora=lora)
    planned = traced(recipe)
    model = prepare(small_model(family, num_hidden_layers=LAYERS), 1.0)
    model.set_attn_implementation(ATTENTION)
    if lora:
        merge_again(get_peft_model(model, LoraConfig(**lora)))
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert planned.peak[-1] == pytest.approx(bytes_of_a_step(model.train(), TRACED[-1]), rel=0.05)


def test_checkpoints_are_a_hidden_state_of_each_layer_and_may_rest_in_the_hosts_memory(recipe_of):
    recipe = recipe_of()
    hidden = 64 * 4 * (TRACED[-1] - 1)  # the last token is no context
    here = traced(recipe)
    there = traced(recipe, offload=True)
    assert LAYERS <= here.kept[-1] / hidden < LAYERS + 4
    assert there.on_host[-1] == (LAYERS - 2) * hidden  # two layers are traced
    assert here.peak[-1] - there.peak[-1] == here.kept[-1] - there.kept[-1] == there.on_host[-1]
    assert here.on_host[-1] == 0


def test_without_checkpointing_all_activations_are_kept(recipe_of):
    everything = recipe_of(grpo={"activation_checkpointing": False})
    assert traced(everything).kept[-1] > 5 * traced(recipe_of()).kept[-1]


def test_the_formula_of_linear_attention_takes_more_than_the_kernels(recipe_of, monkeypatch):
    recipe = recipe_of("qwen3.5")
    monkeypatch.setattr(trace, "FEW", 256)
    numbers = model_numbers(recipe, "float32")
    assert not numbers.fla
    formula = fake_step(recipe, numbers, "float32", sharded=False).memory()
    assert formula.peak[-1] > 1.1 * traced(recipe).peak[-1]


def test_memory_between_the_traced_rows_is_on_lines_and_goes_on_with_the_last():
    step = StepMemory(kept=(1, 2, 3), peak=(1000, 1500, 3000), on_host=(0, 0, 0))
    lengths = (128, 256, 384, 512, 1024, 2048)
    assert [at(step.peak, tokens) for tokens in lengths] == [500, 1000, 1250, 1500, 3000, 6000]
    assert [step.longest(memory) for memory in (0, 500, 1250, 6000)] == [0, 128, 384, 2048]


ANCHORS = [("qwen3-4b", 8.04e9, 147_456, 0), ("qwen3.5-4b", 8.41e9, 32_768, 24 * (32 * 128 * 128 * 4 + 8192 * 4 * 2))]


@pytest.mark.parametrize(("name", "weights", "token", "state"), cases(ANCHORS))
def test_models_of_four_billion_have_the_numbers_that_are_computed_by_hand(name, weights, token, state):
    recipe = Recipe(model=ROOT / "tests" / "models" / name, steps=1)
    numbers = model_numbers(recipe, "bfloat16")
    assert numbers.weights == pytest.approx(weights, rel=0.01)
    assert (numbers.token, numbers.state) == (token, state)
    # weights, gradients and two moments in float32
    assert fixed(recipe, machine(dtype="bfloat16"), numbers).total == pytest.approx(16 * numbers.parameters)


@pytest.mark.parametrize(
    ("name", "offload", "tokens"), cases([("qwen3.5-4b", False, 200_000), ("qwen3-4b", True, 256_000)])
)
def test_a_gpu_of_80_gib_takes_long_rows(name, offload, tokens, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = Recipe(model=ROOT / "tests" / "models" / name, steps=1, lora={**LORA, "r": 16})
    one = machine(dtype="bfloat16", gpu=80 * 2**30)
    numbers = model_numbers(recipe, "bfloat16", gpu=True)
    step = fake_step(recipe, numbers, "bfloat16", sharded=False).memory(offload=offload)
    assert memory_of(recipe, one, numbers, Micro(1, 1000), step).longest_row > tokens


def test_a_micro_batch_has_its_part_of_the_sessions_in_the_models_context(recipe_of):
    recipe = recipe_of(groups_per_step=3, sessions=5, grpo={"gradient_accumulation_steps": 2})
    numbers = model_numbers(recipe, "float32")
    assert micro_batch(recipe, numbers, 2) == Micro(4, 4096)
    shorter = recipe.model_copy(update={"max_tokens": 100})
    assert micro_batch(shorter, numbers, 4) == Micro(2, 100)
    assert micro_batch(shorter, numbers, 4).tokens == 200


def test_sharded_processes_share_weights_gradients_and_optimizer_and_others_have_buckets(recipe_of):
    recipe = recipe_of(grpo={"sharding": "full", "beta": 0.1})
    numbers = model_numbers(recipe, "bfloat16")
    alone = fixed(recipe, machine(), numbers)
    four = fixed(recipe, machine(4), numbers)
    for name in ("weights", "gradients", "optimizer", "reference model"):
        assert four[name] == pytest.approx(alone[name] / 4, abs=1)
    assert four["gathered layers"] > 0
    assert alone["reference model"] == alone["weights"]
    whole = fixed(recipe_of(), machine(4), numbers)
    assert whole["buckets"] == whole["gradients"] == alone["gradients"]
    adapter = recipe.model_copy(update={"lora": LORA})
    assert fixed(adapter, machine(), numbers)["reference model"] == 0


@pytest.mark.parametrize(("optim", "moments"), [("adamw_torch", 2), ("sgd", 0), ("adagrad", 1)])
def test_optimizers_keep_different_amounts(recipe_of, optim, moments):
    recipe = recipe_of(grpo={"optim": optim})
    numbers = model_numbers(recipe, "float32")
    assert fixed(recipe, machine(), numbers)["optimizer"] == moments * 4 * numbers.parameters


def test_a_folder_is_only_read(recipe_of, tmp_path):
    recipe = recipe_of()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    traced(recipe)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
