"""TraceGRPOTrainer: TRL's GRPOTrainer on recorded traces instead of its own generations.

Only the inputs of the loss are replaced; the losses are TRL's. The importance ratio of a token is pi_theta / mu, where
mu is the probability that the engine recorded when it sampled the token. So the ratio on traces of the current weights
is 1, up to the numerical difference between engine and trainer. On stale traces the ratio corrects for the older
policy, clipped or weighted as the loss does it.
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
from rolltap.trainer.grpo.order import rows_of_step
from rolltap.trainer.traces.build import Trace, TraceBatch

logger = logging.getLogger(__name__)

TOKEN_MEAN_LOSSES = ("dapo", "cispo", "vespo")
"""TRL losses that divide by the number of sampled tokens in the whole batch. The others average over rows or over a
micro-batch: a session would count once per trace, and filler rows would shrink the gradient. vespo weights a whole
sequence, here a trace. So its loss depends on the strategy that built the traces; dapo's and cispo's do not, with
TRL's default `importance_sampling_level`, a ratio per token."""

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
"""Padding row with mask 0. It gives every micro-batch on every rank the same number of rows."""


class TraceGRPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose batches are recorded traces.

    One row of `train_dataset` is one group. `groups_per_step` rows, over all processes, are a generation batch.
    `trace_source` is called with these rows on the main process and returns a `TraceBatch` of any number of sessions
    and traces, which are distributed over the processes. The other processes wait for it in a collective operation:
    keep `args.ddp_timeout` longer than the rollouts of a batch. For a batch without a sampled token a warning is
    logged; weights and optimizer state stay unchanged.

    Each trace has its session's advantage (`session_advantages` with `args.scale_rewards`). A generation batch makes
    `num_iterations` optimizer steps of `gradient_accumulation_steps` micro-batches. The number of rows of a micro-batch
    grows with the number of traces, and so does the memory. `per_device_train_batch_size` and `num_generations` only
    have to pass TRL's checks; batches do not depend on them. `args.temperature` must be the sampling temperature of the
    traces, which is not checked here.

    `processing_class`, `callbacks`, `optimizers` and `peft_config` are those of `GRPOTrainer`.

    The constructor raises `InputError` for a configuration whose loss would not be that of the recorded traces.
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
        # accelerate distributes whole batches round-robin over the processes. With one repeat per process, each
        # process, also the main one, gets all rows of a generation batch.
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
        """Return a loader of batches of `groups_per_step` rows; each is repeated once per micro-batch and iteration."""
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
            batch = self.trace_source(self._rows_of_step()) if self.accelerator.is_main_process else None
            (batch,) = broadcast_object_list([batch])
            self._buffered_inputs = self._build_inputs(batch)
        return self._buffered_inputs[self._step % steps]

    def _rows_of_step(self) -> list[dict[str, Any]]:
        generation = self.state.global_step // self.num_iterations
        indices = rows_of_step(
            generation,
            len(self.train_dataset),
            self.groups_per_step,
            seed=self.args.seed,
            shuffle=self.shuffle_dataset,
        )
        return [self.train_dataset[i] for i in indices]

    def _build_inputs(self, batch: TraceBatch) -> list[dict[str, Tensor]]:
        """Return this process's micro-batches of a generation batch, with the keys that `_compute_loss` reads."""
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

        in_loss_here = torch.stack([(rows["completion_mask"] * rows["tool_mask"]).sum() for rows in inputs]).sum()
        in_loss = self.accelerator.gather(in_loss_here).sum()
        self.tokens_in_batch = sum(sum(trace.completion_mask) for trace in traces)
        if int(in_loss) != self.tokens_in_batch:
            raise LedgerError(
                f"{self.tokens_in_batch} sampled tokens in {len(traces)} traces, but the loss would see "
                f"{int(in_loss)}: this batch was not trained on; please report it as a bug of rolltap"
            )
        batch.ledger.check()
        if batch.ledger.sampled and batch.ledger.trained != self.tokens_in_batch:
            raise InputError(
                f"{self.tokens_in_batch} sampled tokens in {len(traces)} traces, but the batch's ledger says "
                f"{batch.ledger.trained}: choose sessions with Run.traces(...).batch(session_ids), or give a ledger "
                "that says what was left out"
            )
        for rows in inputs:
            rows["num_items_in_batch"] = in_loss.clamp(min=1)
        if not self.tokens_in_batch and self.accelerator.is_main_process:
            logger.warning("step %d was skipped: its sessions have no token to train on", self.state.global_step + 1)
        metrics = self._metrics["train"]
        metrics["tokens_trained"].append(float(self.tokens_in_batch))
        if rewards:
            metrics["reward"].append(fmean(labelled.reward for labelled in rewards.values()))
            metrics["reward_std"].append(mean_group_std(rewards))
            metrics["traces_per_session"].append(len(traces) / len(rewards))
        return inputs


class _SkipEmptySteps(TrainerCallback):
    """Callback that drops the gradients of a step without sampled tokens.

    They are zero, but with them the optimizer's momentum and weight decay would still change the weights.
    """

    def __init__(self, trainer: TraceGRPOTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the gradients to None: the optimizer then changes neither parameters nor its state."""
        if self.trainer.tokens_in_batch == 0:
            model.zero_grad(set_to_none=True)


def split_evenly(traces: Sequence[Trace], parts: int) -> list[list[Trace]]:
    """Split into `parts` lists of equal size, at least 1: the traces from long to short, then filler rows.

    Rows of a list have similar lengths, so the padding is small. The longest rows are first: a batch that does not fit
    into memory fails in its first micro-batch.
    """
    rows = sorted(traces, key=lambda trace: len(trace.prompt_ids) + len(trace.completion_ids), reverse=True)
    height = max(1, -(-len(rows) // parts))
    rows += [FILLER] * (parts * height - len(rows))
    return [rows[i : i + height] for i in range(0, len(rows), height)]


def collate(rows: Sequence[Trace], advantages: Mapping[str, float]) -> dict[str, Tensor]:
    """Return one micro-batch of B rows, on the CPU, with the keys that `GRPOTrainer._compute_loss` reads.

    - `prompt_ids`, `prompt_mask`: (B, P), padded on the left.
    - `completion_ids`, `completion_mask` (1 = not padding), `tool_mask` (1 = trained), `old_per_token_logps`: (B, C),
      padded on the right.
    - `advantages`: (B,); 0.0 for filler rows.

    Raises `InputError` for a trace whose completion ids, mask and log-probabilities differ in length.
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
    # the loss multiplies by the mask, and NaN * 0 is NaN
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
            f"loss_type={args.loss_type!r} does not average over all sampled tokens of a step: the weight of a session "
            f"would depend on its number of traces; choose one of {', '.join(TOKEN_MEAN_LOSSES)}"
        )
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise InputError(
            f"steps_per_generation={args.steps_per_generation} differs from "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: one step must train one generation "
            "batch, or the loss is not the mean over the batch's tokens; leave steps_per_generation unset"
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
    # GRPOTrainer requires a reward function; it is not called
    raise NotImplementedError("the rewards come with the traces")
