"""Callback of `TraceGRPOTrainer` at the boundaries of trainings and steps."""

from typing import Any

from transformers import TrainerCallback

from rolltap.addons.errors import InputError


class StepGuard(TrainerCallback):
    """Callback that begins a training with a batch of its own, and drops the gradients of a step that trains nothing.

    These are zero, but with them the optimizer's momentum and weight decay would still change the weights.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the batch and the micro-batches of an earlier `train()`. Raises `InputError`."""
        self.trainer._generation, self.trainer._step = -1, 0
        if args.mismatch != "clip" and state.global_step % args.num_iterations:
            raise InputError(
                f"step {state.global_step} is in the middle of the {args.num_iterations} iterations of a batch: with "
                f"mismatch={args.mismatch!r} resume from a checkpoint after the last one (save_steps a multiple of "
                "num_iterations)"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the gradients to None: the optimizer then changes neither parameters nor its state."""
        if not self.trainer.has_gradient:
            model.zero_grad(set_to_none=True)
