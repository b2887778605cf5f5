"""Tiny checkpoints of several architectures, written once."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests import tiny_checkpoints

MAKERS: dict[str, Callable[[Path, Path], Path]] = {
    "qwen3": partial(tiny_checkpoints.qwen3, tied=False),
    "qwen3-tied": partial(tiny_checkpoints.qwen3, tied=True),
    "qwen3-sharded": partial(tiny_checkpoints.qwen3, tied=True, shard="200KB"),
    "qwen3-moe": tiny_checkpoints.qwen3_moe,
    "qwen3.5": tiny_checkpoints.qwen35,
    "qwen3.5-tied": partial(tiny_checkpoints.qwen35, tied=True),
    "qwen3.5-sharded": partial(tiny_checkpoints.qwen35, shard="500KB"),
    "gemma3": tiny_checkpoints.gemma3,
}
EVERY = sorted(MAKERS)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tokenizer_folder):
    """Return a function: name of a checkpoint -> its folder, which tests only read."""
    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = MAKERS[name](tmp_path_factory.mktemp(name), tokenizer_folder)
        return made[name]

    return checkpoint
