"""Metrics of a batch and of an optimizer step, which go to TRL's log. `recipes/site/pages/metrics.md` has their names.

Means are over tokens, whatever the micro-batches and processes are.
"""

import math
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from statistics import fmean
from typing import Any, get_args

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from rolltap.addons.store.records import CallKind, SessionStatus
from rolltap.trainer.names import file_name
from rolltap.trainer.traces.build import GroupReward, TraceBatch, Unrewarded
from rolltap.trainer.traces.ledger import LeftOut, cached_shares
from rolltap.trainer.training.step.advantages import GROUP, mean_group_std, rewards_by, rewards_differ

KINDS: tuple[CallKind, ...] = get_args(CallKind)
"""Kinds of continuity. A token has the number of its kind in this order."""

FORK = "fork"
"""Kind of a group of forks: its id begins with this, `~` and the task's."""
MOST_TASKS = 50
"""Most tasks that have a metric each. Dashboards become slow with thousands of names."""


def named_tasks(dataset: Dataset) -> set[str]:
    """Return the tasks that have a metric each: those of the column `task_id`, if there are at most `MOST_TASKS`."""
    tasks = set(dataset["task_id"]) if "task_id" in dataset.column_names else set()
    return tasks if len(tasks) <= MOST_TASKS else set()


def batch_metrics(batch: TraceBatch, trained: TraceBatch, tasks: Collection[str]) -> dict[str, float]:
    """Return metrics by name. `trained` is the part of the batch with a signal. `tasks` are those with a metric each.

    `sessions_excluded` are those that the recipe leaves out for their outcome or for suspicions, `sessions_no_reward`
    those that have none for another reason than their status. Rewards are those of fresh sessions, and
    `reward/forks` of forks, which begin in the middle of a session that failed. `reward_std` is the mean over groups
    with a reward, `traces_per_session` that over sessions with one. Names of harnesses and tasks are percent-encoded.
    """
    rewards = list(batch.rewards.values())
    groups = rewards_by(GROUP, rewards)
    labels: list[GroupReward | Unrewarded] = [*rewards, *batch.unrewarded.values()]
    statuses = Counter(label.status for label in labels)
    matched = Counter(rule for label in labels for rule in label.suspicions)
    reasons = Counter(unrewarded.reason for unrewarded in batch.unrewarded.values())
    without_reward = {unrewarded.group_id for unrewarded in batch.unrewarded.values()} - groups.keys()
    metrics = {
        "sessions": float(len(rewards) + len(batch.unrewarded)),
        **{f"sessions_{status}": float(statuses[status]) for status in get_args(SessionStatus)},
        "sessions_excluded": float(reasons["excluded"] + reasons["suspicious"]),
        "sessions_no_reward": float(reasons["no_reward"]),
        "suspicious": float(sum(bool(label.suspicions) for label in labels)),
        **{f"suspicious/{rule}": float(count) for rule, count in matched.items()},
        "groups": float(len(groups) + len(without_reward)),
        "groups_without_signal": float(sum(not rewards_differ(group) for group in groups.values())),
        "groups_without_reward": float(len(without_reward)),
        "tokens_trained": float(sum(trace.completion_mask.count(1) for trace in trained.traces)),
    }
    if trained.ledger.sampled:
        metrics |= {f"left_out/{reason}": float(trained.ledger.left_out.get(reason, 0)) for reason in get_args(LeftOut)}
    for harness, share in cached_shares(batch.continued).items():
        metrics[f"cached_share/{file_name(harness)}" if harness else "cached_share"] = share
    if rewards:
        metrics["traces_per_session"] = len(batch.traces) / len(rewards)
    fresh = []
    forks = []
    for each in rewards:
        if f"{FORK}~{each.task_id}-" in each.group_id:
            forks.append(each)
        else:
            fresh.append(each)
    if forks:
        metrics["reward/forks"] = fmean(labelled.reward for labelled in forks)
    if fresh:
        metrics["reward"] = fmean(labelled.reward for labelled in fresh)
        metrics["reward_std"] = mean_group_std(rewards_by(GROUP, fresh).values())
        means = {
            "harness": rewards_by(attrgetter("harness"), fresh),
            "task": rewards_by(attrgetter("task_id"), (r for r in fresh if r.task_id in tasks)),
        }
        for label, parts in means.items():
            metrics |= {f"reward/{label}/{file_name(name)}": fmean(part) for name, part in parts.items() if name}
    return metrics


Sums = dict[str, float]
Maxima = dict[str, float]


