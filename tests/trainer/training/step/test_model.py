"""Packed rows through the stock models, against each row alone."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from rolltap.trainer.training.step.model import prepare
from rolltap.trainer.training.step.pack import Pack
from tests.deep import cases
from tests.trainer.training.step.small_models import (
    FAMILIES,
    HYBRIDS,
    branching_rows,
    make_row,
    pack_of,
    packed_pass,
    plain_pass,
    small_model,
    take_gradient,
)

ROWS = branching_rows()
LOGPROBS = 2e-5
"""Difference of log-probabilities, in nats, that float32 may have. Of gradients, relative to their
norm: half of it."""
NOISE = 4
"""Differences of hybrids may be this many times those of a plain pass whose embeddings are off by a
unit in the last place: their recurrence amplifies the rounding of float32."""


def differences(found, wanted):
    """Return the largest of log-probabilities, and that of the gradient relative to its norm."""
    logprobs = (found[0] - wanted[0]).abs().max()
    gradient = (found[2] - wanted[2]).norm() / wanted[2].norm()
    return np.array([logprobs, gradient])


def nudged(model, rows, weights):
    """Run the plain pass with embeddings off by a unit in the last place."""
    random = torch.Generator().manual_seed(0)

    def nudge(module, arguments, output):
        signs = torch.randint(0, 2, output.shape, generator=random) * 2 - 1
        return output * (1 + signs * torch.finfo(torch.float32).eps)

    hook = model.get_input_embeddings().register_forward_hook(nudge)
    found = plain_pass(model, rows, weights)
    hook.remove()
    return found


@pytest.mark.parametrize("family", cases(FAMILIES, 0, 1, 2, 3, 4))
def test_a_pack_has_the_log_probabilities_entropies_and_gradients_of_each_row_alone(family):
    rows = ROWS
    if family in HYBRIDS:
        rows = ROWS[::2]  # test_linear has all branches
    pack, weights = pack_of(rows)
    model = small_model(family)
    wanted = plain_pass(model, rows, weights)
    most = np.array([LOGPROBS, LOGPROBS / 2])
    if family in HYBRIDS:
        most = NOISE * differences(nudged(model, rows, weights), wanted)
    prepare(model, 1.0)
    found = packed_pass(model, pack, weights)
    assert (differences(found, wanted) <= most).all()
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=10 * most[0])

    model.activation_checkpointing_enable()
    checkpointed = packed_pass(model.train(), pack, weights)
    assert (differences(checkpointed, wanted) <= most).all()


def test_sessions_have_the_trained_tokens_of_their_traces_one_after_another():
    model = prepare(small_model("qwen3"), 1.0)
    sessions = [ROWS[:3], [], ROWS[3:5]]
    together = Pack(sessions)
    alone, _ = pack_of(ROWS[:5])
    with torch.no_grad():
        found = together.unpack(model(**together.inputs()).log_probs)
        wanted = alone.unpack(model(**alone.inputs()).log_probs)
    for mask, rows in zip(together.mask, sessions, strict=True):
        assert mask.sum() == sum(len(row.scored) for row in rows)
    torch.testing.assert_close(found[together.mask], wanted[alone.mask])
    assert not found[~together.mask].any()


def test_a_temperature_divides_the_logits():
    row = ROWS[4]
    pack, _ = pack_of([row])
    model = small_model("qwen3")
    ids = torch.tensor(row.ids).long()
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, row.scored - 1] / 0.5
        wanted = logits.log_softmax(-1).gather(1, ids[row.scored][:, None])[:, 0]
        # the head of a later call takes the place of an earlier one
        for temperature in (1.0, 0.5):
            prepare(model, temperature)
        [found] = pack.unpack(model(**pack.inputs()).log_probs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=LOGPROBS)


@pytest.mark.parametrize("family", cases(FAMILIES, 1, 2))
def test_other_calls_of_a_prepared_model_give_what_they_gave(family):
    model = small_model(family)
    first = ROWS[0].ids
    ids = torch.tensor(np.stack([first, ROWS[5].ids[: len(first)]])).long()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).logits
        prepare(model, 1.0)
        after = model(input_ids=ids, attention_mask=mask).logits
        chosen = model.generate(ids[:, :20], max_new_tokens=3, do_sample=False)
    assert torch.equal(after, before)
    assert chosen.shape == (2, 23)


@pytest.mark.parametrize("sessions", [[], [[]], [[make_row([5, 6], [])]]])
def test_a_pack_without_trained_tokens_has_a_backward_pass_whose_gradients_are_zero(sessions):
    model = prepare(small_model("qwen3.5"), 1.0)
    pack = Pack(sessions)
    logprobs = pack.unpack(model(**pack.inputs()).log_probs)
    assert logprobs.shape == (len(sessions), 1)
    logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not take_gradient(model).any()


def test_an_adapter_takes_packs_too():
    adapter = LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
    model = get_peft_model(prepare(small_model("qwen3"), 1.0), adapter)
    model.activation_checkpointing_enable()
    model.enable_input_require_grads()
    rows = ROWS[::2]
    pack, weights = pack_of(rows)
    found = packed_pass(model.train(), pack, weights)
    wanted = plain_pass(model, rows, weights)
    assert (differences(found, wanted) <= [LOGPROBS, LOGPROBS / 2]).all()


def test_low_precision_gives_what_plain_rows_give_but_for_rounding():
    model = prepare(small_model("qwen3"), 1.0)
    rows = ROWS[:5]
    pack, _ = pack_of(rows)
    weights = pack.mask.float()
    with torch.autocast("cpu", torch.bfloat16):
        found = packed_pass(model, pack, weights)
        wanted = plain_pass(model, rows, weights)
    exact = plain_pass(model, rows, weights)
    assert (differences(found, exact) <= 1.5 * differences(wanted, exact)).all()
