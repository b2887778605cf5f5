"""The weights in a checkpoint folder: their names, shapes and files, without reading them."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rolltap.addons.errors import InputError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a checkpoint, by file."""

    folder: Path
    shapes: dict[str, dict[str, tuple[int, ...]]]
    """File name -> weight name -> shape."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a weight; None when the checkpoint does not have it."""
        return next((file[name] for file in self.shapes.values() if name in file), None)


def stored_weights(folder: Path) -> StoredWeights:
    """Return what the safetensors files of a checkpoint contain: those of its index, or its only one.

    Raises `InputError` for a folder without them, or with broken ones.
    """
    try:
        index = folder / INDEX
        files = sorted({*json.loads(index.read_text())["weight_map"].values()}) if index.is_file() else [_SINGLE]
        return StoredWeights(folder, {file: _shapes(folder / file) for file in files})
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise InputError(
            f"model: the weights in {folder} cannot be read: {error}; it needs {_SINGLE}, or {INDEX} and its files"
        ) from error


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, "pt") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
