"""The planner's bytes against real tensors, and by hand."""

import gc
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile

from rolltap.trainer.models.merging import merge_again
from rolltap.trainer.training.plan import traced_step
from rolltap.trainer.training.plan.memory import (
    Machine,
    Micro,
    checkpoints_of,
    fixed,
    memory_of,
    micro_batch,
)
from rolltap.trainer.training.plan.model import fake_step, model_numbers
from rolltap.trainer.training.plan.stand_ins import ATTENTION, delta_rules, without_values
from rolltap.trainer.training.plan.traced_step import StepMemory, at
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.step import linear
from rolltap.trainer.training.step.model import prepare
from rolltap.trainer.training.step.pack import Pack
from tests.conftest import ROOT
from tests.deep import cases
from tests.trainer.training.plan.conftest import TRACED
from tests.trainer.training.step.small_models import configuration, make_row, small_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:The following:RuntimeWarning",  # PEFT, of patterns for experts
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)

LORA = {"r": 4, "target_modules": "all-linear"}
LAYERS = 5


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory):
    """A function: a family, and keys of a recipe -> a recipe of its small model."""

    def recipe_of(family="qwen3", **keys):
        folder = tmp_path_factory.mktemp(family)
        configuration(family, num_hidden_layers=LAYERS).save_pretrained(folder)
        return Recipe(model=folder, steps=1, **keys)

    return recipe_of


@pytest.fixture(scope="module")
def traced(recipe_of):
    """A function: a family -> the memory of a step of its small model, traced once."""

    @cache
    def traced(family="qwen3", *, lora=False, gpu=True, checkpointing=True):
        grpo = {"activation_checkpointing": checkpointing}
        recipe = recipe_of(family, grpo=grpo, lora=LORA if lora else {})
        numbers = model_numbers(recipe, "float32", gpu=gpu)
        assert numbers.fla == (gpu and numbers.linear_layers > 0)
        return fake_step(recipe, numbers, "float32", sharded=False).memory()

    return traced


def machine(processes=1, *, dtype="float32", gpu=None):
    return Machine(processes, nodes=1, engines=(), gpu=gpu, shared_gpu=False, dtype=dtype)


def bytes_of_a_step(model, tokens):
    """Return the most bytes that torch holds during a step of a row, more than before it."""
    ids = np.arange(tokens) % 100

    def step():
        model(**Pack([[make_row(ids)]]).inputs()).log_probs.sum().backward()

    with without_values(delta_rules(model)):  # whose kernels have no values here either
        step()  # gradients are in place, as the plan counts them elsewhere
        gc.collect()
        gc.disable()  # what other tests left must not be freed meanwhile
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                step()
        finally:
            gc.enable()
    events = profiled.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(np.cumsum([event.nbytes() for event in changes]))


FAMILIES = [
    ("qwen3", False),
    ("qwen3.5", True),
    ("qwen3", True),
    ("qwen3-moe", False),
    ("qwen3-moe", True),
    ("deepseek-v3", False),
]


@pytest.mark.parametrize(("family", "lora"), cases(FAMILIES, 0, 1))
def test_a_step_of_all_layers_takes_what_is_traced_with_few_of_them(traced, family, lora):
    model = prepare(small_model(family, num_hidden_layers=LAYERS), 1.0)
    model.set_attn_implementation(ATTENTION)
    if lora:
        merge_again(get_peft_model(model, LoraConfig(**LORA)))
    model.activation_checkpointing_enable({"use_reentrant": False})
    taken = bytes_of_a_step(model.train(), TRACED[-1])
    assert traced(family, lora=lora).peak[-1] == pytest.approx(taken, rel=0.05)


def test_checkpoints_are_a_hidden_state_of_each_layer_and_may_rest_in_the_hosts_memory(traced):
    hidden = 64 * 4 * (TRACED[-1] - 1)  # the last token is no context
    here = traced()
    there = here.offloaded()
    assert LAYERS <= here.kept[-1] / hidden < LAYERS + 4
    assert here.checkpoints[-1] == (LAYERS - 2) * hidden  # two layers are traced
    assert here.kept[-1] - there.kept[-1] == here.checkpoints[-1]
    assert here.peak[-1] - there.peak[-1] == here.checkpoints[-1]


