"""On-policy distillation: a teacher's log-probabilities as advantages of tokens, against the
formula."""

import random
from dataclasses import replace
from math import log

import pytest
import torch

from rolltap.errors import InputError
from rolltap.trainer.training.step.advantages import session_advantages
from tests.trainer.training.step.tiny import (
    VOCABULARY,
    batch_of,
    make_trace,
    record,
    relative_difference,
    tiny_model,
)

WIDE = {"epsilon": 1e9, "epsilon_high": 1e9}
"""Nothing is clipped."""
MOVING = {"num_iterations": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.05, **WIDE}


@pytest.fixture(scope="module")
def teacher():
    model = tiny_model()
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    return model


@pytest.fixture
def traces(model, teacher):
    return taught(teacher, record(model, random.Random(0)))


@pytest.fixture
def stale(traces):
    """Return the traces as other weights would have sampled them."""
    noise = random.Random(1)
    for trace in traces:
        trace.logprobs = [min(0.0, each + noise.gauss(0, 0.3)) for each in trace.logprobs]
    return traces


def logprobs_of(model, trace):
    """Return the log-probabilities of the trace's completion, shape (C,)."""
    ids = torch.tensor([trace.prompt_ids + trace.completion_ids])
    every = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return every.gather(-1, ids[0, 1:, None])[len(trace.prompt_ids) - 1 :, 0]


@torch.no_grad()
def taught(teacher, traces):
    """Return the traces with the teacher's scores. Where the mask is 0 there is none."""
    for trace in traces:
        trained = torch.tensor(trace.completion_mask).bool()
        trace.scores = logprobs_of(teacher, trace).masked_fill(~trained, torch.nan).tolist()
    return traces


def gradient_of(loss, model):
    model.zero_grad()
    loss.backward()
    found = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            found[name] = weight.grad.clone()
    return found


def by_formula(student, traces, share):
    """Return the gradient of -sum over tokens of ratio * advantage / N, computed by the plain
    model."""
    own = session_advantages(batch_of(traces).rewards, "group")
    count = sum(trace.completion_mask.count(1) for trace in traces)
    loss = torch.zeros(())
    for trace in traces:
        logprobs = logprobs_of(student, trace)
        divergence = logprobs.detach() - torch.tensor(trace.scores).nan_to_num()
        advantage = (1 - share) * own[trace.session_id] - share * divergence
        ratio = (logprobs - torch.tensor(trace.logprobs)).exp()
        trained = torch.tensor(trace.completion_mask).bool()
        loss = loss - (ratio * advantage)[trained].sum() / count
    return gradient_of(loss, student)


@pytest.mark.parametrize("forward", ["packed", "padded"])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_gradient_is_that_of_the_formula_of_recorded_policies_too(
    model, train, stale, share, forward
):
    found = train(stale, teacher_share=share, forward=forward, **WIDE).spy.gradients[0]
    assert relative_difference(by_formula(model, stale, share), found) < 1e-5
    # and it is another one than that of the rewards alone, or of another share
    assert relative_difference(by_formula(model, stale, share / 2), found) > 1e-2


def test_a_reference_counts_beside_a_teacher_that_takes_the_place_of_all_rewards(train, stale):
    alone = train(stale, teacher_share=1.0, **MOVING).spy.gradients[1]
    beside = train(stale, teacher_share=1.0, beta=0.5, **MOVING).spy.gradients[1]
    assert relative_difference(alone, beside) > 1e-2


def test_over_every_token_of_a_place_it_is_the_gradient_of_the_reverse_kl_divergence(
    model, teacher, train
):
    prompt = [2, 3, 4]
    traces = []
    for token in range(VOCABULARY):
        trace = make_trace(
            str(token),
            prompt=prompt,
            completion_ids=[token],
            logprobs=[-log(VOCABULARY)],
            group_id="a",
            reward=0.0,
        )
        traces.append(trace)
    traces = taught(teacher, traces)
    trainer = train(traces, teacher_share=1.0, groups_per_step=1, **WIDE)

    def distribution(model):
        return model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)

    own = distribution(model)
    divergence = (own.exp() * (own - distribution(teacher).detach())).sum()
    wanted = gradient_of(divergence, model)
    assert relative_difference(wanted, trainer.spy.gradients[0]) < 1e-5


def test_groups_of_equal_rewards_train_and_the_metric_is_the_divergence(train, traces):
    alike = [replace(trace, reward=0.5) for trace in traces]
    logged = train(alike, teacher_share=1.0).state.log_history[0]
    apart = []
    for trace in traces:
        difference = torch.tensor(trace.logprobs) - torch.tensor(trace.scores)
        apart.append(difference[torch.tensor(trace.completion_mask).bool()])
    apart = torch.cat(apart)
    assert logged["tokens_computed"] == logged["tokens_trained"] == len(apart)
    assert logged["teacher_kl"] == pytest.approx(apart.mean().item(), abs=1e-5)


def test_later_iterations_of_a_batch_compare_with_the_weights_as_they_are(train, traces):
    trainer = train(traces, teacher_share=1.0, **MOVING)
    moved = tiny_model()
    moved.load_state_dict(trainer.spy.weights[0])
    assert relative_difference(by_formula(moved, traces, 1.0), trainer.spy.gradients[1]) < 1e-5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"teacher_share": 1.5}, "teacher_share = 1.5: Input should be less than or equal to 1"),
        ({"teacher_share": 1, "temperature": 0.7}, "temperature = 0.7 with a teacher"),
        ({"teacher_share": 1}, "teacher_share = 1, but a trace has no scores: .*scores=NAME"),
    ],
)
def test_what_has_no_meaning_is_refused(train, model, config, message):
    with pytest.raises(InputError, match=message):
        train(record(model, random.Random(0)), **config)
