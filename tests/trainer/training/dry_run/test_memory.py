"""The planner's bytes against what torch reports of the same models."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile

from rolltap.trainer.models.merging import merge_again
from rolltap.trainer.training.dry_run.memory import Rows, fixed, rows, variable
from rolltap.trainer.training.dry_run.model import model_numbers
from rolltap.trainer.training.forward.forest import Row
from rolltap.trainer.training.forward.passes import SegmentScorer
from rolltap.trainer.training.forward.sizes import WORKING, measure
from rolltap.trainer.training.recipe import Recipe
from tests.conftest import ROOT
from tests.deep import cases
from tests.trainer.training.grpo.tiny_models import FAMILIES, VOCABULARY

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:The following:RuntimeWarning",  # which PEFT has made for experts
)

LORA = {"r": 4, "target_modules": "all-linear"}
ROWS = {256: 4096, 512: 8192}
"""Tokens of a segment -> tokens of a row. Of fewer tokens the kernels' own memory is a good part."""
CASES = [
    ("qwen3", {}, "bfloat16"),
    ("qwen3", LORA, "bfloat16"),
    ("qwen3.5", {}, "float32"),
    ("qwen3.5", LORA, "bfloat16"),
    ("qwen3-moe", LORA, "float32"),
    ("qwen3-moe", LORA, "bfloat16"),
    ("qwen3-moe", {}, "bfloat16"),
]


