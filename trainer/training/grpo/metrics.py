"""Metrics of a training step. All of them go to TRL's log, as its own do.

`batch_metrics` describes the batch: sessions, rewards, groups, tokens trained and left out. `StepMetrics` describes an
optimizer step: the log-probabilities against those of the sampler, the loss's ratios, the tokens computed, time and
memory. Means are over tokens, whatever the micro-batches and processes are.

With `logging_steps` above 1 TRL logs the mean over the steps that have a value: of counts and maxima too.
"""

import math
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple, get_args

import torch
from datasets import Dataset
from torch import Tensor

from rolltap.addons.store.records import CallKind, SessionStatus
from rolltap.trainer.names import file_name
from rolltap.trainer.traces.build import GroupReward, TraceBatch, Unrewarded
from rolltap.trainer.traces.ledger import LeftOut, cached_shares
from rolltap.trainer.training.grpo.advantages import GROUP, mean_group_std, rewards_by, rewards_differ

KINDS: tuple[CallKind, ...] = get_args(CallKind)
"""Kinds of continuity. A token has the number of its kind in this order."""

MOST_TASKS = 50
"""Most tasks that have a metric each. Dashboards become slow with thousands of names."""

TRLS = (
    "entropy",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)
"""Names under which TRL 1.16's `_compute_loss` logs means of one micro-batch. TRL then averages these, so that a
micro-batch of few tokens counts as much as one of many, and one without tokens as 0. `StepMetrics` replaces them."""

_SUMS = (
    *("tokens", "entropy", "kl", "ratio", "clipped_low", "clipped_high", "cut_low", "cut_high"),
    *("tokens_in_rows", "tokens_forwarded"),
    *(f"{name}/{kind}" for name in ("count", "difference", "sampler_ratio") for kind in KINDS),
)
_MAXIMA = ("ratio", "-ratio", "difference", "seconds", "peak_bytes")


def named_tasks(dataset: Dataset) -> set[str]:
    """Return the tasks that have a metric each: the values of the column `task_id`, if there are at most `MOST_TASKS`.

    They are the same in all steps, and after a resume. Without the column no task has one.
    """
    tasks = set(dataset["task_id"]) if "task_id" in dataset.column_names else set()
    return tasks if len(tasks) <= MOST_TASKS else set()


def batch_metrics(batch: TraceBatch, trained: TraceBatch, tasks: Collection[str]) -> dict[str, float]:
    """Return the metrics of a batch by name.

    `trained` is the part of it that has a signal, with its ledger. `tasks` are those with a metric each.

    `sessions` and `groups` are all; `sessions_STATUS` those with this status; `sessions_excluded` those that the recipe
    leaves out for their outcome or for suspicions, `sessions_no_reward` those that have none for another reason than
    their status. `suspicious` are those that match a rule of suspicion, `suspicious/RULE` those that match this one.
    `groups_without_reward` those without any, `groups_without_signal` those whose rewards are all equal.
    `reward` is the mean over sessions with a reward, `reward/harness/NAME` and `reward/task/ID` over those with this
    label, with names percent-encoded. `reward_std` is the mean over groups with a reward. `traces_per_session` is of
    sessions with a reward. `left_out/REASON` are tokens, for every reason. `cached_share` is the share of the prompt
    tokens of continued calls that came from the engine's prefix cache, `cached_share/NAME` that of a harness if there
    are several.
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
        metrics["reward"] = fmean(labelled.reward for labelled in rewards)
        metrics["reward_std"] = mean_group_std(groups.values())
        means = {
            "harness": rewards_by(attrgetter("harness"), rewards),
            "task": rewards_by(attrgetter("task_id"), (r for r in rewards if r.task_id in tasks)),
        }
        for label, parts in means.items():
            metrics |= {f"reward/{label}/{file_name(name)}": fmean(part) for name, part in parts.items() if name}
    return metrics


class Tokens(NamedTuple):
    """The N tokens of one micro-batch that are in the loss. Each tensor has the shape (N,); no gradient is taken.

    Attributes:
        logprobs: Log-probabilities under the weights that are trained.
        sampler_logprobs: The recorded ones.
        old_logprobs: Those in the denominator of the loss's ratio.
        kinds: Numbers of their kinds in `KINDS`; -1 where the trace does not say.
        weights: Importance weights between sampler and trainer before they are truncated or masked; None when the
            loss has none.
        reference_logprobs: None without a reference model.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    entropies: Tensor
    kinds: Tensor
    weights: Tensor | None = None
    reference_logprobs: Tensor | None = None


