"""Metrics of a step, and what a training logs."""

import math
import random
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
from tests.trainer.training.step.tiny import make_trace, record, tiny_model, trained

TASKS = {"x", "y"}
CPU = torch.device("cpu")
BRIDGED = KINDS.index("bridged")
RENDERED = KINDS.index("rendered")


def named(metrics, *prefixes):
    """Return the metrics whose names begin with one of the prefixes."""
    return {name: value for name, value in metrics.items() if name.startswith(prefixes)}


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
    return torch.tensor([logprobs]), inputs | {
        name: torch.tensor([values]) for name, values in fields.items()
    }


def part_of(*micro_batches):
    """Return a step of one process with these micro-batches."""
    part = StepPart()
    for logprobs, inputs in micro_batches:
        part.add(logprobs, inputs)
    part.stop(CPU)
    return part


def values(*micro_batches, on_policy=True, **options):
    """Return the metrics of a step of one process with these micro-batches."""
    return step_metrics([part_of(*micro_batches)], on_policy=on_policy, **options)


def trace(session, mask=(1,), **fields):
    return make_trace(session, mask, **{"harness": "codex", **fields})


class TestBatch:
    @pytest.fixture
    def batch(self):
        """Two sessions of two harnesses on task x, which succeed or fail, and two on task y, which
        fail alike."""
        labels = {
            "a": ("x", "codex", 1.0),
            "b": ("x", "pi", 0.0),
            "c": ("y", "codex", 0.0),
            "d": ("y", "pi", 0.0),
        }
        return TraceBatch(
            traces=[trace("a", (1, 0, 1)), trace("a"), trace("b"), trace("c"), trace("d")],
            rewards={
                session: GroupReward(group_id=task, reward=reward, task_id=task, harness=harness)
                for session, (task, harness, reward) in labels.items()
            },
            ledger=Ledger(sampled=9, trained=6, left_out={"aborted": 3}),
        )

    @pytest.fixture
    def trained(self, batch):
        left_out = {"aborted": 3, "over_length": 2}
        return TraceBatch(
            traces=batch.traces[:3],
            rewards=batch.rewards,
            ledger=Ledger(sampled=9, trained=4, left_out=left_out),
        )

    def test_rewards_are_means_over_the_sessions_of_each_harness_and_task(self, batch, trained):
        assert named(batch_metrics(batch, trained, TASKS), "reward") == {
            "reward": 0.25,
            "reward_std": pytest.approx(math.sqrt(0.5) / 2),
            "reward/harness/codex": 0.5,
            "reward/harness/pi": 0.0,
            "reward/task/x": 0.5,
            "reward/task/y": 0.0,
        }
        assert named(batch_metrics(batch, trained, {"y", "z"}), "reward/task/").keys() == {
            "reward/task/y"
        }

    def test_forks_are_beside_the_fresh_sessions_whose_task_may_be_named_like_them(self):
        def rewards(**given):
            return {
                name: GroupReward(group_id=group, reward=reward, task_id=task, harness="codex")
                for name, (group, task, reward) in given.items()
            }

        fresh = rewards(
            a=("t-1.0.0", "t", 0.0), b=("t-1.0.0", "t", 0.0), c=("fork~t-1.0.1", "fork~t", 0.0)
        )
        forks = rewards(d=("fork~t-1.0.0", "t", 1.0), e=("0/fork~t-1.0.0", "t", 0.5))
        batch = TraceBatch(rewards=fresh | forks)
        metrics = batch_metrics(batch, batch, {"t"})
        assert named(metrics, "reward") == {
            "reward": 0.0,
            "reward_std": 0.0,
            "reward/forks": 0.75,
            "reward/harness/codex": 0.0,
            "reward/task/t": 0.0,
        }
        assert (metrics["sessions"], metrics["groups"]) == (5, 4)

    def test_the_cached_share_is_of_all_harnesses_and_of_each(self, batch, trained):
        assert not named(batch_metrics(batch, trained, TASKS), "cached_share")
        batch.continued = {
            "codex": CachedPrompts(calls=1, prompt_tokens=100, known_tokens=90, cached_tokens=50),
            "pi agent": CachedPrompts(
                calls=1, prompt_tokens=300, known_tokens=290, cached_tokens=300
            ),
        }
        shares = {"cached_share": 0.875, "cached_share/codex": 0.5, "cached_share/pi%20agent": 1.0}
        assert named(batch_metrics(batch, trained, TASKS), "cached_share") == shares

    def test_tokens_are_trained_or_left_out_and_every_reason_is_there(self, batch, trained):
        metrics = batch_metrics(batch, trained, TASKS)
        assert (
            metrics["groups"],
            metrics["groups_without_signal"],
            metrics["traces_per_session"],
        ) == (2, 1, 1.25)
        assert metrics["tokens_trained"] == 4
        left_out = named(metrics, "left_out/")
        assert Counter(left_out) == Counter({"left_out/aborted": 3, "left_out/over_length": 2})
        assert {"left_out/no_reward", "left_out/superseded", "left_out/auxiliary"} < left_out.keys()

    def test_a_name_that_would_nest_is_encoded_and_an_empty_one_has_no_metric(self):
        rewards = {
            "s": GroupReward(group_id="g", reward=1.0, task_id="repo/issue 7"),
            "t": GroupReward(group_id="g", reward=0.0, harness="own"),
        }
        batch = TraceBatch(rewards=rewards)
        metrics = batch_metrics(batch, batch, {"repo/issue 7", ""})
        assert named(metrics, "reward/").keys() == {
            "reward/task/repo%2Fissue%207",
            "reward/harness/own",
        }

    def test_sessions_without_a_reward_are_counted_though_they_sampled_nothing(
        self, batch, trained
    ):
        batch.unrewarded = {
            "e": Unrewarded(group_id="x", reason="infrastructure", status="infrastructure"),
            "f": Unrewarded(group_id="dead", reason="infrastructure", status="infrastructure"),
            "g": Unrewarded(group_id="dead", reason="no_reward"),
        }
        metrics = batch_metrics(batch, trained, TASKS)
        assert (
            metrics["sessions"],
            metrics["sessions_infrastructure"],
            metrics["sessions_no_reward"],
        ) == (7, 2, 1)
        assert (
            metrics["groups"],
            metrics["groups_without_signal"],
            metrics["groups_without_reward"],
        ) == (3, 1, 1)
        assert (metrics["reward"], metrics["traces_per_session"]) == (0.25, 1.25)

    def test_a_batch_of_faults_alone_has_no_reward_and_says_why(self):
        batch = TraceBatch(
            unrewarded={
                "a": Unrewarded(group_id="x", reason="infrastructure", status="infrastructure")
            }
        )
        metrics = batch_metrics(batch, batch, TASKS)
        counted = {
            "sessions": 1,
            "sessions_infrastructure": 1,
            "groups": 1,
            "groups_without_reward": 1,
        }
        assert Counter(metrics) == Counter(counted)
        assert "reward" not in metrics

    def test_sessions_are_counted_by_status_and_suspicion_whether_rewarded_or_not(self):
        batch = TraceBatch(
            rewards={
                "a": GroupReward(
                    group_id="g", reward=1.0, suspicions=("git_history", "web_search")
                ),
                "b": GroupReward(group_id="g", reward=0.0, status="timeout"),
            },
            unrewarded={
                "c": Unrewarded(group_id="g", reason="excluded", status="timeout"),
                "d": Unrewarded(
                    group_id="g", reason="suspicious", status="failed", suspicions=("git_history",)
                ),
                "e": Unrewarded(group_id="g", reason="unjudged", status="unjudged"),
            },
        )
        metrics = batch_metrics(batch, batch, TASKS)
        counted = {
            "sessions_completed": 1,
            "sessions_timeout": 2,
            "sessions_failed": 1,
            "sessions_unjudged": 1,
        }
        counted |= {
            "sessions_excluded": 2,
            "suspicious": 2,
            "suspicious/git_history": 2,
            "suspicious/web_search": 1,
        }
        assert Counter(named(metrics, "sessions_", "suspicious")) == Counter(counted)
        assert metrics["sessions"] == 5

    def test_a_batch_without_sessions_trains_nothing(self):
        assert set(batch_metrics(TraceBatch(), TraceBatch(), TASKS).values()) == {0}


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


