"""GRPOTrainer on processes that each have all weights, or a part of each layer, and no wrapper around the model.

Segments run the layers of a model in an order of their own, which wrappers do not follow. So the processes exchange the
weights of rank 0 when a training begins, the gradients before a step, and the weights after it where the optimizer is
shared out (`ShardedOptimizer`). Sharded layers gather and average themselves (`shard`).
"""

import copy
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head, get_config_model_id, selective_log_softmax, use_adapter

from rolltap.addons.errors import InputError
from rolltap.trainer.models.saving import save_whole
from rolltap.trainer.names import public_model
from rolltap.trainer.training.forward.decoder import unwrapped
from rolltap.trainer.training.grpo import ranks
from rolltap.trainer.training.grpo.config import require_whole_weights
from rolltap.trainer.training.grpo.optimizer import ShardedOptimizer, load_weights, local
from rolltap.trainer.training.grpo.sharding import shard

logger = logging.getLogger(__name__)

STATE = "state"
"""Folder of a checkpoint with what a `ShardedOptimizer` saves."""


class ReplicatedTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose model is the same on each process: whole, or with `args.sharding` "full" a part of it.

    A full model is trained with a `ShardedOptimizer`, and so is an adapter of 16 bits; other adapters with the
    optimizer itself, whose state is small, on each process. One that the caller gives is used as it is.
    """

    def __init__(self, *, model: Any, args: Any, peft_config: Any, **options: Any) -> None:
        # TRL would load the reference from the model's folder, with the class that config.json names
        copies = bool(args.beta) and peft_config is None and not isinstance(model, PeftModel)
        beta, args.beta = args.beta, 0.0 if copies else args.beta
        self._gathered: Counter[str] = Counter()
        try:
            super().__init__(model=model, args=args, peft_config=peft_config, **options)
        except InputError:
            raise
        except (ValueError, ImportError) as error:
            raise InputError(f"the model or its adapter cannot be trained: {error}") from error
        finally:
            args.beta = beta
        require_whole_weights(self.accelerator)
        if copies:
            self.beta = beta
            # as it is now, with TRL's head for scores alone
            reference = copy.deepcopy(self.model).requires_grad_(False).eval()
            vars(reference).pop("forward", None)  # TRL's own, which knows the original
            add_fused_lm_head(reference, temperature=self.temperature)
            if args.sharding == "full":
                shard(reference, self.args.device, self._gathered)
            self.ref_model = reference.to(self.args.device)
        gather = shard(self.model, self.args.device, self._gathered) if args.sharding == "full" else None
        self._shards = gather is not None
        if gather is not None:
            self._mixed_mesh_grads = True
            ranks.let_call("gather", gather)
            ranks.let_call("score", self._score)
            unwrapped(self.model).gather_weights = partial(ranks.everywhere, "gather")
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)  # no wrapper

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the trained weights of rank 0 everybody's, then the optimizer. Collective.

        Raises `InputError` when the processes have different models, and for an optimizer that cannot be shared out.
        """
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        ranks.require_same(trained.items())
        ranks.send_weights((weight, 0) for weight in trained.values() if not isinstance(weight, DTensor))
        small = any(weight.itemsize < torch.float32.itemsize for weight in trained.values())
        full = self.args.sharding == "full"
        if full and self.optimizer is not None:
            raise InputError('sharding="full" makes the optimizer itself: leave optimizers out, and set optim')
        if self.optimizer is None and (full or small or not isinstance(self.model, PeftModel)):
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            if full and not kind.__module__.startswith("torch.optim."):
                raise InputError(f"optim={self.args.optim!r} looks at whole matrices: choose adamw_torch_fused, or sgd")
            if not isinstance(kind, type) or hasattr(kind, "train") or options.keys() & {"params", "model"}:
                raise InputError(
                    f"optim={self.args.optim!r} needs more than the parameters that it steps: choose another one, such "
                    "as adamw_torch_fused, or train an adapter"
                )
            names = {weight: name for name, weight in trained.items()}
            self.optimizer_cls_and_kwargs = (ShardedOptimizer, {**options, "kind": kind, "names": names})
        return super().create_optimizer(model)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's card with names where TRL 1.16 writes None: of a local base model, and of one not on the Hub."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            card = Path(self.args.output_dir, "README.md")
            base = public_model(get_config_model_id(self.model.config)) or "a model without a name"
            text = card.read_text(encoding="utf-8").replace("[None](https://huggingface.co/None)", f"`{base}`")
            card.write_text(text.replace('model="None"', 'model="path/to/this/folder"'), encoding="utf-8")

    def score(self, ids: Sequence[int], *, base: bool = False) -> list[float]:
        """Return the natural-log probabilities of `ids[1:]` at temperature 1, under the present weights.

        With `base`, a `PeftModel` is scored without its adapter. Other processes need not take part, unless weights are
        sharded: then call it on all, or within `on_main`.
        """
        score = partial(ranks.everywhere, "score") if self._shards else self._score
        return list(score(ids, base))

    @torch.no_grad()
    def _score(self, ids: Sequence[int], base: bool) -> list[float]:
        model = self.model
        without = base and hasattr(model, "disable_adapter")
        with model.disable_adapter() if without else nullcontext(), self.accelerator.autocast():
            logits = model(input_ids=torch.tensor([ids], device=self.args.device), use_cache=False).logits[0, :-1]
        logprobs = selective_log_softmax(logits.float(), torch.tensor(ids[1:], device=self.args.device))
        return [float(value) for value in logprobs]

    def log_metrics(self, values: Mapping[str, float]) -> None:
        """Add values to those of the present step, whose mean is logged."""
        for name, value in values.items():
            self._metrics["train"][name].append(value)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model. With sharded weights as a folder like that of the base model. Collective."""
        folder = Path(output_dir or self.args.output_dir)
        if self.args.sharding != "full":
            super().save_model(output_dir, _internal_call)
        elif _internal_call:
            folder.mkdir(parents=True, exist_ok=True)  # the weights of a checkpoint are beside the optimizer's state
        else:
            ranks.on_main(lambda: save_whole(self.model, folder, Path(get_config_model_id(self.model.config))))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.args.sharding != "full":
            try:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            except InputError:
                raise
            except ValueError as error:
                fix = "resume with the sharding that saved it, or start in another folder"
                raise InputError(f"the checkpoint {resume_from_checkpoint} has no weights: {error}; {fix}") from error
        else:
            trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
            load_weights(trained, Path(resume_from_checkpoint, STATE))

    def _mixed_mesh_grad_norm(self, model: Any, max_norm: float) -> torch.Tensor:
        if all(weight.grad is None for weight in model.parameters()):
            return torch.zeros(())
        norm: torch.Tensor = super()._mixed_mesh_grad_norm(model, max_norm)
        return norm

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not isinstance(self.model, PeftModel):
            # under its own names, which `load_state_dict` reads; transformers would write those of its checkpoint
            self.model.save_pretrained = partial(self.model.save_pretrained, save_original_format=False)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.model.__dict__.pop("save_pretrained", None)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise `InputError` unless the checkpoint had all weights of the model, and no others."""
        weights = self.model.state_dict(keep_vars=True)
        loaded = {id(weights[name]) for name in weights.keys() - load_result.missing_keys}
        # of weights that are tied, one is in the file
        lacking = sorted(name for name in load_result.missing_keys if id(weights[name]) not in loaded)
        if wrong := lacking or sorted(load_result.unexpected_keys):
            raise InputError(
                f"the checkpoint {'lacks' if lacking else 'has'} {len(wrong)} weights that the model "
                f"{'has' if lacking else 'lacks'}, such as {wrong[0]}: resume with the model, and the version of "
                "rolltap, that saved it, or start in another folder"
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if (sharded := self._sharded) is not None:
            sharded.save(Path(output_dir, STATE))

    def _save_rng_state(self, output_dir: str) -> None:
        # next, the main process writes trainer_state.json, which marks the checkpoint as complete
        save = super()._save_rng_state
        ranks.together(lambda: save(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (sharded := self._sharded) is not None:
            sharded.load(Path(checkpoint, STATE))

    def _finish_gradients(self) -> None:
        """Average the gradients of a step. If one is not finite, drop them all: clipping would divide by their norm."""
        ranks.average_gradients(self.model.parameters())
        own = (local(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None)
        gradients = [gradient for gradient in own if gradient.numel()]
        skipped = any(ranks.gathered(not bool(get_total_norm(gradients, math.inf).isfinite())))
        self.log_metrics({"steps_skipped": float(skipped)})
        if skipped:
            self.model.zero_grad(set_to_none=True)
            if ranks.is_main():
                logger.warning("step %d was skipped: its gradients are not finite", self.state.global_step + 1)

    @contextmanager
    def _reference(self) -> Iterator[Any]:
        """Yield the reference model. A `PeftModel` has the reference's adapter, or none, in the context."""
        if self.ref_model is not None:
            yield self.ref_model
        else:
            with use_adapter(self.model, "ref" if "ref" in self.model.peft_config else None):
                yield self.model

    @property
    def _sharded(self) -> ShardedOptimizer | None:
        optimizer = getattr(self.optimizer, "optimizer", None)  # in accelerate's wrapper
        return optimizer if isinstance(optimizer, ShardedOptimizer) else None
