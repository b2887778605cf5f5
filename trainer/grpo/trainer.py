"""TraceGRPOTrainer: TRL's GRPOTrainer fed with recorded traces instead of generating by itself.

Only what the loss is fed with is replaced; the losses are TRL's. The importance ratio is pi_theta / mu, where mu are
the log-probabilities that the engine recorded when it sampled, so the first step on new traces has ratio 1 up to the
numerical difference between engine and trainer, and stale traces are corrected and clipped token by token.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, pad

from rolltap.addons.errors import InputError, LedgerError
from rolltap.trainer.grpo.advantages import mean_group_std, session_advantages
from rolltap.trainer.traces.build import Trace, TraceBatch

logger = logging.getLogger(__name__)

TOKEN_MEAN_LOSSES = ("dapo", "cispo", "vespo")
"""TRL losses that divide by the number of sampled tokens in the whole batch. The others average over rows or over a
micro-batch: there a session would count once per trace, and filler rows would shrink the gradient. (vespo's weight of
a sequence is that of a trace, so it alone depends on how sessions are cut into traces.)"""

FILLER = Trace(
    session_id="",
    trace_id="",
    call_ids=[],
    prompt_ids=[0],
    completion_ids=[0],
    completion_mask=[0],
    logprobs=[0.0],
    weight_versions=[],
)
"""A row that is forwarded and never trained: it makes every micro-batch on every rank equally tall."""


class TraceGRPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose batches are recorded traces.

    One row of `train_dataset` is one group. `groups_per_step` rows, over all processes, make a generation batch:
    `trace_source` gets them on the main process and returns the traces of any number of sessions, each of any number
    of traces, which the processes then share. It may take as long as rollouts take; with several processes keep
    `args.ddp_timeout` above that. A batch without a sampled token is skipped with a warning and leaves weights and
    optimizer as they were.

    A session's advantage (`session_advantages` under `args.scale_rewards`) is given to each of its traces. A
    generation batch makes `num_iterations` optimizer steps of `gradient_accumulation_steps` micro-batches, whose
    height follows from the number of traces: memory grows with it. `per_device_train_batch_size` and
    `num_generations` satisfy TRL's checks and do nothing here.
    `args.temperature` must be the one that the traces were sampled with.

    `processing_class`, `callbacks`, `optimizers` and `peft_config` are those of `GRPOTrainer`.

    Raises `InputError` at construction for a configuration that would train something else than it says.
    """

    _step: int
    _buffered_inputs: list[dict[str, Tensor]] | None

    def __init__(
        self,
        model: Any,
        args: GRPOConfig,
        train_dataset: Dataset,
        *,
        trace_source: Callable[[list[dict[str, Any]]], TraceBatch],
        groups_per_step: int,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
    ) -> None:
        _check_configuration(args, train_dataset, groups_per_step)
        self.trace_source = trace_source
        self.groups_per_step = groups_per_step
        self.tokens_in_batch = 0
        super().__init__(
            model=model,
            reward_funcs=_recorded_reward,
            args=args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        self.add_callback(_SkipEmptySteps(self))

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler[int]:
        # accelerate deals whole batches out to the processes in turn, so as many repeats as there are processes give
        # every process, and with them the main one, all rows of a generation batch
        sampler: Sampler[int] = RepeatSampler(
            self.train_dataset if dataset is None else dataset,
            mini_repeat_count=1,
            batch_size=self.groups_per_step,
            repeat_count=self.accelerator.num_processes * self.args.steps_per_generation * self.num_iterations,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )
        return sampler

    def get_train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Batches of `groups_per_step` dataset rows; one generation batch comes as often as it has micro-batches."""
        loader: DataLoader[dict[str, Any]] = self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self.groups_per_step,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )
        return loader

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        steps: int = self.args.steps_per_generation
        if self._step % (steps * self.num_iterations) == 0 or self._buffered_inputs is None:
            batch = self.trace_source(generation_batch) if self.accelerator.is_main_process else None
            (batch,) = broadcast_object_list([batch])
            self._buffered_inputs = self._build_inputs(batch)
        return self._buffered_inputs[self._step % steps]

    def _build_inputs(self, batch: TraceBatch) -> list[dict[str, Tensor]]:
        """This process's micro-batches of a generation batch, in the keys that `GRPOTrainer._compute_loss` reads."""
        traces, rewards = batch.traces, batch.rewards
        if unrewarded := {trace.session_id for trace in traces} - rewards.keys():
            raise InputError(f"sessions without a reward must be left out, but these have traces: {sorted(unrewarded)}")
        advantages = session_advantages(rewards, self.scale_rewards)
        processes = self.accelerator.num_processes
        parts = split_evenly(traces, self.args.steps_per_generation * processes)
        inputs = []
        for part in parts[self.accelerator.process_index :: processes]:
            tensors = collate(part, advantages)
            inputs.append({key: value.to(self.accelerator.device) for key, value in tensors.items()})

        handed_here = torch.stack([(rows["completion_mask"] * rows["tool_mask"]).sum() for rows in inputs]).sum()
        handed = self.accelerator.gather(handed_here).sum()
        self.tokens_in_batch = sum(sum(trace.completion_mask) for trace in traces)
        if int(handed) != self.tokens_in_batch:
            raise LedgerError(
                f"{self.tokens_in_batch} sampled tokens in {len(traces)} traces, but the loss would see {int(handed)}: "
                "this batch was not trained on; please report it as a bug of rolltap"
            )
        if batch.ledger.sampled and batch.ledger.trained != self.tokens_in_batch:
            raise LedgerError(
                f"{self.tokens_in_batch} sampled tokens in {len(traces)} traces, but their ledger says "
                f"{batch.ledger.trained}: this batch was not trained on; were traces added or removed?"
            )
        for rows in inputs:
            rows["num_items_in_batch"] = handed.clamp(min=1)
        if not self.tokens_in_batch and self.accelerator.is_main_process:
            logger.warning("step %d was skipped: no session left a token to train on", self.state.global_step + 1)
        metrics = self._metrics["train"]
        metrics["tokens_trained"].append(float(self.tokens_in_batch))
        if rewards:
            metrics["reward"].append(fmean(labelled.reward for labelled in rewards.values()))
            metrics["reward_std"].append(mean_group_std(rewards))
            metrics["traces_per_session"].append(len(traces) / len(rewards))
        return inputs


class _SkipEmptySteps(TrainerCallback):
    """Hides the gradients of a step without sampled tokens from the optimizer.

    They are all zero, but its momentum and weight decay would still move the weights.
    """

    def __init__(self, trainer: TraceGRPOTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Drop the gradients; the optimizer then leaves parameters and its state alone."""
        if self.trainer.tokens_in_batch == 0:
            model.zero_grad(set_to_none=True)


def split_evenly(traces: Sequence[Trace], parts: int) -> list[list[Trace]]:
    """`parts` lists of equally many rows, at least one each: the traces from long to short, then filler rows.

    Neighbours are of similar length, which keeps the padding small, and the longest rows come first, so that a batch
    that does not fit into memory fails at once.
    """
    rows = sorted(traces, key=lambda trace: len(trace.prompt_ids) + len(trace.completion_ids), reverse=True)
    height = max(1, -(-len(rows) // parts))
    rows += [FILLER] * (parts * height - len(rows))
    return [rows[i : i + height] for i in range(0, len(rows), height)]


def collate(rows: Sequence[Trace], advantages: Mapping[str, float]) -> dict[str, Tensor]:
    """One micro-batch of B rows in the keys that `GRPOTrainer._compute_loss` reads, on the CPU.

    `prompt_ids`, `prompt_mask` (B, P), padded on the left; `completion_ids`, `completion_mask` (1 = not padding),
    `tool_mask` (1 = sampled), `old_per_token_logps` (B, C), padded on the right; `advantages` (B,).

    Raises `InputError` for a trace whose lists over its completion differ in length.
    """
    for row in rows:
        if not len(row.completion_ids) == len(row.completion_mask) == len(row.logprobs):
            raise InputError(
                f"trace {row.trace_id} has {len(row.completion_ids)} completion ids, {len(row.completion_mask)} mask "
                f"values and {len(row.logprobs)} log-probabilities"
            )
    prompts = [torch.tensor(row.prompt_ids, dtype=torch.long) for row in rows]
    completions = [torch.tensor(row.completion_ids, dtype=torch.long) for row in rows]
    sampled = [torch.tensor(row.completion_mask, dtype=torch.long) for row in rows]
    logprobs = [torch.tensor(row.logprobs, dtype=torch.float32) for row in rows]
    # the loss multiplies by the mask, which NaN and infinity would survive
    logprobs = [row.masked_fill(mask == 0, 0.0) for row, mask in zip(logprobs, sampled, strict=True)]
    return {
        "prompt_ids": pad(prompts, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(row) for row in prompts], padding_side="left"),
        "completion_ids": pad(completions),
        "completion_mask": pad([torch.ones_like(row) for row in completions]),
        "tool_mask": pad(sampled),
        "old_per_token_logps": pad(logprobs),
        "advantages": torch.tensor([0.0 if row is FILLER else advantages[row.session_id] for row in rows]),
    }


def _check_configuration(args: GRPOConfig, train_dataset: Dataset, groups_per_step: int) -> None:
    if args.loss_type not in TOKEN_MEAN_LOSSES:
        raise InputError(
            f"loss_type={args.loss_type!r} does not average over all sampled tokens of a step, so that the number of "
            f"traces of a session would change its weight: choose one of {', '.join(TOKEN_MEAN_LOSSES)}"
        )
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise InputError(
            f"steps_per_generation={args.steps_per_generation} differs from "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: one step must train one generation "
            "batch, or its mean is not over its tokens; leave steps_per_generation unset"
        )
    if args.beta != 0.0:
        raise InputError(f"beta={args.beta}: recorded traces have no reference log-probabilities; set beta=0.0")
    if args.use_vllm:
        raise InputError("use_vllm=True: the traces are already sampled; set use_vllm=False")
    if not isinstance(train_dataset, Dataset):
        raise InputError(f"train_dataset must be a datasets.Dataset, not {type(train_dataset).__name__}")
    if not 1 <= groups_per_step <= len(train_dataset):
        raise InputError(f"groups_per_step={groups_per_step} must be between 1 and the {len(train_dataset)} rows")


def _recorded_reward(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    # GRPOTrainer insists on a reward function
    raise NotImplementedError("the rewards come with the traces")
