"""TraceGRPOTrainer: TRL's GRPOTrainer on recorded traces instead of its own generations.

The inputs of the loss and the way of the rows through the model are replaced; the losses are TRL's.
The importance ratio of a token is pi_theta / mu, where mu is the probability that the engine
recorded when it sampled the token. So the ratio on traces of the current weights is 1, up to the
numerical difference between engine and trainer. On stale traces the ratio corrects for the older
policy, clipped or weighted as the loss does it.

The way of a generation batch:

    trace_source          a TraceBatch: traces, rewards, ledger; on the main process
    with_signal           leaves out groups whose rewards are all equal
    session_advantages    an advantage for each session
    session_tokens        the rows and values of each session
    micro_batches         cut and weighted for each process, which gets its own by `scattered`
    Pack                  the rows of a micro-batch as one row, shared prefixes once
    model                 (B, S) log-probabilities of B sessions
    TRL's loss            weighted; then its backward pass
"""

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.trainer.utils import create_model_from_path, selective_log_softmax, use_adapter

from rolltap.addons.errors import InputError
from rolltap.trainer.models.devices import require_gpu
from rolltap.trainer.models.merging import merge_again
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.trained import Scored, StepAccount
from rolltap.trainer.training.step import distributed
from rolltap.trainer.training.step.batch import MicroBatch, divide, rows_of_step, why_skipped
from rolltap.trainer.training.step.checkpoint import Checkpoints
from rolltap.trainer.training.step.config import TraceGRPOConfig, check_model
from rolltap.trainer.training.step.losses import importance_weights, teacher_loss
from rolltap.trainer.training.step.metrics import (
    StepPart,
    batch_metrics,
    named_tasks,
    scored_tokens,
    step_metrics,
)
from rolltap.trainer.training.step.model import prepare, run_as_served, train_in_float32
from rolltap.trainer.training.step.pack import Pack, PaddedRows
from rolltap.trainer.training.step.probe import probe
from rolltap.trainer.training.step.routing import Replay

logger = logging.getLogger(__name__)


class TraceGRPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose batches are recorded traces.

    One row of `train_dataset` is one group. A step trains `groups_per_step` rows, chosen from
    `args.seed` and the step (`rows_of_step`). `trace_source` is called with these rows on the main
    process and returns a `TraceBatch` of any number of sessions and traces. The other processes
    wait for it. `before_batch` is called before that on every process, and may call collective
    operations. An error of any process ends all with that error. For a batch without any signal a
    warning is logged; weights and optimizer state stay unchanged.

    A generation batch makes `num_iterations` optimizer steps of `gradient_accumulation_steps`
    micro-batches. The gradient depends neither on their number nor on that of processes, nor on how
    sessions were cut into traces. `args.temperature` must be the sampling temperature of the
    traces, which is not checked here. With `args.beta`, the reference is the model with its adapter
    disabled (of a `PeftModel` that was given, the adapter as it was), or a copy of the full model
    as it was given.

    The constructor raises `InputError` for a configuration whose loss would not be that of the
    recorded traces, and on a machine with a GPU that torch cannot use, unless `args.use_cpu` is
    set. Its other arguments are those of `GRPOTrainer`.
    """

    args: TraceGRPOConfig
    record: Callable[[int, StepAccount, Iterable[Scored]], None] | None = None
    """Called on the main process with each optimizer step, before the weights change: the steps
    that were taken before it, its batch, and the values of its tokens."""
    check_step: Callable[[int, Mapping[str, float]], None] | None = None
    """Called as `record` is, and before it, with the steps that were taken before and the metrics
    of the step. What it raises ends all processes, and the weights stay as they are."""
    before_training: Callable[[], None] | None = None
    """Called on every process when a training begins, before a checkpoint is loaded: the weights
    are those that the trainer was given."""
    _step: int

    def __init__(
        self,
        model: Any,
        args: TraceGRPOConfig,
        train_dataset: Dataset,
        *,
        trace_source: Callable[[list[dict[str, Any]]], TraceBatch],
        groups_per_step: int,
        before_batch: Callable[[], None] | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
    ) -> None:
        if not isinstance(args, TraceGRPOConfig):
            kind = type(args).__name__
            raise InputError(f"args is a {kind}: give a rolltap.TraceGRPOConfig with its fields")
        if not 1 <= groups_per_step <= len(train_dataset):
            what = f"groups_per_step={groups_per_step} must be between 1 and"
            raise InputError(f"{what} the {len(train_dataset)} rows")
        require_gpu(args.use_cpu)
        args = copy.copy(args)
        if isinstance(model, str):
            init = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
            # TRL would spread it over all GPUs of this process
            init.setdefault("device_map", None)
            model = create_model_from_path(model, **init)
            args.model_init_kwargs = None
        self.trace_source = trace_source
        self.before_batch = before_batch
        self.groups_per_step = groups_per_step
        self._generation = -1
        self._named_tasks = named_tasks(train_dataset)
        self._checkpoints = Checkpoints(self)
        self._replay = Replay()
        self._forest: Any = None
        self._tokens_forwarded = 0
        # the device does not decide, nor does `accelerate config`, which transformers reads
        args.bf16 = model.dtype == torch.bfloat16
        args.mixed_precision = "bf16" if args.bf16 else "no"
        inner = model
        if isinstance(model, PeftModel):
            inner = model.get_base_model()
        prepare(inner)
        trains_all = inner is model and peft_config is None
        if trains_all:
            train_in_float32(model)
        if args.sharding == "full" and distributed.several():
            distributed.require_sharded_optimizer(args, model, optimizers)
            distributed.use_fsdp(args, model)
        else:
            distributed.use_replicas(args)
        beta = args.beta
        if trains_all:
            # TRL would load the reference from the model's folder, with the class of config.json
            args.beta = 0.0
        try:
            super().__init__(
                model=model,
                reward_funcs=_recorded_reward,
                args=args,
                train_dataset=train_dataset,
                processing_class=processing_class,
                # a step's checkpoint is written when all have its line
                callbacks=[_StepCallback(self), *(callbacks or []), self._checkpoints],
                optimizers=optimizers,
                peft_config=peft_config,
            )
        except (ValueError, ImportError) as error:
            raise InputError(f"the model or its adapter cannot be trained: {error}") from error
        args.beta = beta
        self.beta = beta
        check_model(self.model, beta)
        merge_again(self.model)
        if beta and trains_all:
            self.ref_model = self._copy_of_model()
        # the ratio is of rolltap's engine, and TRL multiplies the loss with it
        self.use_vllm = args.vllm_importance_sampling_correction
        distributed.register("score", self._score_ids)
        parameters = distributed.trained_parameters(self.model)
        distributed.require_same_parameters(parameters.items())

    # What TRL asks: batches, log-probabilities, the loss

    def get_train_dataloader(self) -> DataLoader[int]:
        """Return a loader of numbers, which are not used: one for each micro-batch of a pass."""
        passes = len(self.train_dataset) // self.groups_per_step
        numbers = range(passes * self.num_iterations * self.args.gradient_accumulation_steps)
        return DataLoader(numbers, batch_size=1, collate_fn=list)  # type: ignore[arg-type]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute and add the gradients of a micro-batch. Collective.

        An error of any process ends all. Raises `InputError` for a micro-batch that does not fit
        into the memory of a GPU.
        """
        step = super().training_step

        def compute() -> Tensor:
            try:
                loss: Tensor = step(model, inputs, num_items_in_batch)
            except torch.OutOfMemoryError as error:
                raise InputError(
                    f"{self._tokens_forwarded:,} tokens in one pass do not fit into the memory of "
                    "the GPU: raise gradient_accumulation_steps, set offload_checkpoints or "
                    f"sharding, or lower the recipe's max_tokens ({error})"
                ) from error
            return loss

        loss = distributed.abort_on_error(compute)
        self._replay.end()
        return loss

    def _prepare_inputs(self, _: Any) -> dict[str, Any]:
        run_as_served(self.model)
        generation, iteration = divmod(self.state.global_step, self.num_iterations)
        if generation != self._generation:
            corrected = self.args.vllm_importance_sampling_correction
            if self._generation < 0 and iteration and corrected:
                raise InputError(
                    f"step {self.state.global_step} is in the middle of the {self.num_iterations} "
                    "iterations of a batch: with vllm_importance_sampling_correction resume from a "
                    "checkpoint after the last one (save_steps a multiple of num_iterations)"
                )
            self._load_batch(generation)
        micro_batch = self._step % self.args.gradient_accumulation_steps
        if micro_batch == 0:
            self._part = StepPart()
        return self._inputs[micro_batch]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return TRL's loss with the weight of the micro-batch, and the teacher's."""
        self._current = inputs
        micro_batch: MicroBatch = inputs["micro_batch"]
        logged = self._metrics["train"]
        of_loss = defaultdict[str, list[float]](list)
        self._metrics["train"] = of_loss
        loss: Tensor = super()._compute_loss(model, inputs) * micro_batch.weight
        self._metrics["train"] = logged
        self._part.of_loss.append((of_loss, micro_batch.tokens))
        if self.args.teacher_share:
            divergence = teacher_loss(
                self._logprobs,
                inputs["old_per_token_logps"],
                inputs["teacher_per_token_logps"],
                inputs["completion_mask"],
                limit=1 + self.epsilon_high,
            )
            processes = self.accelerator.num_processes  # whose gradients are averaged
            weight = self.args.teacher_share * processes / micro_batch.batch_tokens
            loss = loss + weight * divergence
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """Return the log-probabilities and entropies of the micro-batch's tokens, each (B, S), in
        place of TRL's."""
        self._logprobs, entropies = self._score(model, self._current["forest"])
        self._part.add(self._logprobs.detach(), self._current)
        return self._logprobs, entropies, None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._checkpoints.resume_from(Path(resume_from_checkpoint))

    # Batches

    def rows_of(self, generation: int) -> list[dict[str, Any]]:
        """Return the rows of a generation batch, counted from 0."""
        indices = rows_of_step(
            generation,
            len(self.train_dataset),
            self.groups_per_step,
            seed=self.args.seed,
            shuffle=bool(self.args.shuffle_dataset),
        )
        return [self.train_dataset[i] for i in indices]

    def _load_batch(self, generation: int) -> None:
        """Load a generation batch, and what the weights before it and the reference say about it.
        Collective."""
        self._choose_forest()
        if self.before_batch is not None:
            self.before_batch()

        def load() -> list[list[MicroBatch]]:
            return self._divide(self.trace_source(self.rows_of(generation)))

        micro_batches = distributed.scattered(load)
        self._inputs = [self._inputs_of(micro_batch) for micro_batch in micro_batches]
        self._replay.taken()  # those of the passes before the step
        self._generation = generation

    def _divide(self, batch: TraceBatch) -> list[list[MicroBatch]]:
        """Return each process's micro-batches of a batch. Called on the main process."""
        account, parts = divide(
            batch,
            self.args,
            embeddings=self.model.get_input_embeddings().weight.shape[0],
            processes=self.accelerator.num_processes,
        )
        self._batch = batch
        self._account = account
        self.log_metrics(batch_metrics(batch, account.batch, self._named_tasks))
        return parts

    @torch.no_grad()
    def _inputs_of(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Return the inputs of a micro-batch's loss. Collective where the weights are sharded."""
        device = self.args.device
        rows = [session.rows for session in micro_batch.sessions]
        rows += [[]] * (micro_batch.size - len(rows))
        forest = self._forest(rows, device)
        inputs: dict[str, Any] = micro_batch.tensors(device)
        inputs["micro_batch"] = micro_batch
        inputs["forest"] = forest
        inputs["num_items_in_batch"] = torch.tensor(micro_batch.batch_tokens, device=device)
        mask = inputs["completion_mask"].bool()
        sampled = inputs["sampling_per_token_logps"]
        if self.beta and self.ref_model is not None:
            inputs["ref_per_token_logps"], _ = self._score(self.ref_model, forest)
        elif self.beta:
            name = "ref" if "ref" in self.model.peft_config else None
            with use_adapter(self.model, name):
                inputs["ref_per_token_logps"], _ = self._score(self.model, forest)
        if self.args.routing == "recorded" and self._generation < 0:
            own, _ = self._score(self.model, forest, replays=False)
            if mask.any():
                difference = (own - sampled)[mask].abs().mean()
                self.log_metrics({"routing/difference_before": difference.item()})
        if self.args.vllm_importance_sampling_correction:
            own, _ = self._score(self.model, forest)
            inputs["old_per_token_logps"] = own
            inputs["importance_sampling_ratio"] = importance_weights(
                (own - sampled) * mask,
                self.vllm_importance_sampling_mode,
                self.vllm_importance_sampling_clip_min,
                self.vllm_importance_sampling_clip_max,
            )
        return inputs

    # The way through the model

    def _score(
        self,
        model: Any,
        forest: Pack | PaddedRows,
        *,
        replays: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies (B, S) of a micro-batch."""
        self._tokens_forwarded = forest.tokens
        self._replay.begin(model, forest.experts if replays else None)
        offloaded: Any = nullcontext()
        on_gpu = self.args.device.type != "cpu"
        if self.args.offload_checkpoints and on_gpu and torch.is_grad_enabled():
            inner = self.accelerator.unwrap_model(model)
            offloaded = get_act_offloading_ctx_manager(inner, warn_if_no_head=False)
        with self.accelerator.autocast(), offloaded:
            output = model(**forest.inputs())
        logprobs = forest.unpack(output.log_probs).float()
        entropies = forest.unpack(output.entropy)
        return logprobs, entropies

    def _choose_forest(self) -> None:
        """Choose packed or padded rows, before the first step. Collective."""
        if self._forest is not None:
            return
        self._forest = PaddedRows
        if self.args.forward == "padded":
            return
        # of sharded weights each process sees the gradients of its part
        reasons = distributed.gathered(probe(self.model, self.accelerator.autocast))
        reason = next(filter(None, reasons), None)
        if reason is None:
            self._forest = Pack
        elif distributed.is_main():
            logger.warning("traces run as padded rows, not as one packed row: %s", reason)

    def _copy_of_model(self) -> Any:
        """Return the reference: the model as it is now."""
        reference = copy.deepcopy(self.model).requires_grad_(False).eval()
        vars(reference).pop("forward", None)  # that of TRL's head, which knows the original
        prepare(reference, self.args.temperature)
        return distributed.shard_reference(self.accelerator, reference)

    # The end of a step

    def finish_gradients(self) -> None:
        """Check, log and record a step, before the weights change. Collective.

        Without a gradient, or with one that is not finite, all gradients are dropped: with
        gradients of zero, momentum and weight decay would still change the weights.
        """
        part = self._part
        for weight in self.model.parameters():
            gradient = weight.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            if gradient is not None and not gradient.isfinite().all():
                part.finite = False
        part.replayed = self._replay.taken().tolist()
        part.stop(self.args.device)
        parts = distributed.gathered(part)
        finite = all(each.finite for each in parts)
        trains = any(each.trains for each in parts)
        if not (finite and trains):
            self.model.zero_grad(set_to_none=True)
        step = self.state.global_step

        def observe() -> None:
            if not trains:
                why = why_skipped(self._batch, self._account.computed)
                logger.warning("step %d was skipped: %s", step + 1, why)
            elif not finite:
                logger.warning("step %d was skipped: its gradients are not finite", step + 1)
            metrics = step_metrics(
                parts,
                on_policy=self._batch.on_policy and step % self.num_iterations == 0,
                is_corrected=self.args.vllm_importance_sampling_correction,
                has_teacher=self.args.teacher_share > 0,
            )
            self.log_metrics(metrics)
            if self.check_step is not None:
                self.check_step(step, metrics)
            if self.record is not None:
                self.record(step, self._account, scored_tokens(parts))

        distributed.on_main(observe)

    def log_metrics(self, values: Mapping[str, float]) -> None:
        """Add values to those of the present step, whose mean is logged."""
        for name, value in values.items():
            self._metrics["train"][name].append(value)

    # Scores for a comparison with an engine

    def score(self, ids: Sequence[int], *, base: bool = False) -> list[float]:
        """Return the natural-log probabilities of `ids[1:]` at temperature 1, under the present
        weights.

        With `base`, a `PeftModel` is scored without its adapter. Other processes need not take
        part, unless weights are sharded: then call it on all, or within `on_main`.
        """
        if self.args.sharding == "full":
            return list(distributed.call_on_all_ranks("score", ids, base))
        return self._score_ids(ids, base)

    @torch.no_grad()
    def _score_ids(self, ids: Sequence[int], base: bool) -> list[float]:
        device = self.model.get_input_embeddings().weight.device
        every = torch.tensor([ids], device=device)
        adapter: Any = nullcontext()
        if base and hasattr(self.model, "disable_adapter"):
            adapter = self.model.disable_adapter()
        with adapter, self.accelerator.autocast():
            output = self.model(input_ids=every, use_cache=False)
        logits = output.logits[:, :-1].float()
        logprobs: Tensor = selective_log_softmax(logits, every[:, 1:])[0]
        return logprobs.tolist()


class _StepCallback(TrainerCallback):
    """Tells the trainer where a training begins, and where the gradients of a step are complete."""

    def __init__(self, trainer: TraceGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        distributed.reduce_unused(model)
        # the training begins with a batch of its own
        self._trainer._generation = -1
        self._trainer._step = 0
        if self._trainer.before_training is not None:
            self._trainer.before_training()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        distributed.abort_on_error(self._trainer.finish_gradients)


def _recorded_reward(*_: Any) -> None:
    # GRPOTrainer requires a reward function; it is not called
    raise NotImplementedError("the rewards come with the traces")
