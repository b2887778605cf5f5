"""Checkpoints of a training, from which any number of processes resumes it.

    checkpoint-N/
      trained/             trained weights and the optimizer's state, by torch's own checkpoints
      scheduler.pt         that of the learning rate
      rng_state*.pth       the random numbers of each process, as transformers writes them
      entropy_ctrl_state.json   TRL's state of an adaptive coefficient of the entropy, if it has one
      trainer_state.json   transformers' state; it is written last, so that a checkpoint with it is
                           whole

Weights have the types in which they are trained. Frozen ones are not saved.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
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
    """Writes the checkpoints of a trainer in place of transformers, and reads the one that it
    resumes from.

    Of a model that FSDP2 shards each process writes and reads its own parts, of one that DDP
    replicates an even share.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._resumed: Path | None = None

    def resume_from(self, folder: Path) -> None:
        """Choose the checkpoint that the next training begins with. Raises `InputError` if
        `load_trained` cannot read it."""
        _saved(folder)
        self._resumed = folder

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Load the checkpoint into the model, the optimizer and the scheduler, which are wrapped
        now. Collective."""
        folder = self._resumed
        if folder is None:
            return
        self._resumed = None
        trainer = self._trainer
        load_trained(trainer.model, folder, trainer.optimizer)
        trainer.lr_scheduler.load_state_dict(torch.load(folder / _SCHEDULER, weights_only=True))
        rates = trainer.lr_scheduler.get_last_lr()
        for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def on_step_end(
        self,
        args: Any,
        state: Any,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """Write a checkpoint if transformers would do it next. Collective.

        A step that is logged has its line first, because a resumed training does not take it again.
        """
        if control.should_save and not control.should_log:
            self._write(args, state, control)

    on_epoch_end = on_step_end

    def on_log(
        self,
        args: Any,
        state: Any,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """Write the checkpoint of a step that was logged. Collective."""
        if control.should_save:
            self._write(args, state, control)

    def _write(self, args: Any, state: Any, control: TrainerControl) -> None:
        """Write a checkpoint, then remove the oldest ones beyond the limit. Collective."""
        control.should_save = False
        trainer = self._trainer
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        save_trained(trainer.model, folder, trainer.optimizer)
        raise_on_all(lambda: trainer._save_rng_state(str(folder)))

        def finish() -> None:
            torch.save(trainer.lr_scheduler.state_dict(), folder / _SCHEDULER)
            if getattr(trainer, "use_adaptive_entropy", False):
                # TRL's `_save_checkpoint` writes it, which is not called; TRL reads it
                entropy = {
                    "entropy_coef": trainer.entropy_coef,
                    "last_world_entropy": trainer._last_world_entropy,
                }
                (folder / "entropy_ctrl_state.json").write_text(json.dumps(entropy))
            state.save_to_json(str(folder / _STATE))
            rotate_checkpoints(args.output_dir, args.save_total_limit)

        on_main(finish)


def save_trained(model: nn.Module, folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Write the trained weights of a model, and the state of its optimizer. Collective.

    Raises `InputError` on every process if one of them cannot write.
    """
    state: dict[str, Any] = {}
    for name, weight in trained_parameters(model).items():
        state[name] = weight.detach()
        for key, value in optimizer.state.get(weight, {}).items():
            state[f"{name}/{key}"] = value
    _call_torch(save, state, folder)


@torch.no_grad()
def load_trained(
    model: nn.Module,
    folder: Path,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Read what any number of processes wrote with `save_trained`, sharded or not, into a model.
    Collective.

    Raises `InputError` for a checkpoint that was not written by it, that has other weights, or
    cannot be read.
    """
    saved = _saved(folder)
    weights = trained_parameters(model)
    other = weights.keys() ^ {name for name in saved if "/" not in name}
    if other:
        raise InputError(
            f"the checkpoint {folder} is of another model: {len(other)} weights are in one of them "
            f"alone, such as {min(other)}. Resume with the model, and the version of rolltap, that "
            "saved it, or start in another folder"
        )
    state: dict[str, Any] = {name: weight.detach() for name, weight in weights.items()}
    for name, metadata in saved.items():
        if optimizer is not None and "/" in name:
            state[name] = _empty(metadata, weights[name.partition("/")[0]])
    _call_torch(load, state, folder)
    if optimizer is None:
        return
    for name, value in state.items():
        weight_name, _, key = name.partition("/")
        if key:
            optimizer.state[weights[weight_name]][key] = value
    # torch moves each value to where the optimizer needs it
    optimizer.load_state_dict(optimizer.state_dict())


def _empty(metadata: Any, weight: Tensor) -> Tensor | None:
    """Return a tensor into which a value of the optimizer's state is read, None for another
    value."""
    if not isinstance(metadata, TensorStorageMetadata):
        return None
    dtype = metadata.properties.dtype
    if metadata.size == weight.shape:
        return torch.empty_like(weight, dtype=dtype)
    return torch.empty(metadata.size, dtype=dtype)


def _saved(folder: Path) -> dict[str, Any]:
    """Return the metadata of all that a checkpoint has, by name."""
    try:
        return dict(FileSystemReader(folder / TRAINED).read_metadata().state_dict_metadata)
    except OSError as error:
        raise InputError(
            f"the checkpoint {folder} is of another version of rolltap, or not whole ({error}): "
            "resume with the version that saved it, or start in another folder"
        ) from error


def _call_torch(function: Callable[..., Any], state: dict[str, Any], folder: Path) -> None:
    """Call torch's `save` or `load`."""
    alone = not several()
    group = None if alone else object_group()
    try:
        with warnings.catch_warnings():
            # that there is one process, or files of a checkpoint that is not whole
            warnings.simplefilter("ignore")
            function(state, checkpoint_id=folder / TRAINED, process_group=group, no_dist=alone)
    except (CheckpointException, RuntimeError, OSError) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(iter(error.failures.values()))[0]
        raise InputError(
            f"the checkpoint {folder} cannot be written or read: {cause}; all processes must write "
            "to, and read from, storage that they share, and resume with the model, and the "
            "version of rolltap, that saved it"
        ) from error
