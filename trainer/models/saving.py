"""Saving what training changed, for the engines."""

import copy
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel


def save_weights(model: PreTrainedModel | PeftModel, folder: Path, base: Path) -> None:
    """Save what training changed as a checkpoint. An adapter is merged into a copy."""
    # merge_adapter followed by unmerge_adapter would leave rounding errors in the trained weights
    merged = copy.deepcopy(model).merge_and_unload() if isinstance(model, PeftModel) else model
    merged.save_pretrained(folder)


def save_adapter(model: PeftModel, folder: Path, base: Path) -> None:
    """Save the adapter."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
