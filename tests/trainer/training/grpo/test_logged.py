"""The log of a step."""

import random
from dataclasses import replace

import pytest

from rolltap.trainer.traces.build import KindSpan
from tests.trainer.training.grpo.tiny import make_trainer, record, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def traces(model):
    """Traces of two turns: the first is a root, the second bridged."""
    recorded = record(model, random.Random(0))
    return [replace(trace, continuity=[root(trace), second(trace)]) for trace in recorded]


def root(trace):
    return KindSpan(kind="root", start=0, end=trace.completion_mask.index(0))


def second(trace):
    start = trace.completion_mask.index(1, root(trace).end)
    return KindSpan(kind="bridged", start=start, end=len(trace.completion_ids))


@pytest.mark.parametrize("forward", ["padded", "segments"])
@pytest.mark.parametrize("mismatch", ["clip", "mask"])
def test_means_are_over_tokens_whatever_the_micro_batches(model, traces, tmp_path, forward, mismatch):
    logged = []
    for number in (1, 3, 2 * len(traces)):
        config = {"forward": forward, "mismatch": mismatch, "num_iterations": 2, "max_steps": 2}
        trainer = make_trainer(model, tmp_path, lambda rows: traces, gradient_accumulation_steps=number, **config)
        trainer.train()
        logged.append(trainer.state.log_history[:2])
    own = {"learning_rate", "step_time", "tokens_per_second", "peak_memory_gib", "tokens_forwarded", "epoch"}
    for step in (0, 1):
        first, *others = ({name: entry[step][name] for name in entry[step].keys() - own} for entry in logged)
        for other in others:
            assert other == pytest.approx(first, rel=1e-3, abs=1e-5)
    first, second = logged[0]
    assert first["tokens_in_rows"] == sum(len(trace.prompt_ids + trace.completion_ids) for trace in traces)
    assert first["tokens_forwarded"] > 0
    assert 0 < first["difference/bridged"] < 1e-5
    assert not [name for name in second if name.startswith(("difference", "sampler_ratio", "reward", "left_out"))]
    assert second["off_policy/bridged"] > 1e-3
    assert first["tokens_computed"] == first["tokens_trained"]
    assert second["ratio/max"] > 1.1 > first["ratio/max"] > 0.9


def test_a_batch_of_other_weights_shows_no_numerical_fault(model, traces, tmp_path):
    trainer = make_trainer(model, tmp_path, lambda rows: traces)
    source = trainer.trace_source
    trainer.trace_source = lambda rows: replace(source(rows), on_policy=False)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["off_policy/bridged"] < 1e-5
    assert not [name for name in logged if name.startswith(("difference", "sampler_ratio"))]


def test_tokens_of_a_session_without_an_advantage_count_in_the_mean_and_are_not_computed(model, traces, tmp_path):
    rewards = {"a0": 0.0, "a1": 0.5, "a2": 1.0, "b0": 0.0, "b1": 0.5, "b2": 1.0}
    rewarded = [replace(trace, reward=rewards[trace.session_id]) for trace in traces]
    trainer = make_trainer(model, tmp_path, lambda rows: rewarded)
    trainer.train()
    logged = trainer.state.log_history[0]
    tokens = dict.fromkeys((True, False), 0)
    for trace in rewarded:
        tokens[trace.reward == 0.5] += trace.completion_mask.count(1)
    assert (logged["tokens_trained"], logged["tokens_computed"]) == (sum(tokens.values()), tokens[False])
    assert tokens[True] > 0
