"""Segments against the plain forward of each row: the same log-probabilities, entropies and gradients."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from rolltap.trainer.training.forward import passes
from rolltap.trainer.training.forward.decoder import Decoder
from rolltap.trainer.training.forward.forest import Row
from rolltap.trainer.training.forward.passes import Scores, SegmentScorer, split_rows
from tests.deep import cases
from tests.trainer.training.grpo.tiny import relative_difference
from tests.trainer.training.grpo.tiny_models import FAMILIES, VOCABULARY, WINDOW, bf16, tiny

UNCUT = 10**6
# PEFT reads an attribute of Transformers that is deprecated, and so does this file
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


def scorer(tokens: int = UNCUT, autocast: Any = nullcontext, temperature: float = 1.0, **options: Any) -> SegmentScorer:
    return SegmentScorer(autocast, temperature, tokens_per_segment=tokens, **options)


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, n).tolist()


def row(ids: Sequence[int], scored: Sequence[int] | range) -> Row:
    return Row(np.array(ids, np.int32), np.array(scored, np.int64))


def forest() -> list[Row]:
    """Nine rows: forks at several depths, one row twice, prefixes of others, one alone, one with nothing scored."""
    prompt = tokens(2 * WINDOW + 3, 0)
    rows = []
    for i in range(3):
        turn = prompt + tokens(20 + 7 * i, 10 + i)
        rows.append(row(turn + tokens(18, 20 + i), range(len(prompt), len(turn) + 18, 2)))
        rows.append(row(turn + tokens(1 + 16 * i, 30 + i), range(len(turn), len(turn) + 1 + 16 * i)))
    rows.append(rows[0])
    rows.append(row(rows[0].ids[:70], [5, 6, 69]))
    rows.append(row(tokens(30, 40), range(10, 30)))
    rows.append(row(prompt + tokens(9, 50), []))
    return rows


def plain(model: Any, rows: Sequence[Row], temperature: float = 1.0) -> Scores:
    """The scores of each row in a forward pass of its own."""
    logprobs, entropies = [torch.zeros(0)], [torch.zeros(0)]
    for one in rows:
        logits = model(input_ids=torch.tensor(one.ids[None], dtype=torch.long)).logits[0].float() / temperature
        distributions = torch.log_softmax(logits, -1)[one.scored - 1]
        targets = torch.tensor(one.ids[one.scored], dtype=torch.long)
        logprobs.append(distributions.gather(1, targets[:, None])[:, 0])
        entropies.append(-(distributions.exp() * distributions).sum(-1).detach())
    return Scores(torch.cat(logprobs), torch.cat(entropies))


def gradients(model: Any, scores: Scores) -> dict[str, Tensor]:
    """The gradients of a loss that weighs each token differently."""
    model.zero_grad()
    weights = torch.randn(len(scores.logprobs), generator=torch.Generator().manual_seed(1))
    (scores.logprobs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: Any, score: SegmentScorer, rows: Sequence[Row], temperature: float = 1.0) -> None:
    tolerance = 2e-4 if "qwen3_5" in model.config.model_type else 1e-5
    wanted = plain(model, rows, temperature)
    wanted_gradients = gradients(model, wanted)
    got = score(model, rows)
    assert not got.entropies.requires_grad
    torch.testing.assert_close(got.logprobs, wanted.logprobs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.entropies, wanted.entropies, rtol=tolerance, atol=tolerance)
    assert relative_difference(wanted_gradients, gradients(model, got)) < tolerance


@pytest.mark.parametrize(
    ("family", "size", "keep_graph"),
    # short: each family, and of the first and the hybrid one both kinds of passes
    cases(product(FAMILIES, [UNCUT, 40, 17], [False, True]), 2, 3, 11, 14, 22, 25, 33, 34),
)
def test_segments_equal_the_plain_forward(family, size, keep_graph):
    assert_same(tiny(family), scorer(size, keep_graph=keep_graph), forest())


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_segments_of_a_few_tokens_equal_the_plain_forward(family):
    rows = [row(tokens(12, 0), range(5, 12)), row(tokens(12, 0)[:8] + tokens(3, 1), range(8, 11))]
    for size in (1, 3):
        assert_same(tiny(family), scorer(size), rows)


@pytest.mark.parametrize("keep_graph", [False, True], ids=["two passes", "one pass"])
def test_a_short_segment_beside_a_long_one_stays_in_the_table_of_positions(keep_graph):
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=80, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    prompt = tokens(60, 0)
    rows = [row(prompt + tokens(20 - i, 1 + i), range(61, 80 - i)) for i in range(2)] + [row(tokens(50, 3), [49])]
    assert_same(model, scorer(keep_graph=keep_graph), rows)


@pytest.mark.parametrize("family", ["llama", "qwen3.5", "qwen3-moe"])
@pytest.mark.parametrize("targets", [["q_proj", "in_proj_qkv", "down_proj", "lm_head"], "all-linear"])
def test_adapters_get_their_gradients_and_nothing_else_does(family, targets):
    model = get_peft_model(tiny(family), LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    assert_same(model, scorer(30), forest())


def test_a_disabled_adapter_is_not_applied():
    model = get_peft_model(tiny("qwen3"), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
        with model.disable_adapter():
            torch.testing.assert_close(scorer(30)(model, forest()).logprobs, plain(tiny("qwen3"), forest()).logprobs)


@pytest.mark.parametrize("keep_graph", [False, True])
def test_temperature_and_logit_capping_are_applied(keep_graph):
    assert_same(tiny("gemma3"), scorer(40, temperature=0.7, keep_graph=keep_graph), forest(), temperature=0.7)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_rows_in_several_parts_keep_the_gradient(family):
    score = scorer(30, tokens_in_memory=100)
    assert_same(tiny(family), score, forest())
    whole = scorer(30)
    whole(tiny(family), forest())
    assert score.forwarded > whole.forwarded


def test_rows_are_split_where_their_own_tokens_exceed_the_bound():
    shared = tokens(100, 0)
    rows = [row([*shared, *tokens(50, i)], [120]) for i in range(1, 5)]
    assert [len(part) for part in split_rows(rows, 200)] == [2, 2]
    assert [len(part) for part in split_rows(rows, 10)] == [1, 1, 1, 1]
    assert [len(part) for part in split_rows(rows, None)] == [4]
    assert [len(part) for part in split_rows(rows, 200, branch=1)] == [1, 1, 1, 1]
    assert [len(part) for part in split_rows(rows, 201, branch=1)] == [2, 2]
    assert split_rows([], 10) == []


def test_the_head_is_computed_in_chunks(monkeypatch):
    model, wanted = tiny("qwen3"), []
    for logits in (2**26, 7 * VOCABULARY):
        monkeypatch.setattr("rolltap.trainer.training.forward.decoder.LOGITS", logits)
        for keep_graph in (False, True):
            wanted.append(gradients(model, scorer(40, keep_graph=keep_graph)(model, forest())))
    assert all(relative_difference(wanted[0], other) < 1e-6 for other in wanted[1:])


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_bf16_autocast_differs_as_little_as_the_plain_forward_does(family):
    model = tiny(family)
    exact = gradients(model, plain(model, forest()))
    with bf16():
        noise = relative_difference(exact, gradients(model, plain(model, forest())))
    for keep_graph in (False, True):
        # the scorer's own context, within and without another one
        for outer in (nullcontext, bf16):
            with outer():
                with torch.no_grad():
                    scorer(40, bf16)(model, forest())
                got = gradients(model, scorer(40, bf16, keep_graph=keep_graph)(model, forest()))
            assert relative_difference(exact, got) < 1.5 * noise


@pytest.mark.parametrize("keep_graph", [False, True], ids=["two passes", "one pass"])
def test_weights_are_cast_once_however_many_segments_there_are(keep_graph):
    model = tiny("qwen3")
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim > 1]
    shapes = {weight.shape for weight in matrices}
    casts: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if tensor.dtype == torch.bfloat16 and base.ndim == 2 and {base.shape, base.mT.shape} & shapes:
            casts[base.data_ptr()] = base.detach()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = scorer(17, bf16, keep_graph=keep_graph)(model, [row(tokens(100, 0), range(2, 100))])
    assert len(casts) == (len(matrices) if keep_graph else 0)
    assert torch.isfinite(torch.stack([g.norm() for g in gradients(model, scores).values()])).all()


def test_without_gradients_a_scorer_only_scores():
    model, score = tiny("qwen3.5"), scorer(30)
    with torch.no_grad():
        got = score(model, forest())
    assert not got.logprobs.requires_grad
    torch.testing.assert_close(got.logprobs, plain(model, forest()).logprobs.detach(), rtol=2e-4, atol=2e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("rows", [[], [row([1, 2, 3], [])]], ids=["no rows", "nothing scored"])
@pytest.mark.parametrize("keep_graph", [False, True])
def test_no_scored_token_is_a_loss_of_zero(rows, keep_graph):
    model, score = tiny("qwen3"), scorer(keep_graph=keep_graph)
    got = score(model, rows)
    got.logprobs.sum().backward()
    assert got.logprobs.shape == got.entropies.shape == (0,)
    assert score.forwarded == 0


def test_gradients_add_up_over_calls():
    model = tiny("qwen3")
    once = gradients(model, scorer(40)(model, forest()))
    weights = torch.randn(len(scorer()(model, forest()).logprobs), generator=torch.Generator().manual_seed(1))
    (scorer(40)(model, forest()).logprobs * weights).sum().backward()
    twice = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_difference({name: 2 * gradient for name, gradient in once.items()}, twice) < 1e-6


def test_layers_with_gradient_checkpointing_keep_their_cache():
    model = tiny("qwen3")
    model.gradient_checkpointing_enable()
    assert_same(model, scorer(30), forest())
    assert model.is_gradient_checkpointing


def test_offloaded_states_give_the_same_gradients():
    assert_same(tiny("qwen3.5"), scorer(30, offload_states=True), forest())


def test_shared_tokens_go_through_the_model_once():
    prompt = tokens(300, 0)
    rows = [row(prompt + tokens(40, i), range(300, 340)) for i in range(1, 9)]
    score = scorer()
    score(tiny("qwen3"), rows)
    assert score.forwarded == 300 + 8 * 39


def test_the_activations_of_one_segment_are_alive_at_a_time():
    rows = [row(tokens(1200, 0), range(2, 1200))]

    def alive(score: SegmentScorer) -> int:
        """The most bytes saved for a backward pass at one time, apart from the weights."""
        model = tiny("qwen3")
        own = {parameter.data_ptr() for parameter in model.parameters()}
        now = most = 0

        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal now, most
                # an output that kept its graph would be in a cycle
                self.tensor, self.size = tensor.detach(), 0 if tensor.data_ptr() in own else tensor.nbytes
                now += self.size
                most = max(most, now)

            def __del__(self) -> None:
                nonlocal now
                now -= self.size

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            gradients(model, score(model, rows))
        assert now == 0
        return most

    assert alive(scorer(100)) < 0.25 * alive(scorer())
    assert alive(scorer(100, keep_graph=True)) > 0.7 * alive(scorer())


def test_states_are_freed_as_the_backward_pass_is_done_with_them(monkeypatch):
    counts = []
    run = passes.Grove._run

    def counted(self, batch):
        counts.append((len(self._states), len(self.paths.tensors) > 0))
        return run(self, batch)

    monkeypatch.setattr(passes.Grove, "_run", counted)
    model = tiny("qwen3.5")
    rows = [row(tokens(100, 0), range(2, 100))]
    gradients(model, scorer(20)(model, rows))
    assert counts == [(n, n > 0) for n in (0, 1, 2, 3, 4, 4, 4, 3, 2, 1)]
    counts.clear()
    with torch.no_grad():
        scorer(20)(model, [row(tokens(40, i), range(2, 40)) for i in range(2)])
    assert counts == [(n, n > 0) for n in (0, 1, 2, 1)]


def test_linear_attention_never_continues_a_state_with_a_single_token(monkeypatch):
    found = []
    run = Decoder.run

    def watched(self, ids, positions, *args):
        found.append((ids.shape[1], positions[:, 0].max() > 0))
        return run(self, ids, positions, *args)

    monkeypatch.setattr(Decoder, "run", watched)
    prompt = tokens(40, 0)
    rows = [row(prompt + tokens(2, i), [41]) for i in range(1, 3)]
    assert_same(tiny("qwen3.5"), scorer(), rows)
    assert all(width > 1 for width, continues in found if continues)
    assert any(continues for _, continues in found)
