"""A trial of what transformers makes of a training's arguments long after its start: log level, optimizer, schedule.

Transformers checks their names when the arguments are made, and the rest when the first step begins, when sessions have
run already.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler

from rolltap.addons.errors import InputError

_OPTIMIZER = ("optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")


def check_made(args: TrainingArguments) -> None:
    """Make the log level, the optimizer and the schedule of `args` for a model of one layer.

    Raises `InputError` for what transformers and torch refuse, with the arguments that it was made of.
    """
    layer = torch.nn.Linear(2, 2)

    def optimizer() -> torch.optim.Optimizer:
        kind, given = Trainer.get_optimizer_cls_and_kwargs(args, layer)
        made: torch.optim.Optimizer = kind(given.pop("params", layer.parameters()), **given)
        return made

    _try(args, ("log_level",), args.get_process_log_level)
    optimizer_made = _try(args, _OPTIMIZER, optimizer)
    steps: Mapping[str, Any] = {
        "num_warmup_steps": args.get_warmup_steps(args.max_steps),
        "num_training_steps": args.max_steps,
        "scheduler_specific_kwargs": args.lr_scheduler_kwargs,
    }
    _try(args, _SCHEDULE, lambda: get_scheduler(args.lr_scheduler_type, optimizer=optimizer_made, **steps))


def _try(args: TrainingArguments, names: tuple[str, ...], make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # of all kinds: a missing package, an unknown name, a number out of range
        given = ", ".join(f"{name} = {_plain(getattr(args, name))!r}" for name in names)
        raise InputError(f"the recipe's [grpo] table cannot be used ({given}): {error}") from error


def _plain(value: Any) -> Any:
    """Return an enumeration's value, and other values as they are."""
    return getattr(value, "value", value)
