"""Memory that segments take, counted on the model, and the sizes chosen for it."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltap.trainer.training.forward.forest import Row, build_forest, leaves_before, own_tokens
from rolltap.trainer.training.forward.passes import Grove, SegmentScorer
from rolltap.trainer.training.forward.sizes import SIZES, Costs, measure
from tests.trainer.training.grpo.tiny_models import COMMON, FAMILIES, VOCABULARY, tiny

HEADS, SIZE = COMMON["num_key_value_heads"], COMMON["head_dim"]

COSTS = Costs(
    state_per_token=100.0,
    state_per_segment=0.0,
    gradient_per_token=100.0,
    gradient_per_segment=0.0,
    graph_per_token=1000.0,
    graph=0.0,
    gradient_per_position=10.0,
    head_gradient=0.0,
    logits_per_token=0.0,
    logits_tokens=100,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_costs_are_counted_on_the_model(family):
    costs = measure(tiny(family), nullcontext)
    attention = FAMILIES[family][1].layer_types.count("full_attention") if family == "qwen3.5" else 2
    assert costs.state_per_token == attention * 2 * HEADS * SIZE * 4
    assert (costs.state_per_segment > 0) == (family == "qwen3.5")
    assert costs.gradient_per_token == costs.state_per_token
    assert costs.gradient_per_segment == costs.state_per_segment
    assert costs.graph_per_token > 10 * costs.state_per_token
    assert costs.gradient_per_position == 2 * HEADS * SIZE * 8
    assert costs.logits_per_token >= 4 * VOCABULARY


def test_in_bf16_a_state_is_half_as_large_and_its_gradient_is_not():
    costs = measure(tiny("llama").bfloat16(), nullcontext)
    assert costs.state_per_token == 2 * 2 * HEADS * SIZE * 2
    assert costs.gradient_per_token == 2 * costs.state_per_token


def test_a_model_is_as_before_afterwards():
    model = tiny("qwen3.5")
    measure(model, nullcontext)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3.5"])
def test_costs_predict_what_the_backward_pass_of_a_long_row_saves(family):
    model = tiny(family)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    costs = measure(model, nullcontext)
    now: Counter[tuple[int, int]] = Counter()
    most = 0

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal most
            self.tensor, storage = tensor.detach(), tensor.untyped_storage()
            self.key = (storage.data_ptr(), storage.nbytes())
            now[self.key] += storage.data_ptr() not in own
            most = max(most, sum(size for (_, size), count in now.items() if count))

        def __del__(self) -> None:
            now[self.key] -= self.key[0] not in own

    length, size = 1200, 256
    ids = np.random.default_rng(0).integers(3, VOCABULARY, length).astype(np.int32)
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        rows = [Row(ids, np.arange(length - 5, length))]
        SegmentScorer(nullcontext, 1.0, tokens_per_segment=size)(model, rows).logprobs.sum().backward()
    assert most == pytest.approx(costs.graph + costs.graph_per_token * length / 5, rel=0.1)


def most_kept(model: Any, autocast: Any, rows: list[Row], size: int, monkeypatch) -> int:
    """The most bytes of states and their gradients that a backward pass of `rows` keeps at once."""
    most = 0
    add = Grove._add

    def watched(self, segment, gradients):
        nonlocal most
        add(self, segment, gradients)
        alive = [tensor for state in self._states.values() for layer in state for tensor in layer]
        alive += [tensor for state in self._gradients.values() for tensor in state]
        most = max(most, sum(tensor.nbytes for tensor in [*self.paths.tensors, *alive]))

    monkeypatch.setattr(Grove, "_add", watched)
    SegmentScorer(autocast, 1.0, tokens_per_segment=size)(model, rows).logprobs.sum().backward()
    return most


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("number", [1, 3])
def test_costs_predict_the_states_and_gradients_of_a_backward_pass(size, number, monkeypatch):
    model = tiny("qwen3.5").bfloat16()
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    costs, length = measure(model, autocast), 1024 + size
    rows = [Row(np.full(length + 1, 3 + i, np.int32), np.array([length])) for i in range(number)]
    most = most_kept(model, autocast, rows, size, monkeypatch)
    # the last segments are not continued, and have no states
    inner = length - size
    assert most == pytest.approx(costs.parts(size, number * inner, inner).states, rel=0.01)


def hybrid() -> Any:
    """A model whose state takes as much as the keys and values of 1,728 tokens: in Qwen3.5-4B, as those of 1,584."""
    kind, config = FAMILIES["qwen3.5"]
    large = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    return kind(type(config)(**config.to_dict() | large)).train()


def session(turns: int) -> list[Row]:
    """The traces of a session that asks a side question after each turn of 20 tokens. They are sorted."""
    random = np.random.default_rng(0)
    line = random.integers(3, VOCABULARY, 20 * (turns + 1)).astype(np.int32)
    rows = [Row(line, np.array([len(line) - 1]))]
    for turn in range(1, turns + 1):
        ids = np.concatenate([line[: 20 * turn], random.integers(3, VOCABULARY, 8).astype(np.int32)])
        rows.append(Row(ids, np.array([len(ids) - 1])))
    return sorted(rows, key=lambda row: row.ids.tobytes())


def test_a_state_is_budgeted_for_each_branch_of_a_session(monkeypatch):
    model, rows = hybrid(), session(60)
    costs, tokens, longest = measure(model, nullcontext), sum(own_tokens(rows)), max(len(row.ids) for row in rows)
    inner = sum(segment.inner for segment in build_forest(rows, 1024))
    most = most_kept(model, nullcontext, rows, 1024, monkeypatch)
    assert most > inner * costs.state_per_segment > 5 * costs.parts(1024, tokens, longest).states
    planned = costs.parts(1024, tokens, longest, sum(leaves_before(rows)))
    assert planned.states == pytest.approx(most, rel=0.05)


def sizes(memory: float, **options: Any) -> Any:
    """The sizes for four rows of 10,000 tokens that share nothing."""
    return COSTS.sizes(memory, 40_000, 10_000, **options)


def test_the_largest_size_that_fits_is_chosen_or_the_given_one_in_parts_where_states_do_not_fit():
    for memory, size in [(1e9, SIZES[0]), (8e6 + 1.25 * 1000 * 1024 + 10 * 10_000, 1024)]:
        assert sizes(memory)[:2] == (size, None)
    given = sizes(6e6, among=[512])
    assert given.tokens_per_segment == 512
    assert 10_000 <= given.tokens_in_memory < sizes(6e6, among=[256]).tokens_in_memory
    parts = sizes(6e6)
    assert 10_000 <= parts.tokens_in_memory < 40_000
    assert sum(parts.parts) <= 6e6
    assert sizes(8e6 + 1, offload_states=True).tokens_in_memory is None
    assert COSTS.sizes(1e9, 0, 0).tokens_in_memory is None


def test_parts_of_rows_with_linear_attention_fit_too():
    costs = replace(COSTS, state_per_segment=50_000.0, gradient_per_segment=200_000.0)
    for memory in (1e7, 1.5e7, 2e7):
        parts = costs.sizes(memory, 90_000, 10_000, among=[1024, 256])
        assert 10_000 <= parts.tokens_in_memory < 90_000
        assert sum(parts.parts) <= memory


def test_branches_that_do_not_fit_together_are_bounded_as_tokens_are():
    costs = replace(COSTS, state_per_segment=50_000.0, gradient_per_segment=200_000.0)
    assert costs.sizes(2e8, 90_000, 10_000, 700).tokens_in_memory is None
    assert costs.sizes(5e7, 90_000, 10_000).tokens_in_memory is None
    found = costs.sizes(5e7, 90_000, 10_000, 700)
    assert 10_000 <= found.tokens_in_memory < 90_000 + 700 * costs.tokens_per_branch
    for branches in (0, 20, 100):
        tokens = found.tokens_in_memory - branches * costs.tokens_per_branch
        assert sum(costs.parts(found.tokens_per_segment, tokens, 10_000, branches)) <= 5e7


def test_when_nothing_fits_the_sizes_that_take_least_say_what_they_need():
    least = sizes(1e5)
    assert least[:2] == (SIZES[-1], 10_000)
    assert sum(least.parts) > 1e5
    # states of linear attention make many small segments dearer than few larger ones
    dear = replace(COSTS, state_per_segment=1e6)
    assert (
        dear.sizes(1e5, 10_000, 10_000).tokens_per_segment
        == min(SIZES, key=lambda size: sum(dear.parts(size, 10_000, 10_000)))
        > SIZES[-1]
    )


def test_the_memory_that_is_left_is_for_logits():
    costs = replace(COSTS, logits_per_token=1e4, logits_tokens=100)
    fitting = sum(costs.parts(1024, 10_000, 10_000))
    chunks = [costs.sizes(fitting + more, 10_000, 10_000, among=[1024]).logits_tokens for more in (-1, 0, 2e6, 1e9)]
    assert chunks == [100, 100, 300, 1024]


def test_shared_tokens_count_once():
    rows = [Row(np.append(np.zeros(9_999, np.int32), i).astype(np.int32), np.array([9_999])) for i in range(4)]
    shared = sum(own_tokens(rows))
    assert sum(COSTS.sizes(1e9, shared, 10_000).parts) < sum(sizes(1e9).parts)
    assert COSTS.sizes(4.5e6, shared, 10_000).tokens_in_memory is None
