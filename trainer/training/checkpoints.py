"""The checkpoints from which a stopped training goes on."""

import json
import shutil
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Folder in the run with the trainer's checkpoints."""


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint, or None."""
    return max(filter(_whole, folder.glob("checkpoint-*")), key=checkpoint_step, default=None)


def remove_incomplete(folder: Path) -> None:
    """Remove checkpoints that a killed training left incomplete. The trainer would write into them."""
    for checkpoint in folder.glob("checkpoint-*"):
        if not _whole(checkpoint):
            shutil.rmtree(checkpoint)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the number of optimizer steps before a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def _whole(checkpoint: Path) -> bool:
    # transformers writes trainer_state.json after all other files, and no beginning of a JSON object is JSON.
    # Source: transformers 5.23, Trainer._save_checkpoint. It removes old checkpoints only after that.
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True
