"""Metrics of a batch and of an optimizer step, which go to TRL's log.
`recipes/site/pages/metrics.md` has their names.

Means are over tokens, whatever the micro-batches and processes are.
"""

import resource
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, get_args

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor

from rolltap.addons.store.records import SessionStatus
from rolltap.trainer.names import file_name
from rolltap.trainer.traces.build import GroupReward, TraceBatch, Unrewarded
from rolltap.trainer.traces.ledger import LeftOut, cached_shares
from rolltap.trainer.traces.trained import Scored
from rolltap.trainer.training.step.advantages import rewards_by, rewards_differ, standard_deviation
from rolltap.trainer.training.step.batch import KINDS, number_trained

FORK = "fork"
"""Kind of a group of forks: its id begins with this, `~` and the task's."""
MOST_TASKS = 50
"""Most tasks that have a metric each. Dashboards become slow with thousands of names."""
_COUNTS = ("excluded", "no_reward", *get_args(SessionStatus))


def named_tasks(dataset: Dataset) -> set[str]:
    """Return the tasks that have a metric each: those of the column `task_id`, if they are few."""
    if "task_id" not in dataset.column_names:
        return set()
    tasks = set(dataset["task_id"])
    if len(tasks) > MOST_TASKS:
        return set()
    return tasks


def batch_metrics(
    batch: TraceBatch,
    trained: TraceBatch,
    tasks: Collection[str],
) -> dict[str, float]:
    """Return metrics by name. `trained` is the part of the batch with a signal.

    `sessions_excluded` are those that the recipe leaves out for their outcome or for suspicions,
    `sessions_no_reward` those that have none for another reason than their status. Rewards are
    those of fresh sessions, and `reward/forks` of forks, which begin in the middle of a session
    that failed. `reward_std` is the mean over groups with a reward, `traces_per_session` that over
    sessions with one. `tasks` have a metric each. Names of harnesses and tasks are percent-encoded.
    """
    rewarded = list(batch.rewards.values())
    unrewarded = list(batch.unrewarded.values())
    groups = rewards_by("group_id", rewarded)
    all_groups = {label.group_id for label in unrewarded}.union(groups)
    metrics = defaultdict[str, float](float)
    metrics["sessions"] = len(rewarded) + len(unrewarded)
    metrics["groups"] = len(all_groups)
    metrics["groups_without_reward"] = len(all_groups) - len(groups)
    metrics["groups_without_signal"] = 0
    for rewards in groups.values():
        metrics["groups_without_signal"] += not rewards_differ(rewards)

    metrics["suspicious"] = 0
    for name in _COUNTS:
        metrics[f"sessions_{name}"] = 0
    labels: list[GroupReward | Unrewarded] = [*rewarded, *unrewarded]
    for label in labels:
        metrics[f"sessions_{label.status}"] += 1
        metrics["suspicious"] += bool(label.suspicions)
        for rule in label.suspicions:
            metrics[f"suspicious/{rule}"] += 1
    for label in unrewarded:
        metrics["sessions_no_reward"] += label.reason == "no_reward"
        metrics["sessions_excluded"] += label.reason in ("excluded", "suspicious")

    metrics["tokens_trained"] = number_trained(trained.traces)
    if trained.ledger.sampled:
        for reason in get_args(LeftOut):
            metrics[f"left_out/{reason}"] = trained.ledger.left_out.get(reason, 0)
    for harness, share in cached_shares(batch.continued).items():
        name = f"cached_share/{file_name(harness)}".removesuffix("/")
        metrics[name] = share

    if rewarded:
        metrics["traces_per_session"] = len(batch.traces) / len(rewarded)
    fresh = []
    forks = []
    for reward in rewarded:
        if f"{FORK}~{reward.task_id}-" in reward.group_id:
            forks.append(reward)
        else:
            fresh.append(reward)
    if forks:
        metrics["reward/forks"] = fmean(reward.reward for reward in forks)
    if fresh:
        metrics["reward"] = fmean(reward.reward for reward in fresh)
        groups = rewards_by("group_id", fresh)
        metrics["reward_std"] = fmean(map(standard_deviation, groups.values()))
    for harness, rewards in rewards_by("harness", fresh).items():
        if harness:
            metrics[f"reward/harness/{file_name(harness)}"] = fmean(rewards)
    for task, rewards in rewards_by("task_id", fresh).items():
        if task and task in tasks:
            metrics[f"reward/task/{file_name(task)}"] = fmean(rewards)
    return dict(metrics)


