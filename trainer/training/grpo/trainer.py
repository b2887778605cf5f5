"""TraceGRPOTrainer: TRL's GRPOTrainer on recorded traces instead of its own generations.

Only the inputs of the loss are replaced; the losses are TRL's. The importance ratio of a token is pi_theta / mu, where
mu is the probability that the engine recorded when it sampled the token. So the ratio on traces of the current weights
is 1, up to the numerical difference between engine and trainer. On stale traces the ratio corrects for the older
policy, clipped or weighted as the loss does it.

The way of a generation batch:

    trace_source          a TraceBatch: traces, rewards, ledger            on the main process
    with_signal           leaves out groups whose rewards are all equal    on every process, the same
    session_advantages    x session_weights
    spread_by_prefix      gradient_accumulation_steps x processes parts
    flatten               the trained tokens of a part, as one row
    Scorer -> TRL's loss -> backward, for each part; average_gradients -> optimizer step
"""

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.trainer.utils import create_model_from_path

from rolltap.addons.errors import InputError, LedgerError
from rolltap.trainer.models.devices import require_gpu
from rolltap.trainer.traces.build import Trace, TraceBatch
from rolltap.trainer.traces.trained import Scored, StepAccount
from rolltap.trainer.training.forward.forest import Row
from rolltap.trainer.training.forward.passes import Scores, SegmentScorer
from rolltap.trainer.training.grpo.advantages import session_advantages
from rolltap.trainer.training.grpo.batch import (
    flatten,
    limited_weights,
    rows_of_step,
    session_weights,
    spread_by_length,
    spread_by_prefix,
    tokens_by_session,
    why_skipped,
    with_signal,
)
from rolltap.trainer.training.grpo.config import TraceGRPOConfig, check_model, require_embeddings
from rolltap.trainer.training.grpo.forward import Forward
from rolltap.trainer.training.grpo.metrics import StepMetrics, batch_metrics, named_tasks
from rolltap.trainer.training.grpo.ranks import as_one, gathered, on_main, together
from rolltap.trainer.training.grpo.replicated import ReplicatedTrainer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TraceGRPOTrainer(ReplicatedTrainer):
    """A `GRPOTrainer` whose batches are recorded traces.

    One row of `train_dataset` is one group. A step trains `groups_per_step` rows, chosen from `args.seed` and the step
    (`rows_of_step`). `trace_source` is called with these rows on the main process and returns a `TraceBatch` of any
    number of sessions and traces. The other processes wait for it. `before_batch` is called before that on every
    process, and may call collective operations. An error in `trace_source`, or of any process in building a batch, in
    a forward or in a backward pass, ends all with that error. For a batch without any signal a warning is logged;
    weights and optimizer state stay unchanged.

    A generation batch makes `num_iterations` optimizer steps of `gradient_accumulation_steps` micro-batches. The
    gradient depends neither on their number nor on that of processes, nor on how sessions were cut into traces.
    `args.temperature` must be the sampling temperature of the traces, which is not checked here. With `args.beta`, the
    reference is the model with its adapter disabled (of a `PeftModel` that was given, the adapter as it was), or a copy
    of the full model as it was given. The divergence from it is a mean over tokens, whatever the weights of sessions.

    The constructor raises `InputError` for a configuration whose loss would not be that of the recorded traces, and on
    a machine with a GPU that torch cannot use, unless `args.use_cpu` is set. Its other arguments are those of
    `GRPOTrainer`.
    """

    args: TraceGRPOConfig
    record: Callable[[int, StepAccount, Iterable[Scored]], None] | None = None
    """Called on the main process with each optimizer step, before the weights change: the steps that were taken before
    it, its batch, and the values of its tokens. Set it on every process or on none."""
    check_step: Callable[[int, Mapping[str, float]], None] | None = None
    """Called as `record` is, and before it, with the steps that were taken before and the metrics of the step. What it
    raises ends all processes, and the weights stay as they are."""
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
            raise InputError(f"args is a {type(args).__name__}: give a rolltap.TraceGRPOConfig, which has its fields")
        if not isinstance(train_dataset, Dataset):
            raise InputError(f"train_dataset must be a datasets.Dataset, not {type(train_dataset).__name__}")
        if not 1 <= groups_per_step <= len(train_dataset):
            raise InputError(f"groups_per_step={groups_per_step} must be between 1 and the {len(train_dataset)} rows")
        require_gpu(args.use_cpu)
        args = copy.copy(args)
        if isinstance(model, str):
            # TRL would spread it over all GPUs of this process
            init = {"device_map": None, "trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})
            model, args.model_init_kwargs = create_model_from_path(model, **init), None
        # neither the device nor the settings of `accelerate config`, which transformers reads, decide
        args.mixed_precision = "bf16" if model.dtype == torch.bfloat16 else "no"
        self.trace_source = trace_source
        self.before_batch = before_batch
        self.groups_per_step = groups_per_step
        self.has_gradient = False
        self._generation = -1
        self._named_tasks = named_tasks(train_dataset)
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
        check_model(self.model, self.beta)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers. The training begins with a batch of its own. Raises `InputError`."""
        self._generation, self._step = -1, 0
        return super().train(*args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[int]:
        """Return a loader of as many numbers as one pass over the rows has micro-batches. They are not used."""
        passes = len(self.train_dataset) // self.groups_per_step
        numbers = range(passes * self.num_iterations * self.args.gradient_accumulation_steps)
        return DataLoader(numbers, batch_size=1, collate_fn=list)  # type: ignore[arg-type]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute and add the gradients of a micro-batch; after the last one, average them over the processes."""
        step = super().training_step
        loss: Tensor = self._together(lambda: step(model, inputs, num_items_in_batch))
        self._step_metrics.stop(self.args.device)
        replay = self._forward.scorer.replay
        replay.end()
        if self.accelerator.sync_gradients:
            self._finish_gradients()
            if not self.has_gradient:
                # with gradients of zero, momentum and weight decay would still change the weights
                self.model.zero_grad(set_to_none=True)
            if self._shards:
                self.log_metrics({"gathered_gib": self._gathered.pop("bytes") / 2**30})
            metrics = self._step_metrics.values(gathered(self._step_metrics.local(self.args.device)))
            self.log_metrics(metrics)
            if (check_step := self.check_step) is not None:
                on_main(lambda: check_step(self.state.global_step, metrics))
            if (record := self.record) is not None:
                scored = gathered([(traces, each.cpu().numpy()) for traces, each in self._step_metrics.scored])
                on_main(lambda: record(self.state.global_step, self._account, chain(*scored)))
            replayed, differ = self.accelerator.gather(replay.taken().to(self.args.device)[None]).sum(0).tolist()
            self.log_metrics({"routing/differs": differ / replayed} if replayed else {})
        return loss

    def _prepare_inputs(self, _: Any) -> dict[str, Any]:
        _run_as_served(self.model)
        generation, iteration = divmod(self.state.global_step, self.num_iterations)
        if self._generation < 0 and self.args.mismatch != "clip" and iteration:
            raise InputError(
                f"step {self.state.global_step} is in the middle of the {self.num_iterations} iterations of a batch: "
                f"with mismatch={self.args.mismatch!r} resume from a checkpoint after the last one (save_steps a "
                "multiple of num_iterations)"
            )
        if generation != self._generation:
            _ = self._forward  # probes the model, which is collective
            if self.before_batch is not None:
                self.before_batch()
            batch = on_main(lambda: self.trace_source(self.rows_of(generation)))
            self._micro_batches = self._together(lambda: self._build(batch))
            self._generation = generation
            self._on_policy = batch.on_policy
            weights = "completion_mask" if self.beta or self.args.teacher_share else "advantages"
            trains = any(bool(micro_batch[weights].any()) for micro_batch in self._micro_batches)
            self.has_gradient = any(gathered(trains))
            if not self.has_gradient and self.accelerator.is_main_process:
                logger.warning(
                    "step %d was skipped: %s", self.state.global_step + 1, why_skipped(batch, self.args.mismatch)
                )
        micro_batch = self._step % self.args.gradient_accumulation_steps
        if micro_batch == 0:
            self._step_metrics = StepMetrics(self.args, on_policy=self._on_policy and iteration == 0)
        return self._micro_batches[micro_batch]

    def rows_of(self, generation: int) -> list[dict[str, Any]]:
        """Return the rows of a generation batch, counted from 0."""
        rows, args = len(self.train_dataset), self.args
        indices = rows_of_step(generation, rows, self.groups_per_step, seed=args.seed, shuffle=args.shuffle_dataset)
        return [self.train_dataset[i] for i in indices]

    def _build(self, batch: TraceBatch) -> list[dict[str, Any]]:
        """Return this process's micro-batches of a generation batch."""
        given = sum(trace.completion_mask.count(1) for trace in batch.traces)
        batch.ledger.check()
        if batch.ledger.sampled and batch.ledger.trained != given:
            raise InputError(
                f"{given} sampled tokens in {len(batch.traces)} traces, but the batch's ledger says "
                f"{batch.ledger.trained}: choose sessions with Run.traces(...).batch(session_ids), or give a ledger "
                "that says what was left out"
            )
        share = self.args.teacher_share
        if share and any(trace.scores is None for trace in batch.traces):
            raise InputError(f"teacher_share = {share}, but a trace has no scores: read traces(scores=NAME)")
        advantages = session_advantages(batch.rewards, self.scale_rewards)
        trained = with_signal(batch, teacher=share > 0)
        tokens = tokens_by_session(trained.traces)
        weights = session_weights(tokens, self.args.normalise, self.args.max_completion_length or 0)
        # without a reference or a teacher, a trace without advantage has no gradient; its tokens count in the mean
        computed = [trace for trace in trained.traces if self.beta or share or advantages.get(trace.session_id)]
        self._account = StepAccount(trained, advantages, weights, computed)
        advantages = {session: (1 - share) * advantages[session] * weight for session, weight in weights.items()}
        self.log_metrics(batch_metrics(batch, trained, self._named_tasks))
        number = torch.tensor(max(1, sum(tokens.values())), device=self.args.device)
        return [{**micro_batch, "num_items_in_batch": number} for micro_batch in self._spread(computed, advantages)]

    def _spread(self, traces: Sequence[Trace], advantages: dict[str, float]) -> list[dict[str, Any]]:
        rows = self._forward.rows(traces)
        require_embeddings(self.model, traces, rows)
        processes = self.accelerator.num_processes
        number = self.args.gradient_accumulation_steps * processes
        spread = spread_by_prefix if isinstance(self._forward.scorer, SegmentScorer) else spread_by_length
        parts = spread(rows, number)
        self._forward.fit([[rows[i] for i in part] for part in parts], self.optimizer)
        flat = [flatten([traces[i] for i in part], advantages, self._account.weights) for part in parts]
        in_loss = sum(int(micro_batch["completion_mask"].sum()) for micro_batch in flat)
        if in_loss != (expected := sum(trace.completion_mask.count(1) for trace in traces)):
            raise LedgerError(
                f"{expected} sampled tokens in {len(traces)} traces, but the loss would see {in_loss}: this batch was "
                "not trained on; please report it as a bug of rolltap"
            )
        micro_batches = []
        for k in range(self.accelerator.process_index, number, processes):
            micro_batch = {key: value.to(self.args.device) for key, value in flat[k].items()}
            own = [rows[i] for i in parts[k]]
            micro_batches.append({**micro_batch, **self._frozen(own, micro_batch), "rows": own, "traces": parts[k]})
        self._forward.scorer.replay.taken()  # those of the reference
        return micro_batches

    @torch.no_grad()
    def _frozen(self, rows: Sequence[Row], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the weights before the step, and the reference, say about the rows."""
        old = inputs["old_per_token_logps"]
        values = {"sampler_per_token_logps": old}

        def scored(model: Any, rows: Sequence[Row] = rows) -> Tensor:
            return _one_row(self._forward.scorer(model, rows).logprobs)  # where weights are sharded, without rows too

        if self.beta:
            with self._reference() as model:
                values["ref_per_token_logps"] = scored(model)
        if self.args.routing == "recorded" and self._generation < 0:
            unreplayed = [replace(row, experts=None) for row in rows]
            difference = (scored(self.model, unreplayed) - old).abs().mean()
            if inputs["completion_mask"].any():
                self.log_metrics({"routing/difference_before": float(difference)})
        if self.args.mismatch != "clip":
            own = scored(self.model)
            values["mismatch"] = weight = torch.exp(own - old)
            limited = limited_weights(weight, self.args.mismatch, self.args.mismatch_min, self.args.mismatch_max)
            values |= {"old_per_token_logps": own, "limited": limited, "weights": inputs["weights"] * limited}
            values["advantages"] = inputs["advantages"] * limited
        return values

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._inputs = inputs = {**inputs}  # later iterations of the batch take them too
        self._step_metrics.start()
        own = self._metrics["train"]
        # TRL logs means of micro-batches, of which one of few tokens counts as much as one of many
        self._metrics["train"] = defaultdict(list)
        loss: Tensor = super()._compute_loss(model, inputs)
        self._metrics["train"] = own
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, None]:
        """Return the log-probabilities and entropies of the micro-batch's tokens, each (1, N), in place of TRL's."""
        scores = self._together(self._score_inputs)
        return _one_row(scores.logprobs), _one_row(scores.entropies), None

    def _score_inputs(self) -> Scores:
        scores, inputs = self._forward.scorer(self.model, self._inputs["rows"]), self._inputs
        if share := self.args.teacher_share:
            # reverse KL divergence, a reward of each token. Source: "On-Policy Distillation", Thinking Machines, 2025
            above = inputs["teacher_per_token_logps"] - _one_row(scores.logprobs.detach())
            inputs["advantages"] = inputs["advantages"] + share * inputs["weights"] * above
        self._step_metrics.add(scores, inputs, forwarded=self._forward.scorer.forwarded)
        return scores

    def _together(self, function: Callable[[], T]) -> T:
        """Call what runs the model. Sharded weights make that collective."""
        return as_one(function) if self._shards else together(function)

    @cached_property
    def _forward(self) -> Forward:
        found = Forward(self.model, self.accelerator.autocast, self.args)
        self._gathered.clear()  # those of the probe belong to no step
        return found


def _run_as_served(model: Any) -> None:
    """Let a model compute as engines do: some families clip weights, or choose experts otherwise, in training mode.

    The layers themselves stay in it, for their gradient checkpointing, and the whole, for TRL's metrics.
    """
    model.eval()
    for module in model.modules():
        module.training = module is model or isinstance(module, GradientCheckpointingLayer)


def _one_row(values: Tensor) -> Tensor:
    """Return values (N,) as (1, N), with a zero if N is 0, as `flatten` does. It has a backward pass where they do."""
    return torch.nn.functional.pad(values, (0, int(not len(values))))[None]


def _recorded_reward(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    # GRPOTrainer requires a reward function; it is not called
    raise NotImplementedError("the rewards come with the traces")