class StepMetrics:
    """Sums over the micro-batches of one optimizer step on one process, and the metrics of all processes.

    Call `add` for each micro-batch, between `start` and `stop`. Gather `local` of all processes in one collective, and
    give it to `values`.
    """

    def __init__(self, args: Any, *, on_policy: bool) -> None:
        """Take the bounds of the loss from `args`, a `TraceGRPOConfig`.

        With `on_policy` the weights are those that sampled, so the difference from the sampler's log-probabilities is
        numerical, or a fault of the record.
        """
        self._args = args
        self._on_policy = on_policy
        self._seconds = self._started = 0.0
        self._sums: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._maxima: defaultdict[str, list[Tensor]] = defaultdict(list)

    def start(self) -> None:
        """Begin a stretch of time that counts for `tokens_per_second`."""
        self._started = time.perf_counter()

    def stop(self, device: torch.device) -> None:
        """End the stretch, after the work of a CUDA `device`."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._seconds += time.perf_counter() - self._started

    @torch.no_grad()
    def add(self, tokens: Tokens | None, *, in_rows: int, forwarded: int) -> None:
        """Add a micro-batch: its tokens in the loss, the number of tokens in its rows, and that which went through the
        model.

        `tokens` is None for a micro-batch without tokens in the loss.
        """
        self._sum("tokens_in_rows", torch.tensor(in_rows))
        self._sum("tokens_forwarded", torch.tensor(forwarded))
        if tokens is None or not tokens.logprobs.numel():
            return
        ratio = (tokens.logprobs - tokens.old_logprobs).exp()
        low, high = self._clip_bounds()
        self._sum("tokens", torch.ones_like(ratio))
        self._sum("entropy", tokens.entropies)
        self._sum("ratio", ratio)
        self._sum("clipped_low", (ratio < low) & (tokens.advantages < 0))
        self._sum("clipped_high", (ratio > high) & (tokens.advantages > 0))
        self._maxima["ratio"].append(ratio.max())
        self._maxima["-ratio"].append(-ratio.min())
        if tokens.weights is not None:
            self._sum("cut_low", tokens.weights < self._args.mismatch_min)
            self._sum("cut_high", tokens.weights > self._args.mismatch_max)
        if tokens.reference_logprobs is not None:
            difference = tokens.reference_logprobs - tokens.logprobs
            kl = difference.exp() - difference - 1
            self._sum("kl", kl * ratio if self._args.use_bias_correction_kl else kl)
        self._add_differences(tokens)

    def local(self, device: torch.device) -> Tensor:
        """Return this process's part, shape (1, K), float64, on `device`, for `accelerator.gather`.

        K is the same on every process and in every step. Resets the peak of a CUDA device's allocated memory.
        """
        self._maxima["seconds"] = [torch.tensor(self._seconds, dtype=torch.float64)]
        self._maxima["peak_bytes"] = [torch.tensor(peak_memory(device), dtype=torch.float64)]
        zero, least = torch.zeros(()), torch.tensor(-math.inf)
        sums = [torch.stack(self._sums.get(name, [zero])).sum() for name in _SUMS]
        maxima = [torch.stack(self._maxima.get(name, [least])).max() for name in _MAXIMA]
        return torch.stack([value.to(device, torch.float64) for value in sums + maxima])[None]

    def values(self, gathered: Tensor) -> dict[str, float]:
        """Return the metrics of all processes by name, from their `local` parts, shape (processes, K).

        A name without a token that it is about is left out. Means and shares are of the computed tokens. Values can be
        infinite.

        - `tokens_computed`: trained tokens in the loss. Without a reference, those of a session with advantage 0 are
          not: they have no gradient.
        - `difference/KIND`: mean |log-probability - the sampler's|, `sampler_ratio/KIND`: mean of its exponential
          (expected: 1), `difference_max`; only with `on_policy`.
        - `off_policy/KIND`: as `difference/KIND`, without `on_policy`: weights differ, which is no fault.
        - `ratio/mean`, `ratio/min`, `ratio/max`, `entropy`, `kl`, `clip_ratio/*` or `cispo_clip_ratio` (TRL's names).
        - `masked/low`, `masked/high` (or `truncated/`): share with an importance weight out of bounds;
          `tokens_masked`: their number.
        - `tokens_in_rows`, `tokens_forwarded`, `tokens_per_second` (in rows), `peak_memory_gib` (the highest process).
        """
        sums = dict(zip(_SUMS, gathered[:, : len(_SUMS)].sum(0).tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, gathered[:, len(_SUMS) :].amax(0).tolist(), strict=True))
        metrics = {"tokens_computed": sums["tokens"]}
        metrics |= {name: sums[name] for name in ("tokens_in_rows", "tokens_forwarded")}
        metrics["peak_memory_gib"] = maxima["peak_bytes"] / 2**30
        if maxima["seconds"] > 0:
            metrics["tokens_per_second"] = sums["tokens_in_rows"] / maxima["seconds"]
        if number := sums["tokens"]:
            metrics |= {"ratio/mean": sums["ratio"] / number, "ratio/max": maxima["ratio"]}
            metrics |= {"ratio/min": -maxima["-ratio"], "entropy": sums["entropy"] / number}
            metrics |= self._shares({name: value / number for name, value in sums.items()})
            if self._args.mismatch == "mask":
                metrics["tokens_masked"] = sums["cut_low"] + sums["cut_high"]
        for kind in KINDS:
            if count := sums[f"count/{kind}"]:
                difference = sums[f"difference/{kind}"] / count
                if self._on_policy:
                    metrics |= {f"difference/{kind}": difference, "difference_max": maxima["difference"]}
                    metrics[f"sampler_ratio/{kind}"] = sums[f"sampler_ratio/{kind}"] / count
                else:
                    metrics[f"off_policy/{kind}"] = difference
        return metrics

    def _add_differences(self, tokens: Tokens) -> None:
        difference = tokens.logprobs - tokens.sampler_logprobs
        self._maxima["difference"].append(difference.abs().max())
        for i, kind in enumerate(KINDS):
            of_kind = tokens.kinds == i
            self._sum(f"count/{kind}", of_kind)
            self._sum(f"difference/{kind}", difference.abs().masked_fill(~of_kind, 0.0))
            self._sum(f"sampler_ratio/{kind}", difference.exp().masked_fill(~of_kind, 0.0))

    def _shares(self, means: dict[str, float]) -> dict[str, float]:
        shares = {"kl": means["kl"]} if self._args.beta else {}
        if self._args.loss_type == "cispo":
            shares["cispo_clip_ratio"] = means["clipped_high"]
        else:
            shares |= {f"clip_ratio/{side}_mean": means[f"clipped_{side}"] for side in ("low", "high")}
            shares["clip_ratio/region_mean"] = means["clipped_low"] + means["clipped_high"]
        cut = {"mask": "masked", "truncate": "truncated"}.get(self._args.mismatch)
        return shares | ({f"{cut}/{side}": means[f"cut_{side}"] for side in ("low", "high")} if cut else {})

    def _clip_bounds(self) -> tuple[float, float]:
        """Return the ratios beyond which a token has no gradient. Source: TRL 1.16, `GRPOTrainer._compute_loss`."""
        low, high = self._args.epsilon, self._args.epsilon_high
        high = low if high is None else high
        return (-math.inf, high) if self._args.loss_type == "cispo" else (1 - low, 1 + high)

    def _sum(self, name: str, values: Tensor) -> None:
        self._sums[name].append(values.sum(dtype=torch.float64))


def forget_trls(metrics: dict[str, list[float]]) -> None:
    """Remove what TRL's `_compute_loss` has just appended under the names of `TRLS`. Call it after each one."""
    for name in TRLS:
        if metrics.get(name):
            metrics[name].pop()
        if not metrics.get(name, [0.0]):
            del metrics[name]  # TRL logs an empty list as None


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use since the last call on a CUDA `device`, or since the process started on the CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
