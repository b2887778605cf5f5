"""Attention of segments, against torch's own with a mask of booleans."""

from contextlib import suppress

import pytest
import torch

from rolltap.trainer.training.forward import attention
from rolltap.trainer.training.forward.attention import NAME, segment_attention
from tests.trainer.training.grpo.tiny_models import tiny


class Module:
    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("past", [0, 13])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("block", [2, 512])
def test_new_tokens_see_all_positions_up_to_their_own(batch, past, masked, block, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    torch.manual_seed(0)
    query = torch.randn(batch, 6, 5, 8, requires_grad=True)
    key, value = (torch.randn(batch, 2, past + 5, 8, requires_grad=True) for _ in range(2))
    allowed = torch.ones(5, past + 5, dtype=torch.bool).tril(past)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=0.3, enable_gqa=True)
    mask = torch.zeros(5, past + 5).masked_fill(~allowed, float("-inf")).expand(batch, 1, -1, -1) if masked else None
    got, _ = attention._attention(Module(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(got, wanted.transpose(1, 2))
    inputs, weights = (query, key, value), torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, weights), torch.autograd.grad(wanted, inputs, weights.transpose(1, 2))
    )


def test_a_model_has_this_attention_only_meanwhile():
    config = tiny("qwen3").config
    with suppress(ZeroDivisionError), segment_attention(config):
        assert config._attn_implementation == NAME
        raise ZeroDivisionError
    assert config._attn_implementation == "sdpa"


def test_a_model_with_an_attention_of_its_own_keeps_it():
    config = tiny("gpt-oss").config
    with segment_attention(config):
        assert config._attn_implementation == "eager"
