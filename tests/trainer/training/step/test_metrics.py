"""Metrics of a step, and what a training logs."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from rolltap.trainer.traces.build import GroupReward, KindSpan, TraceBatch, Unrewarded
from rolltap.trainer.traces.ledger import CachedPrompts, Ledger
from rolltap.trainer.training.step.batch import KINDS
from rolltap.trainer.training.step.metrics import (
    MOST_TASKS,
    StepPart,
    batch_metrics,
    named_tasks,
    peak_memory,
    step_metrics,
)
from tests.trainer.training.step.tiny import make_trace

CPU = torch.device("cpu")
BRIDGED = KINDS.index("bridged")
RENDERED = KINDS.index("rendered")


def named(metrics, *prefixes):
    """Return the metrics whose names begin with one of the prefixes."""
    return {name: value for name, value in metrics.items() if name.startswith(prefixes)}


def rewarded(task, harness, reward, group=None):
    return GroupReward(
        group_id=group or task,
        task_id=task,
        harness=harness,
        reward=reward,
    )


def of_batch(batch, tasks=("x", "y")):
    return batch_metrics(batch, batch, tasks)


class TestBatch:
    @pytest.fixture
    def batch(self):
        """Two sessions of two harnesses on task x, which succeed or fail, and two on task y, which
        fail alike."""
        traces = [make_trace(session) for session in "abcd"]
        traces.append(make_trace("a", (1, 0, 1)))
        rewards = {
            "a": rewarded("x", "codex", 1.0),
            "b": rewarded("x", "pi", 0.0),
            "c": rewarded("y", "codex", 0.0),
            "d": rewarded("y", "pi", 0.0),
        }
        ledger = Ledger(sampled=9, trained=6, left_out={"aborted": 3})
        return TraceBatch(traces=traces, rewards=rewards, ledger=ledger)

    def test_rewards_are_means_over_the_sessions_of_each_harness_and_task(self, batch):
        assert named(of_batch(batch), "reward") == {
            "reward": 0.25,
            "reward_std": pytest.approx(math.sqrt(0.5) / 2),
            "reward/harness/codex": 0.5,
            "reward/harness/pi": 0.0,
            "reward/task/x": 0.5,
            "reward/task/y": 0.0,
        }
        assert named(of_batch(batch, tasks="yz"), "reward/task/").keys() == {"reward/task/y"}

    def test_forks_are_beside_the_fresh_sessions_whose_task_may_be_named_like_them(self):
        rewards = {
            "a": rewarded("t", "codex", 0.0, "t-1.0.0"),
            "b": rewarded("t", "codex", 0.0, "t-1.0.0"),
            "c": rewarded("fork~t", "codex", 0.0, "fork~t-1.0.1"),
            "d": rewarded("t", "codex", 1.0, "fork~t-1.0.0"),
            "e": rewarded("t", "codex", 0.5, "0/fork~t-1.0.0"),
        }
        metrics = of_batch(TraceBatch(rewards=rewards), tasks="t")
        assert named(metrics, "reward") == {
            "reward": 0.0,
            "reward_std": 0.0,
            "reward/forks": 0.75,
            "reward/harness/codex": 0.0,
            "reward/task/t": 0.0,
        }
        assert metrics["sessions"] == 5
        assert metrics["groups"] == 4

    def test_tokens_are_trained_or_left_out_and_every_reason_is_there(self, batch):
        left_out = {"aborted": 3, "over_length": 2}
        ledger = Ledger(sampled=9, trained=4, left_out=left_out)
        trained = TraceBatch(traces=batch.traces[1:], rewards=batch.rewards, ledger=ledger)
        metrics = batch_metrics(batch, trained, [])
        assert metrics["groups"] == 2
        assert metrics["groups_without_signal"] == 1
        assert metrics["traces_per_session"] == 1.25
        assert metrics["tokens_trained"] == 5
        found = named(metrics, "left_out/")
        assert Counter(found) == Counter({"left_out/aborted": 3, "left_out/over_length": 2})
        assert {"left_out/no_reward", "left_out/superseded", "left_out/auxiliary"} < found.keys()

    def test_a_name_that_would_nest_is_encoded_and_an_empty_one_has_no_metric(self):
        half_cached = CachedPrompts(
            calls=1,
            prompt_tokens=100,
            known_tokens=90,
            cached_tokens=50,
        )
        rewards = {"s": rewarded("repo/issue 7", "", 1.0), "t": rewarded("", "own", 0.0)}
        batch = TraceBatch(rewards=rewards)
        assert not named(of_batch(batch), "cached_share")
        batch.continued = {"pi agent": half_cached, "own": half_cached}
        metrics = of_batch(batch, tasks=["repo/issue 7", ""])
        assert named(metrics, "reward/", "cached_share") == {
            "reward/task/repo%2Fissue%207": 1.0,
            "reward/harness/own": 0.0,
            "cached_share": 0.5,
            "cached_share/own": 0.5,
            "cached_share/pi%20agent": 0.5,
        }

    def test_sessions_are_counted_by_status_and_suspicion_whether_rewarded_or_not(self):
        late = GroupReward(group_id="x", reward=0.0, status="timeout")
        cheat = GroupReward(group_id="x", reward=1.0, suspicions=("git_history", "web_search"))
        unrewarded = {
            "c": Unrewarded(group_id="x", reason="excluded", status="timeout"),
            "d": Unrewarded(
                group_id="x",
                reason="suspicious",
                status="failed",
                suspicions=("git_history",),
            ),
            "e": Unrewarded(group_id="x", reason="infrastructure", status="infrastructure"),
            "f": Unrewarded(group_id="dead", reason="infrastructure", status="infrastructure"),
            "g": Unrewarded(group_id="dead", reason="no_reward", status="unjudged"),
        }
        metrics = of_batch(TraceBatch(rewards={"a": cheat, "b": late}, unrewarded=unrewarded))
        assert Counter(metrics) == Counter(
            {
                "sessions": 7,
                "sessions_completed": 1,
                "sessions_timeout": 2,
                "sessions_failed": 1,
                "sessions_unjudged": 1,
                "sessions_infrastructure": 2,
                "sessions_excluded": 2,
                "sessions_no_reward": 1,
                "suspicious": 2,
                "suspicious/git_history": 2,
                "suspicious/web_search": 1,
                "groups": 2,
                "groups_without_reward": 1,
                "reward": 0.5,
                "reward_std": pytest.approx(math.sqrt(0.5)),
            }
        )

    def test_a_batch_of_faults_alone_has_no_reward_and_one_without_sessions_has_no_count(self):
        fault = Unrewarded(group_id="x", reason="infrastructure", status="infrastructure")
        metrics = of_batch(TraceBatch(unrewarded={"a": fault}))
        assert metrics["groups_without_reward"] == 1
        assert "reward" not in metrics
        assert set(of_batch(TraceBatch()).values()) == {0}


@pytest.mark.parametrize(
    ("column", "named"),
    [
        ({"task_id": [str(row % MOST_TASKS) for row in range(3 * MOST_TASKS)]}, MOST_TASKS),
        ({"task_id": [str(row) for row in range(MOST_TASKS + 1)]}, 0),
        ({"group": [0, 1]}, 0),
    ],
    ids=["of many rows", "more than a dashboard holds", "no column of tasks"],
)
def test_tasks_are_named_if_they_are_few(column, named):
    assert named_tasks(Dataset.from_dict(column)) == {str(number) for number in range(named)}


def part_of(*micro_batches):
    """Return a step of one process with these micro-batches, made by `tokens`."""
    part = StepPart()
    for logprobs, inputs in micro_batches:
        part.add(logprobs, inputs)
    part.stop(CPU)
    return part


def tokens(logprobs, sampler, kinds=None, **fields):
    """Return log-probabilities (1, S) and inputs of the tokens of a session, of kind `bridged` if
    not given."""
    number = len(logprobs)
    session = SimpleNamespace(rows=[SimpleNamespace(ids=range(10))], traces=[7])
    inputs = {
        "micro_batch": SimpleNamespace(sessions=[session]),
        "forest": SimpleNamespace(tokens=4),
        "sampling_per_token_logps": torch.tensor([sampler]),
        "old_per_token_logps": torch.tensor([sampler]),
        "teacher_per_token_logps": torch.zeros(1, number),
        "completion_mask": torch.ones(1, number, dtype=torch.long),
        "kinds": torch.tensor([kinds or [BRIDGED] * number]),
    }
    for name, values in fields.items():
        inputs[name] = torch.tensor([values])
    return torch.tensor([logprobs]), inputs


class TestStep:
    def test_the_difference_from_the_sampler_is_by_kind_of_continuity(self):
        part = part_of(
            tokens([-1.0, -2.0, -1.0], [-1.5, -1.0, -1.0], [BRIDGED, BRIDGED, RENDERED]),
            tokens([-1.25], [-1.0], [RENDERED]),
            tokens([-9.0], [-1.0], [-1]),
        )
        step = step_metrics([part], on_policy=True)
        assert named(step, "difference", "sampler_ratio", "tokens/") == pytest.approx(
            {
                "difference/bridged": 0.75,
                "difference/rendered": 0.125,
                "difference_max": 8.0,
                "sampler_ratio/bridged": (math.exp(0.5) + math.exp(-1)) / 2,
                "sampler_ratio/rendered": (1 + math.exp(-0.25)) / 2,
                "tokens/bridged": 2,
                "tokens/rendered": 2,
            }
        )
        assert not named(step, "off_policy", "importance")

    def test_a_difference_from_other_weights_than_those_that_sampled_has_another_name(self):
        step = step_metrics([part_of(tokens([-1.0, -2.0], [-1.5, -2.25]))])
        assert step["off_policy/bridged"] == pytest.approx(0.375)
        assert not named(step, "difference", "sampler_ratio")

    def test_weights_of_the_importance_correction_have_their_mean_and_limits(self):
        weights = [0.0, 0.5, 1.5, 2.0]
        given = tokens([-1.0] * 4, [-1.0] * 4, importance_sampling_ratio=weights)
        step = step_metrics([part_of(given)], is_corrected=True)
        assert named(step, "importance") == {
            "importance/mean": 1.0,
            "importance/min": 0.0,
            "importance/max": 2.0,
        }
        assert step["tokens_computed"] == 4
        assert step["tokens_masked"] == 1

    def test_what_trl_logs_of_a_micro_batch_counts_with_its_tokens_and_limits_are_limits(self):
        part = part_of(tokens([], []))
        for entropy, low, high, number in ((1.0, 0.5, 0.5, 3), (5.0, 0.25, 0.75, 1), (0, 0, 0, 0)):
            logged = {
                "entropy": [entropy],
                "clip_ratio/low_min": [low],
                "clip_ratio/high_max": [high],
            }
            part.of_loss.append((logged, number))
        step = step_metrics([part])
        assert named(step, "entropy", "clip_ratio") == {
            "entropy": 2.0,
            "clip_ratio/low_min": 0.25,
            "clip_ratio/high_max": 0.75,
        }
        # nor has a step without tokens means of them
        assert step["tokens_computed"] == 0
        assert not named(step, "ratio", "difference", "off_policy", "tokens/")

    def test_parts_are_of_all_processes(self):
        first = part_of(tokens([-1.0, -2.0], [-1.0, -1.0]))
        second = part_of(tokens([-1.5], [-1.0]), tokens([], []))
        for seconds, part in enumerate((first, second), 1):
            part.seconds = seconds
            part.replayed = [2.0, seconds]
        second.finite = False
        step = step_metrics([first, second])
        assert step["tokens_in_rows"] == 30
        assert step["tokens_forwarded"] == 12
        assert step["tokens_per_second"] == 15
        assert step["steps_skipped"] == 1
        assert step["routing/differs"] == 0.75
        assert step["ratio/mean"] == pytest.approx((1 + math.exp(-1) + math.exp(-0.5)) / 3)

    def test_memory_is_that_of_the_process_without_a_gpu(self):
        assert 2**20 < peak_memory(CPU) < 2**40

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_memory_of_a_gpu_is_the_peak_since_the_last_call(self):
        device = torch.device("cuda")
        peak_memory(device)
        torch.zeros(2**26, dtype=torch.uint8, device=device)
        assert peak_memory(device) >= 2**26
        assert peak_memory(device) < 2**26


@pytest.mark.parametrize("forward", ["padded", "packed"])
@pytest.mark.parametrize("corrected", [False, True])
def test_means_are_over_tokens_whatever_the_micro_batches(train, traces, forward, corrected):
    for trace in traces:  # two turns: the first is a root, the second bridged
        end = trace.completion_mask.index(0)
        bridged = trace.completion_mask.index(1, end)
        trace.continuity = [
            KindSpan(kind="root", start=0, end=end),
            KindSpan(kind="bridged", start=bridged, end=len(trace.completion_mask)),
        ]
    own = {
        "learning_rate",
        "step_time",
        "tokens_per_second",
        "peak_memory_gib",
        "tokens_forwarded",
        "epoch",
    }
    found = []
    for number in (2 * len(traces), 3, 1):
        trainer = train(
            traces,
            forward=forward,
            vllm_importance_sampling_correction=corrected,
            gradient_accumulation_steps=number,
            num_iterations=2,
            max_steps=2,
        )
        first, second, *_ = trainer.state.log_history
        for step, logged in enumerate((first, second)):
            found.append((step, {name: logged[name] for name in logged.keys() - own}))
            wanted = found[step][1]
            assert found[-1] == (step, pytest.approx(wanted, rel=1e-3, abs=1e-5))
    in_rows = sum(len(trace.prompt_ids + trace.completion_ids) for trace in traces)
    assert first["tokens_in_rows"] == in_rows
    assert first["tokens_forwarded"] > 0
    assert 0 < first["difference/bridged"] < 1e-5
    assert first["tokens_computed"] == first["tokens_trained"]
    assert not named(second, "difference", "sampler_ratio", "reward", "left_out")
    assert second["off_policy/bridged"] > 1e-3
    assert second["ratio/max"] > 1.1 > first["ratio/max"] > 0.9
