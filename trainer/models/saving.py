"""Saving."""

import copy
from pathlib import Path
from typing import Any

from peft import PeftModel


def save_weights(model: Any, folder: Path, base: Path) -> None:
    merged = copy.deepcopy(model).merge_and_unload() if isinstance(model, PeftModel) else model
    merged.save_pretrained(folder)


def save_adapter(model: Any, folder: Path, base: Path) -> None:
    model.save_pretrained(folder, save_embedding_layers=False)


def save_whole(model: Any, folder: Path, base: Path) -> None:
    from rolltap.trainer.models.loading import load_tokenizer

    save_weights(model, folder, base)
    load_tokenizer(base).save_pretrained(folder)
