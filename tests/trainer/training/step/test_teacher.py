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
    gradients,
    make_trace,
    record,
    relative_difference,
    tiny_model,
    trained,
)

WIDE = {"epsilon": 1e9, "epsilon_high": 1e9}
"""Nothing is clipped."""


@pytest.fixture(scope="module")
def student():
    return tiny_model()


@pytest.fixture(scope="module")
def teacher():
    model = tiny_model()
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    return model


def logprobs_of(model, trace):
    """Return the log-probabilities of the trace's completion, shape (C,)."""
    ids = torch.tensor([trace.prompt_ids + trace.completion_ids])
    every = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return every.gather(-1, ids[0, 1:, None])[len(trace.prompt_ids) - 1 :, 0]


@torch.no_grad()
def taught(teacher, traces):
    """Return the traces with the teacher's scores. Where the mask is 0 there is none."""
    return [
        replace(
            trace,
            scores=[
                float(score) if mask else float("nan")
                for score, mask in zip(scores, mask_of, strict=True)
            ],
        )
        for trace in traces
        for scores, mask_of in [(logprobs_of(teacher, trace), trace.completion_mask)]
    ]


def by_formula(student, traces, share):
    """Return the gradients of -sum over tokens of ratio * advantage / N, computed by the plain
    model."""
    own = session_advantages(batch_of(traces).rewards, "group")
    count = sum(trace.completion_mask.count(1) for trace in traces)
    loss = torch.zeros(())
    for trace in traces:
        logprobs, mask = logprobs_of(student, trace), torch.tensor(trace.completion_mask).bool()
        now = logprobs.detach()
        advantage = (1 - share) * own[trace.session_id] + share * (
            torch.tensor(trace.scores).nan_to_num() - now
        )
        ratio = (logprobs - torch.tensor(trace.logprobs)).exp()
        loss = loss - (ratio * advantage)[mask].sum() / count
    student.zero_grad()
    loss.backward()
    return {
        name: weight.grad.clone()
        for name, weight in student.named_parameters()
        if weight.grad is not None
    }


def stale(traces):
    """Return the traces as other weights would have sampled them."""
    noise = random.Random(1)
    return [
        replace(t, logprobs=[min(0.0, each + noise.gauss(0, 0.3)) for each in t.logprobs])
        for t in traces
    ]


@pytest.mark.parametrize("forward", ["packed", "padded"])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_gradient_is_that_of_the_formula_of_recorded_policies_too(
    student, teacher, tmp_path, share, forward
):
    traces = stale(taught(teacher, record(student, random.Random(0))))
    found = gradients(student, tmp_path, traces, teacher_share=share, forward=forward, **WIDE)
    assert relative_difference(by_formula(student, traces, share), found) < 1e-5
    # and it is another one than that of the rewards alone, or of another share
    assert relative_difference(by_formula(student, traces, share / 2), found) > 1e-2


def test_a_reference_counts_beside_a_teacher_that_takes_the_place_of_all_rewards(
    student, teacher, tmp_path
):
    traces = stale(taught(teacher, record(student, random.Random(0))))
    found = []
    for beta in (0.0, 0.5):
        options = {
            "beta": beta,
            "num_iterations": 2,
            "max_steps": 2,
            "optim": "sgd",
            "learning_rate": 0.05,
        }
        trainer = trained(student, tmp_path, traces, teacher_share=1.0, **options, **WIDE)
        found.append(trainer.spy.gradients[1])
    assert relative_difference(*found) > 1e-2


def test_over_every_token_of_a_place_it_is_the_gradient_of_the_reverse_kl_divergence(
    student, teacher, tmp_path
):
    prompt = [2, 3, 4]
    fields = {"prompt": prompt, "group_id": "a", "reward": 0.0, "logprobs": [-log(VOCABULARY)]}
    traces = taught(
        teacher, [make_trace(str(v), completion_ids=[v], **fields) for v in range(VOCABULARY)]
    )
    found = gradients(student, tmp_path, traces, teacher_share=1.0, groups_per_step=1, **WIDE)

    def distribution(model):
        return model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)

    own = distribution(student)
    divergence = (own.exp() * (own - distribution(teacher).detach())).sum()
    student.zero_grad()
    divergence.backward()
    expected = {
        name: weight.grad for name, weight in student.named_parameters() if weight.grad is not None
    }
    assert relative_difference(expected, found) < 1e-5


def test_groups_of_equal_rewards_train_and_the_metric_is_the_divergence(student, teacher, tmp_path):
    traces = [
        replace(trace, reward=0.5) for trace in taught(teacher, record(student, random.Random(0)))
    ]
    trainer = trained(student, tmp_path, traces, teacher_share=1.0)
    [line] = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert (
        line["tokens_computed"]
        == line["tokens_trained"]
        == sum(t.completion_mask.count(1) for t in traces)
    )
    apart = [
        p - q
        for t in traces
        for p, q, m in zip(t.logprobs, t.scores, t.completion_mask, strict=True)
        if m
    ]
    assert line["teacher_kl"] == pytest.approx(sum(apart) / len(apart), abs=1e-5)


def test_later_iterations_of_a_batch_compare_with_the_weights_as_they_are(
    student, teacher, tmp_path
):
    traces = taught(teacher, record(student, random.Random(0)))
    how = {
        "teacher_share": 1.0,
        "num_iterations": 2,
        "max_steps": 2,
        "learning_rate": 0.05,
        "optim": "sgd",
        **WIDE,
    }
    trainer = trained(student, tmp_path, traces, **how)
    moved = tiny_model()
    moved.load_state_dict(trainer.spy.weights[0])
    assert relative_difference(by_formula(moved, traces, 1.0), trainer.spy.gradients[1]) < 1e-5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"teacher_share": 1.5}, "teacher_share = 1.5: Input should be less than or equal to 1"),
        (
            {"teacher_share": 1.0, "temperature": 0.7},
            "temperature = 0.7 with a teacher, whose scores are at temperature 1",
        ),
        (
            {"teacher_share": 1.0},
            r"teacher_share = 1.0, but a trace has no scores: read traces\(scores=NAME\)",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(student, tmp_path, config, message):
    with pytest.raises(InputError, match=message):
        trained(student, tmp_path, record(student, random.Random(0)), **config)
