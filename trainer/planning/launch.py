"""The command lines that a recipe needs."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rolltap.trainer.planning.engine_share import UTILIZATION, EngineShare
from rolltap.trainer.planning.machine import Machine
from rolltap.trainer.planning.numbers import ModelNumbers
from rolltap.trainer.training.recipe import Recipe

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for `--max-lora-rank`. vLLM 0.32."""

KEY = "export ROLLTAP_ENGINE_KEY_FILE=$PWD/engine.key"
"""Line of every terminal: the file is made if it does not exist."""

RUN = "runs/swe"
"""Run folder of the lines."""

RECIPE = Path("recipe.toml")
"""Recipe of the lines, if its file is not known."""


def lines(
    recipe: Recipe, machine: Machine, numbers: ModelNumbers, engine: EngineShare | None, file: Path | None
) -> list[str]:
    """Return the lines of a shell, in the order of their start: the engines', then the trainer's."""
    return [KEY, *_serving(recipe, machine, numbers, engine), _training(recipe, machine, file or RECIPE)]


def _serving(recipe: Recipe, machine: Machine, numbers: ModelNumbers, engine: EngineShare | None) -> Iterator[str]:
    for i, url in enumerate(machine.engines):
        command = ["rolltap", "serve", str(recipe.model)]
        if port := urlsplit(url).port:
            command += ["--port", str(port)]
        if recipe.max_tokens:
            command += ["--max-model-len", str(recipe.max_tokens)]
        if recipe.publish == "lora":
            rank = int(recipe.lora.get("r", 8))
            command += ["--lora-rank", str(next((size for size in LORA_RANKS if size >= rank), rank))]
        extra = ["--dtype", machine.dtype] if machine.gpu is not None else []
        if engine is not None and engine.utilization != UTILIZATION:
            extra += ["--gpu-memory-utilization", f"{engine.utilization:.2f}"]
        if numbers.other_towers:
            extra += ["--language-model-only"]
        if extra:
            command += ["--", *extra]
        yield _on_gpus(machine, [i]) + shlex.join(command)


def _training(recipe: Recipe, machine: Machine, file: Path) -> str:
    first = 0 if machine.shared_gpu else len(machine.engines)
    program = "rolltap"
    if machine.processes > 1:
        program = f"torchrun --nproc-per-node {machine.processes} -m rolltap"
    command = f"{program} train {shlex.quote(str(file))} --engine {','.join(machine.engines)} --out {RUN}"
    return _on_gpus(machine, list(range(first, first + machine.processes))) + command


def _on_gpus(machine: Machine, which: list[int]) -> str:
    if machine.gpu is None:
        return ""
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, which))} "