class StepMetrics:
    """Sums over the micro-batches of one optimizer step on one process, and the metrics of all processes.

    Call `add` and `add_of_loss` for each micro-batch, between `start` and `stop`, and `values` with the `local` of all
    processes.
    """

    def __init__(self, *, on_policy: bool) -> None:
        """With `on_policy` the weights are those that sampled, so the difference from the sampler's log-probabilities
        is numerical, or a fault of the record."""
        self._on_policy = on_policy
        self._seconds = 0.0
        self._started = 0.0
        self._sums: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._maxima: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._of_loss: list[tuple[dict[str, float], int]] = []
        self.scored: list[tuple[list[int], np.ndarray[Any, Any]]] = []
        """As `traces.trained.Scored`, of each micro-batch."""

    def start(self) -> None:
        """Begin a stretch of time that counts for `tokens_per_second`."""
        self._started = time.perf_counter()

    def stop(self, device: torch.device) -> None:
        """End the stretch, after the work of a CUDA `device`."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._seconds += time.perf_counter() - self._started

    @torch.no_grad()
    def add(self, logprobs: Tensor, inputs: Mapping[str, Any]) -> None:
        """Add a micro-batch: the log-probabilities (B, S) of its tokens, and the inputs of its loss."""
        micro_batch = inputs["micro_batch"]
        in_rows = 0
        traces = []
        for session in micro_batch.sessions:
            in_rows += sum(len(row.ids) for row in session.rows)
            traces += session.traces
        self._sum("tokens_in_rows", torch.tensor(in_rows))
        self._sum("tokens_forwarded", torch.tensor(inputs["forest"].tokens))
        trained = inputs["completion_mask"].bool()
        if not trained.any():
            return
        logprobs = logprobs[trained]
        weights = inputs.get("importance_sampling_ratio", torch.ones(()).to(logprobs)).expand(trained.shape)[trained]
        self.scored.append((traces, torch.stack([logprobs, weights]).float().cpu().numpy()))
        ratio = (logprobs - inputs["old_per_token_logps"][trained]).exp()
        difference = logprobs - inputs["sampling_per_token_logps"][trained]
        self._sum("tokens", torch.ones_like(ratio))
        self._sum("ratio", ratio)
        self._maxima["ratio"].append(ratio.max())
        self._maxima["-ratio"].append(-ratio.min())
        self._maxima["difference"].append(difference.abs().max())
        if "importance_sampling_ratio" in inputs:
            self._sum("importance", weights)
            self._sum("without_weight", weights == 0)
            self._maxima["importance"].append(weights.max())
            self._maxima["-importance"].append(-weights.min())
        if inputs["teacher_share"]:
            self._sum("teacher_kl", logprobs - inputs["teacher_per_token_logps"][trained])
        kinds = inputs["kinds"][trained]
        for i, kind in enumerate(KINDS):
            of_kind = kinds == i
            self._sum(f"count/{kind}", of_kind)
            self._sum(f"difference/{kind}", difference.abs().masked_fill(~of_kind, 0.0))
            self._sum(f"sampler_ratio/{kind}", difference.exp().masked_fill(~of_kind, 0.0))

    def add_of_loss(self, metrics: Mapping[str, list[float]], tokens: int) -> None:
        """Add the metrics that TRL's loss logged for a micro-batch with so many trained tokens on all processes."""
        self._of_loss.append(({name: values[-1] for name, values in metrics.items()}, tokens))

    def local(self, device: torch.device) -> tuple[Sums, Maxima]:
        """Return this process's sums and maxima by name. Resets the peak of a CUDA device's allocated memory."""
        sums = {name: float(torch.stack(values).sum()) for name, values in self._sums.items()}
        maxima = {name: float(torch.stack(values).max()) for name, values in self._maxima.items()}
        maxima["seconds"] = self._seconds
        maxima["peak_bytes"] = float(peak_memory(device))
        return sums, maxima

    def values(self, parts: Iterable[tuple[Sums, Maxima]]) -> dict[str, float]:
        """Return the metrics by name, from the `local` parts of all processes.

        A name without a token that it is about is left out. Means and shares are of the computed tokens. Values can be
        infinite.
        """
        sums: defaultdict[str, float] = defaultdict(float)
        maxima: defaultdict[str, float] = defaultdict(lambda: -math.inf)
        for own_sums, own_maxima in parts:
            for name, value in own_sums.items():
                sums[name] += value
            for name, value in own_maxima.items():
                maxima[name] = float(np.maximum(maxima[name], value))  # not a number if one is none
        metrics = self._values_of_loss()
        metrics["tokens_in_rows"] = sums["tokens_in_rows"]
        metrics["tokens_forwarded"] = sums["tokens_forwarded"]
        metrics["tokens_computed"] = sums["tokens"]
        metrics["peak_memory_gib"] = maxima["peak_bytes"] / 2**30
        if maxima["seconds"] > 0:
            metrics["tokens_per_second"] = sums["tokens_in_rows"] / maxima["seconds"]
        if number := sums["tokens"]:
            metrics["ratio/mean"] = sums["ratio"] / number
            metrics["ratio/min"] = -maxima["-ratio"]
            metrics["ratio/max"] = maxima["ratio"]
            if "importance" in maxima:
                metrics["importance/mean"] = sums["importance"] / number
                metrics["importance/min"] = -maxima["-importance"]
                metrics["importance/max"] = maxima["importance"]
                metrics["tokens_masked"] = sums["without_weight"]
            if "teacher_kl" in sums:
                metrics["teacher_kl"] = sums["teacher_kl"] / number
        for kind in KINDS:
            if count := sums[f"count/{kind}"]:
                metrics[f"tokens/{kind}"] = count
                difference = sums[f"difference/{kind}"] / count
                if self._on_policy:
                    metrics[f"difference/{kind}"] = difference
                    metrics["difference_max"] = maxima["difference"]
                    metrics[f"sampler_ratio/{kind}"] = sums[f"sampler_ratio/{kind}"] / count
                else:
                    metrics[f"off_policy/{kind}"] = difference
        return metrics

    def _values_of_loss(self) -> dict[str, float]:
        """Return TRL's metrics of the step. TRL logs the mean over micro-batches; here each token counts the same."""
        found: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for metrics, tokens in self._of_loss:
            for name, value in metrics.items():
                if tokens:
                    found[name].append((value, tokens))
        means = {}
        for name, values in found.items():
            if name.endswith("_max"):
                means[name] = max(value for value, _ in values)
            elif name.endswith("_min"):
                means[name] = min(value for value, _ in values)
            else:
                means[name] = sum(value * tokens for value, tokens in values) / sum(tokens for _, tokens in values)
        return means

    def _sum(self, name: str, values: Tensor) -> None:
        self._sums[name].append(values.sum(dtype=torch.float64))


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use since the last call on a CUDA `device`, or since the process started on the CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