class TestStep:
    def test_the_difference_from_the_sampler_is_by_kind_of_continuity(self):
        step = values(
            tokens([-1.0, -2.0, -1.0], [-1.5, -1.0, -1.0], kinds=[BRIDGED, BRIDGED, RENDERED]),
            tokens([-1.25], [-1.0], kinds=[RENDERED]),
            tokens([-9.0], [-1.0], kinds=[-1]),
        )
        assert named(step, "difference", "sampler_ratio") == pytest.approx(
            {
                "difference/bridged": 0.75,
                "difference/rendered": 0.125,
                "difference_max": 8.0,
                "sampler_ratio/bridged": (math.exp(0.5) + math.exp(-1)) / 2,
                "sampler_ratio/rendered": (1 + math.exp(-0.25)) / 2,
            }
        )
        assert named(step, "tokens/") == {"tokens/bridged": 2, "tokens/rendered": 2}

    def test_a_difference_from_other_weights_than_those_that_sampled_has_another_name(self):
        step = values(tokens([-1.0, -2.0], [-1.5, -2.25]), on_policy=False)
        assert step["off_policy/bridged"] == pytest.approx(0.375)
        assert not named(step, "difference", "sampler_ratio")
        assert not named(values(tokens([-1.0], [-1.5])), "off_policy")

    def test_weights_of_the_importance_correction_have_their_mean_and_limits(self):
        corrected = tokens([-1.0] * 4, [-1.0] * 4, importance_sampling_ratio=[0.0, 0.5, 1.5, 2.0])
        step = values(corrected, is_corrected=True)
        assert named(step, "importance") == {
            "importance/mean": 1.0,
            "importance/min": 0.0,
            "importance/max": 2.0,
        }
        assert (step["tokens_computed"], step["tokens_masked"]) == (4, 1)
        assert not named(values(tokens([-1.0], [-1.0])), "importance", "tokens_masked")

    def test_what_trl_logs_of_a_micro_batch_counts_with_its_tokens_and_limits_are_limits(self):
        part = part_of(tokens([], []))
        part.of_loss = [
            ({"entropy": [1.0], "clip_ratio/low_min": [0.5], "clip_ratio/high_max": [0.5]}, 3),
            ({"entropy": [5.0], "clip_ratio/low_min": [0.25], "clip_ratio/high_max": [0.75]}, 1),
            ({"entropy": [0.0], "clip_ratio/low_min": [0.0], "clip_ratio/high_max": [0.0]}, 0),
        ]
        step = step_metrics([part])
        assert named(step, "entropy") == {"entropy": 2.0}
        assert named(step, "clip_ratio") == {
            "clip_ratio/low_min": 0.25,
            "clip_ratio/high_max": 0.75,
        }

    def test_a_step_without_tokens_has_no_means_of_them(self):
        step = values(tokens([], []))
        assert step["tokens_computed"] == 0
        assert not named(step, "ratio", "difference", "tokens/")

    def test_parts_are_of_all_processes(self):
        parts = [
            part_of(tokens([-1.0, -2.0], [-1.0, -1.0])),
            part_of(tokens([-1.5], [-1.0]), tokens([], [])),
        ]
        for seconds, part in enumerate(parts, 1):
            part.seconds = seconds
            part.replayed = [2.0, seconds]
        parts[1].finite = False
        step = step_metrics(parts)
        assert (step["tokens_in_rows"], step["tokens_forwarded"], step["tokens_per_second"]) == (
            30,
            12,
            15,
        )
        assert (step["steps_skipped"], step["routing/differs"]) == (1, 0.75)
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


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def traces(model):
    """Traces of two turns: the first is a root, the second bridged."""
    recorded = record(model, random.Random(0))
    for trace in recorded:
        end = trace.completion_mask.index(0)
        bridged = trace.completion_mask.index(1, end)
        spans = [("root", 0, end), ("bridged", bridged, len(trace.completion_mask))]
        trace.continuity = [KindSpan(kind=kind, start=start, end=end) for kind, start, end in spans]
    return recorded


