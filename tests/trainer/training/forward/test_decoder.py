"""The head, against the logits of the model's own forward pass."""

from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from rolltap.trainer.training.forward.decoder import Head
from tests.trainer.training.grpo.tiny_models import COMMON, VOCABULARY

SMALL: dict[str, Any] = {**COMMON, "num_hidden_layers": 1}
MODELS = {
    "scaled": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.3)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=3.0)),
    "capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=0.5)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_scaled_and_capped_as_the_model_does(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    ids = torch.randint(3, VOCABULARY, (1, 20))
    logits = model(input_ids=ids).logits[0, :-1].float() / 0.7
    hidden = model.base_model(input_ids=ids).last_hidden_state[0, :-1]
    logprobs, entropies = Head(model, 0.7)(hidden, ids[0, 1:])
    wanted = torch.log_softmax(logits, -1)
    torch.testing.assert_close(logprobs, wanted.gather(1, ids[0, 1:, None])[:, 0])
    torch.testing.assert_close(entropies, torch.distributions.Categorical(logits=logits).entropy())
    assert not entropies.requires_grad


@pytest.mark.parametrize(
    ("dtype", "summed", "copies"),
    [
        (torch.float32, torch.float32, 4),
        (torch.float32, None, 4),
        (torch.bfloat16, None, 2),
        (torch.bfloat16, torch.float32, 6),
    ],
)
def test_the_gradient_of_a_chunk_is_counted_in_the_type_of_the_weight_and_of_the_sum(dtype, summed, copies):
    model = MODELS["scaled"]().to(dtype)
    weight = model.get_output_embeddings().weight
    if summed:
        weight.grad_dtype = summed
    assert Head(model, 1.0).gradient_bytes == copies * weight.numel()
    weight.requires_grad_(False)
    assert Head(model, 1.0).gradient_bytes == 0
