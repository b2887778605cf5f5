"""Checkpoints of a training, from which any number of processes resumes it.

    checkpoint-N/
      trained/             trained weights and the optimizer's state, by torch.distributed.checkpoint
      scheduler.pt         that of the learning rate
      rng_state*.pth       the random numbers of each process, as transformers writes them
      trainer_state.json   transformers' state; it is written last, so that a checkpoint with it is whole

Weights have the types in which they are trained. Frozen ones are not saved.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerControl
from transformers.trainer_utils import rotate_checkpoints

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step.distributed import (
    object_group,
    on_main,
    raise_on_all,
    several,
    trained_parameters,
)

TRAINED = "trained"
"""Folder of a checkpoint with the weights and the optimizer's state."""
_SCHEDULER = "scheduler.pt"
_STATE = "trainer_state.json"


class Checkpoints(TrainerCallback):
    """Writes the checkpoints of a trainer in place of transformers, and reads the one that it resumes from.

    Of a model that FSDP2 shards each process writes and reads its own parts, of one that DDP replicates an even share.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._resumed: Path | None = None

    def resume_from(self, folder: Path) -> None:
        """Choose the checkpoint that the next training begins with. Raises `InputError` if `load` cannot read it."""
        _saved_names(folder)
        self._resumed = folder

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Load the checkpoint into the model, the optimizer and the scheduler, which are wrapped now. Collective."""
        if self._resumed is None:
            return
        trainer, folder = self._trainer, self._resumed
        self._resumed = None
        load_trained(trainer.model, folder, _unwrapped(trainer.optimizer))
        trainer.lr_scheduler.load_state_dict(torch.load(folder / _SCHEDULER, weights_only=True))
        rates = trainer.lr_scheduler.get_last_lr()
        for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Save, if transformers would do it next."""
        self._save(control)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Save, if transformers would do it next."""
        self._save(control)

    def _save(self, control: TrainerControl) -> None:
        """Write a checkpoint, then remove the oldest ones beyond the limit. Collective."""
        if not control.should_save:
            return
        control.should_save = False
        trainer = self._trainer
        args, state = trainer.args, trainer.state
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        save_trained(trainer.model, folder, _unwrapped(trainer.optimizer))
        raise_on_all(lambda: trainer._save_rng_state(str(folder)))

        def finish() -> None:
            torch.save(trainer.lr_scheduler.state_dict(), folder / _SCHEDULER)
            state.save_to_json(str(folder / _STATE))
            rotate_checkpoints(args.output_dir, args.save_total_limit)

        on_main(finish)


def save_trained(model: nn.Module, folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Write the trained weights of a model, and the state of its optimizer. Collective.

    Raises `InputError` on every process if one of them cannot write, and for an optimizer whose state is not by
    weight.
    """
    state: dict[str, Any] = {}
    for name, weight in trained_parameters(model).items():
        state[name] = weight.detach()
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(weight, DTensor) and isinstance(value, Tensor) and value.ndim:
                _require_sharded(optimizer, value)
            state[f"{name}/{key}"] = value
    _call_torch(save, state, folder)


def _require_sharded(optimizer: torch.optim.Optimizer, value: Tensor) -> None:
    """Raise `InputError` for a state of a sharded weight that is each process's own: the others' would be lost."""
    if not isinstance(value, DTensor):
        raise InputError(
            f"{type(optimizer).__name__} does not shard its state with the weights: choose another optim, such as "
            'adamw_torch_fused, or sharding="none"'
        )


@torch.no_grad()
def load_trained(model: nn.Module, folder: Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read what any number of processes wrote with `save_trained`, sharded or not, into a model. Collective.

    Raises `InputError` for a checkpoint that was not written by it, that has other weights, or cannot be read.
    """
    saved = _saved_names(folder)
    weights = trained_parameters(model)
    _require_same_names({name for name in saved if "/" not in name}, weights.keys(), folder)
    state: dict[str, Any] = {name: weight.detach() for name, weight in weights.items()}
    fields: defaultdict[str, list[str]] = defaultdict(list)
    for name, metadata in saved.items():
        weight_name, _, field = name.partition("/")
        if not field or optimizer is None:
            continue
        fields[weight_name].append(field)
        state[name] = _empty(metadata, weights[weight_name])
    _call_torch(load, state, folder)
    if optimizer is not None:
        _set_state(optimizer, {weight: (name, fields[name]) for name, weight in weights.items()}, state)


def _empty(metadata: Any, weight: Tensor) -> Tensor | None:
    """Return a tensor into which a value of the optimizer's state is read, None for another value."""
    if not isinstance(metadata, TensorStorageMetadata):
        return None
    if isinstance(weight, DTensor) and metadata.size == weight.shape:
        return torch.empty_like(weight, dtype=metadata.properties.dtype)
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)


def _set_state(
    optimizer: torch.optim.Optimizer, fields: dict[Any, tuple[str, list[str]]], state: dict[str, Any]
) -> None:
    """Give the optimizer its state, by the number that it gives each weight."""
    by_number: dict[int, dict[str, Any]] = {}
    number = 0
    for group in optimizer.param_groups:
        for weight in group["params"]:
            name, keys = fields[weight]
            if keys:
                by_number[number] = {key: state[f"{name}/{key}"] for key in keys}
            number += 1
    optimizer.load_state_dict({"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]})


def _saved_names(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint has, by name."""
    try:
        return dict(FileSystemReader(folder / TRAINED).read_metadata().state_dict_metadata)
    except OSError as error:
        raise InputError(
            f"the checkpoint {folder} is of another version of rolltap, or not whole ({error}): resume "
            "with the version that saved it, or start in another folder"
        ) from error


def _require_same_names(saved: set[str], own: Any, folder: Path) -> None:
    for what, which, names in (("lacks", "has", own - saved), ("has", "lacks", saved - own)):
        if names:
            raise InputError(
                f"the checkpoint {folder} {what} {len(names)} weights that the model {which}, such as {min(names)}: "
                "resume with the model, and the version of rolltap, that saved it, or start in another folder"
            )


def _call_torch(function: Callable[..., Any], state: dict[str, Any], folder: Path) -> None:
    """Call torch's `save` or `load`."""
    group = object_group() if several() else None
    call = partial(function, state, checkpoint_id=folder / TRAINED, process_group=group, no_dist=group is None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process, or files of a checkpoint that is not whole
            call()
    except (CheckpointException, RuntimeError, OSError) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(iter(error.failures.values()))[0]
        raise InputError(
            f"the checkpoint {folder} cannot be written or read: {cause}; all processes must write to, and read from, "
            "storage that they share, and resume with the model, and the version of rolltap, that saved it"
        ) from error


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer in accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