@pytest.mark.parametrize("forward", ["padded", "packed"])
@pytest.mark.parametrize("corrected", [False, True])
def test_means_are_over_tokens_whatever_the_micro_batches(
    model, traces, tmp_path, forward, corrected
):
    logged = []
    for number in (1, 3, 2 * len(traces)):
        config = {"forward": forward, "vllm_importance_sampling_correction": corrected}
        config |= {"num_iterations": 2, "max_steps": 2}
        trainer = trained(model, tmp_path, traces, gradient_accumulation_steps=number, **config)
        logged.append(trainer.state.log_history[:2])
    own = {
        "learning_rate",
        "step_time",
        "tokens_per_second",
        "peak_memory_gib",
        "tokens_forwarded",
        "epoch",
    }
    for step in (0, 1):
        first, *others = (
            {name: entry[step][name] for name in entry[step].keys() - own} for entry in logged
        )
        assert all(other == pytest.approx(first, rel=1e-3, abs=1e-5) for other in others)
    first, second = logged[0]
    assert first["tokens_in_rows"] == sum(
        len(trace.prompt_ids + trace.completion_ids) for trace in traces
    )
    assert first["tokens_forwarded"] > 0
    assert 0 < first["difference/bridged"] < 1e-5
    assert not named(second, "difference", "sampler_ratio", "reward", "left_out")
    assert second["off_policy/bridged"] > 1e-3
    assert first["tokens_computed"] == first["tokens_trained"]
    assert second["ratio/max"] > 1.1 > first["ratio/max"] > 0.9