def test_a_row_of_several_chunks_keeps_what_a_row_of_one_does(traced, monkeypatch):
    whole = traced("qwen3.5", lora=True)
    monkeypatch.setattr(linear, "CHUNK", TRACED[0] // 2)
    chunked = traced.__wrapped__("qwen3.5", lora=True)
    assert chunked.kept[-1] == pytest.approx(whole.kept[-1], rel=0.1)
    assert chunked.peak[-1] < whole.peak[-1]


def test_without_checkpointing_all_activations_are_kept(traced):
    assert traced(checkpointing=False).kept[-1] > 5 * traced().kept[-1]


def test_the_formula_of_linear_attention_takes_more_than_the_kernels(traced):
    formula = traced("qwen3.5", lora=True, gpu=False)
    assert formula.peak[-1] > 1.1 * traced("qwen3.5", lora=True).peak[-1]


def test_memory_between_the_traced_rows_is_on_lines_and_goes_on_with_the_last():
    step = StepMemory(*np.array([[1000, 3000], [1100, 3300], [500, 1500]]))
    places = {0: 0, 256: 550, 512: 1100, 768: 2200, 1024: 3300, 2048: 7700}
    assert {tokens: at(step.peak, tokens) for tokens in places} == places
    for tokens, memory in places.items():
        assert step.longest(memory) == pytest.approx(tokens, abs=1)
    assert step.longest(-1) == 0
    assert step.offloaded().longest(1800) == 1024


QWEN3 = (8.04e9, 147_456, 0)
QWEN3_5 = (8.41e9, 32_768, 24 * (32 * 128 * 128 * 4 + 8192 * 4 * 2))


BY_HAND = [("qwen3-4b", QWEN3), ("qwen3.5-4b", QWEN3_5)]


@pytest.mark.parametrize(("name", "expected"), cases(BY_HAND))
def test_models_of_four_billion_have_the_numbers_that_are_computed_by_hand(name, expected):
    weights, token, state = expected
    recipe = Recipe(model=ROOT / "tests" / "models" / name, steps=1)
    numbers = model_numbers(recipe, "bfloat16")
    assert numbers.weights == pytest.approx(weights, rel=0.01)
    assert (numbers.token, numbers.state) == (token, state)
    # weights, gradients and two moments in float32
    taken = fixed(recipe, machine(dtype="bfloat16"), numbers).total
    assert taken == pytest.approx(16 * numbers.parameters)


LONG_ROWS = [("qwen3-4b", True, 256_000), ("qwen3.5-4b", False, 200_000)]


@pytest.mark.parametrize(("name", "offload", "tokens"), cases(LONG_ROWS))
def test_a_gpu_of_80_gib_takes_long_rows(name, offload, tokens, monkeypatch):
    monkeypatch.setattr(traced_step, "LENGTHS", (8192, 32768, 98304))
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 32768)
    folder = ROOT / "tests" / "models" / name
    grpo = {"offload_checkpoints": offload}
    recipe = Recipe(model=folder, steps=1, lora={**LORA, "r": 16}, grpo=grpo)
    one = machine(dtype="bfloat16", gpu=80 * 2**30)
    numbers = model_numbers(recipe, "bfloat16", gpu=True)
    step = fake_step(recipe, numbers, "bfloat16", sharded=False).memory()
    assert memory_of(recipe, one, numbers, Micro(1, 1000), step).longest_row > tokens


def test_a_micro_batch_has_its_part_of_the_sessions_in_the_models_context(recipe_of):
    recipe = recipe_of(groups_per_step=3, sessions=5, grpo={"gradient_accumulation_steps": 2})
    numbers = model_numbers(recipe, "float32")
    assert micro_batch(recipe, numbers, 2) == Micro(4, 4096)
    shorter = recipe.model_copy(update={"max_tokens": 100})
    assert micro_batch(shorter, numbers, 4) == Micro(2, 100)
    assert micro_batch(shorter, numbers, 4).tokens == 200


def test_sharded_processes_share_what_they_hold_and_others_have_buckets(recipe_of):
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


TRAINED = SimpleNamespace(trained=100, parameters=100, item=2, weights=200)
"""Numbers of a model, without the others."""


@pytest.mark.parametrize(("optim", "moments"), [("adamw_torch", 2), ("sgd", 0), ("adagrad", 1)])
def test_optimizers_keep_different_amounts(tmp_path, optim, moments):
    recipe = Recipe(model=tmp_path, steps=1, grpo={"optim": optim})
    assert fixed(recipe, machine(), TRAINED)["optimizer"] == moments * 4 * 100
    assert checkpoints_of(recipe, TRAINED)["checkpoint_bytes"] == (1 + moments) * 4 * 100


@pytest.mark.parametrize(
    ("limit", "steps", "number"),
    [(None, 10, 3), (1, 10, 2), (0, 10, 10), (5, 3, 3)],
)
def test_one_checkpoint_more_than_are_kept_is_there_while_it_is_written(
    tmp_path,
    limit,
    steps,
    number,
):
    grpo = {} if limit is None else {"save_total_limit": limit}
    recipe = Recipe(model=tmp_path, steps=steps, grpo=grpo)
    assert checkpoints_of(recipe, TRAINED)["checkpoints_at_once"] == number


def test_a_folder_is_only_read(recipe_of):
    recipe = recipe_of()
    before = {path: path.read_bytes() for path in recipe.model.iterdir()}
    model_numbers(recipe, "float32", gpu=True)
    assert {path: path.read_bytes() for path in recipe.model.iterdir()} == before