@dataclass(slots=True)
class StepPart:
    """An optimizer step on one process."""

    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    peak_bytes: int = 0
    finite: bool = True
    """True if no gradient is infinite, or not a number."""
    trains: bool = False
    """True if any token has a gradient."""
    replayed: Sequence[float] = (0.0, 0.0)
    """Choices of experts that were replayed, and those of them that differ from the trainer's."""
    tokens_in_rows: int = 0
    tokens_forwarded: int = 0
    scored: list[tuple[list[int], NDArray[np.float32]]] = field(default_factory=list)
    """For each micro-batch the places of its traces, and values of their N trained tokens, (6, N):
    log-probabilities and importance weights, as in `Scored`, ratios, differences from the sampler
    and from the teacher, and kinds."""
    of_loss: list[tuple[Mapping[str, list[float]], int]] = field(default_factory=list)
    """For each micro-batch the metrics that TRL's loss logged, which are those of all processes,
    and the trained tokens of all processes."""

    @torch.no_grad()
    def add(self, logprobs: Tensor, inputs: Mapping[str, Any]) -> None:
        """Add a micro-batch: its tokens' log-probabilities (B, S), and the inputs of its loss."""
        self.tokens_forwarded += inputs["forest"].tokens
        traces = []
        for session in inputs["micro_batch"].sessions:
            traces += session.traces
            for row in session.rows:
                self.tokens_in_rows += len(row.ids)
        weights = inputs.get("importance_sampling_ratio", logprobs.new_ones(()))
        values = [
            logprobs,
            weights.expand(logprobs.shape),
            (logprobs - inputs["old_per_token_logps"]).exp(),
            logprobs - inputs["sampling_per_token_logps"],
            logprobs - inputs["teacher_per_token_logps"],
            inputs["kinds"],
        ]
        trained = inputs["completion_mask"].bool()
        tokens = torch.stack(values)[:, trained].float().cpu().numpy()
        self.scored.append((traces, tokens))
        if tokens[1].any():
            self.trains = True

    def stop(self, device: torch.device) -> None:
        """End the time and the memory of the step, when the `device` has done its work."""
        self.seconds = time.perf_counter() - self.started
        self.peak_bytes = peak_memory(device)


def scored_tokens(parts: Sequence[StepPart]) -> Iterator[Scored]:
    """Yield the tokens of all micro-batches of all processes for the account of the step."""
    for part in parts:
        for traces, values in part.scored:
            yield traces, values[:2]


def step_metrics(
    parts: Sequence[StepPart],
    *,
    on_policy: bool = False,
    is_corrected: bool = False,
    has_teacher: bool = False,
) -> dict[str, float]:
    """Return the metrics of an optimizer step, by name, from the parts of all processes.

    `on_policy`: the weights are those that sampled, so the difference from the sampler's
    log-probabilities is numerical, or a fault of the record. A name without a token that it is
    about is left out. Means and shares are of the computed tokens. Values can be infinite.
    """
    metrics = _metrics_of_loss(parts[0])
    in_rows = sum(part.tokens_in_rows for part in parts)
    metrics["tokens_in_rows"] = in_rows
    metrics["tokens_forwarded"] = sum(part.tokens_forwarded for part in parts)
    metrics["peak_memory_gib"] = max(part.peak_bytes for part in parts) / 2**30
    metrics["tokens_per_second"] = in_rows / max(part.seconds for part in parts)
    metrics["steps_skipped"] = not all(part.finite for part in parts)
    replayed, differs = np.sum([part.replayed for part in parts], axis=0)
    if replayed:
        metrics["routing/differs"] = differs / replayed

    every = []
    for part in parts:
        for _, values in part.scored:
            every.append(values)
    tokens = np.concatenate(every, axis=1, dtype=np.float64)
    _, weights, ratios, differences, from_teacher, kinds = tokens
    metrics["tokens_computed"] = len(kinds)
    if not len(kinds):
        return metrics
    metrics |= _limits("ratio", ratios)
    if is_corrected:
        metrics |= _limits("importance", weights)
        metrics["tokens_masked"] = int(np.count_nonzero(weights == 0))
    if has_teacher:
        metrics["teacher_kl"] = from_teacher.mean()
    if on_policy:
        metrics["difference_max"] = abs(differences).max()
    for number, kind in enumerate(KINDS):
        of_kind = differences[kinds == number]
        if not len(of_kind):
            continue
        metrics[f"tokens/{kind}"] = len(of_kind)
        mean = abs(of_kind).mean()
        if on_policy:
            metrics[f"difference/{kind}"] = mean
            metrics[f"sampler_ratio/{kind}"] = np.exp(of_kind).mean()
        else:
            metrics[f"off_policy/{kind}"] = mean
    return metrics


def _limits(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    return {
        f"{name}/mean": values.mean(),
        f"{name}/min": values.min(),
        f"{name}/max": values.max(),
    }


def _metrics_of_loss(part: StepPart) -> dict[str, float]:
    """Return TRL's metrics of the step. TRL logs the mean over micro-batches; here each token
    counts the same."""
    found = defaultdict[str, list[float]](list)
    weights = defaultdict[str, list[int]](list)
    for metrics, tokens in part.of_loss:
        if tokens:
            for name, logged in metrics.items():
                found[name] += logged
                weights[name].append(tokens)
    means: dict[str, float] = {}
    for name, values in found.items():
        if name.endswith("_max"):
            means[name] = max(values)
        elif name.endswith("_min"):
            means[name] = min(values)
        else:
            means[name] = float(np.average(values, weights=weights[name]))
    return means


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use since the last call on a CUDA `device`, or since the process
    started on the CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