@pytest.fixture(
    scope="module",
    params=cases(CASES, 1, 2, 4),
    ids=lambda case: f"{case[0]}-{'lora' if case[1] else 'full'}-{case[2]}",
)
def case(request, tmp_path_factory):
    """A recipe of a tiny model, the model's type, its numbers, and the model with real weights, as it is trained."""
    family, lora, dtype = request.param
    kind, config = FAMILIES[family]
    folder = tmp_path_factory.mktemp("model")
    config.save_pretrained(folder)
    recipe = Recipe(model=folder, steps=1, max_tokens=4096, lora=lora)
    model = kind._from_config(config, dtype=getattr(torch, dtype))
    if lora:
        model = get_peft_model(model, LoraConfig(**lora))
        merge_again(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    return recipe, dtype, model.train(), model_numbers(recipe, dtype)


def autocast(dtype):
    return nullcontext if dtype == "float32" else partial(torch.autocast, "cpu", getattr(torch, dtype))


def step(model, dtype, size):
    """Add the gradients of one row, all of whose tokens are scored, in segments of `size` tokens."""
    ids = np.random.default_rng(0).integers(3, VOCABULARY, ROWS[size]).astype(np.int32)
    scorer = SegmentScorer(autocast(dtype), 1.0, tokens_per_segment=size)
    scorer(model, [Row(ids, np.arange(1, ROWS[size]))]).logprobs.sum().backward()


def peak(act: Callable[[], None]) -> int:
    """Return the most bytes that torch held during `act`, more than before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        act()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(max(np.cumsum(changes)))


def test_weights_gradients_and_optimizer_are_planned_to_the_byte(case):
    recipe, dtype, model, numbers = case
    planned = fixed(recipe, numbers, 1, cuda=False)
    assert planned["weights"] == sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    step(model, dtype, 256)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert planned["gradients"] == sum(p.grad.nbytes if p.grad is not None else 4 * p.numel() for p in trained)
    masters = [parameter if parameter.itemsize == 4 else parameter.detach().float() for parameter in trained]
    for parameter, master in zip(trained, masters, strict=True):
        master.grad = parameter.grad if parameter.grad is not None else torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters)
    optimizer.step()
    moments = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim)
    copies = sum(master.nbytes for master, parameter in zip(masters, trained, strict=True) if master is not parameter)
    assert planned["optimizer"] == moments + copies


def test_costs_without_weights_are_those_that_are_measured_with_them(case):
    _, dtype, model, numbers = case
    planned = asdict(numbers.costs)
    assert planned == pytest.approx(asdict(measure(model, autocast(dtype))), rel=0.01, abs=64)


@pytest.mark.parametrize("size", cases(ROWS))
def test_the_peak_of_a_step_is_planned_within_a_seventh(case, size):
    recipe, dtype, model, numbers = case
    given = recipe.model_copy(update={"grpo": {"tokens_per_segment": size}})
    planned = variable(given, numbers, Rows(1, ROWS[size]), None)
    step(model, dtype, size)  # with gradients in place, as the plan counts them elsewhere
    taken = peak(lambda: step(model, dtype, size))
    saved = planned.sizes | {"activations": planned.sizes["activations"] / WORKING}
    assert sum(saved.values()) == pytest.approx(taken, rel=1 / 7)
    if not numbers.merged:  # of two layers, one's experts that are computed again are more than `WORKING` allows for
        assert planned.sizes.total > taken


ANCHORS = [("qwen3-4b", 8.04e9, 147_456, 0), ("qwen3.5-4b", 8.41e9, 32_768, 24 * (32 * 128 * 128 * 4 + 8192 * 4 * 2))]


@pytest.mark.parametrize(("name", "weights", "token", "segment"), cases(ANCHORS))
def test_models_of_four_billion_have_the_numbers_that_are_computed_by_hand(name, weights, token, segment):
    recipe = Recipe(model=ROOT / "tests" / "models" / name, steps=1, max_tokens=32_768)
    numbers = model_numbers(recipe, "bfloat16")
    assert numbers.weights == pytest.approx(weights, rel=0.01)
    assert numbers.costs.state_per_token == token
    assert numbers.costs.state_per_segment == segment
    four = fixed(recipe, numbers, 4, cuda=False)
    # 8 + 16 + 12 GB of a process: bfloat16 weights, float32 gradients, a quarter of three float32 copies
    assert four.total == pytest.approx(numbers.parameters * (2 + 4 + 12 / 4), rel=0.001)


@pytest.fixture
def plan_of(tmp_path):
    """A function: keys of a recipe, and the type -> the recipe of a tiny model, and the model's numbers."""
    FAMILIES["qwen3"][1].save_pretrained(tmp_path)

    def plan_of(dtype="float32", **keys):
        recipe = Recipe(model=tmp_path, steps=1, **keys)
        return recipe, model_numbers(recipe, dtype)

    return plan_of


def test_a_trace_has_at_most_the_models_context(plan_of):
    recipe, numbers = plan_of(groups_per_step=3, sessions=5, grpo={"gradient_accumulation_steps": 2})
    assert rows(recipe, numbers, 2) == Rows(4, 4096)
    assert rows(recipe.model_copy(update={"max_tokens": 100}), numbers, 4) == Rows(2, 100)


def test_the_optimizers_share_is_that_of_the_largest_owner(plan_of):
    recipe, numbers = plan_of("bfloat16")
    assert len(numbers.sizes) > 8
    assert fixed(recipe, numbers, 1000, cuda=False)["optimizer"] == 3 * 4 * max(numbers.sizes)
    assert fixed(recipe, numbers, 1, cuda=False)["optimizer"] == 3 * 4 * sum(numbers.sizes)


@pytest.mark.parametrize(("optim", "copies"), [("adamw_torch", 2), ("sgd", 0), ("adagrad", 1)])
def test_optimizers_keep_different_amounts(plan_of, optim, copies):
    recipe, numbers = plan_of(grpo={"optim": optim})
    assert fixed(recipe, numbers, 1, cuda=False)["optimizer"] == copies * 4 * numbers.parameters


def test_a_reference_model_is_a_second_copy_unless_an_adapter_is_trained(plan_of):
    recipe, numbers = plan_of("bfloat16", grpo={"beta": 0.1})
    assert fixed(recipe, numbers, 1, cuda=False)["reference model"] == numbers.weights
    adapter = recipe.model_copy(update={"lora": LORA})
    assert fixed(adapter, numbers, 1, cuda=False)["reference model"] == 0


def test_a_folder_is_only_read(plan_of, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    plan_of("bfloat16")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
