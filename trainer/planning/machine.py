"""The machine that a recipe is planned for."""

from dataclasses import dataclass

import torch

from rolltap.trainer.models.loading import Dtype
from rolltap.trainer.planning.memory import GIB
from rolltap.trainer.training.recipe import Recipe

FIRST_PORT = 8000
"""Port of the first engine, if no URL is given."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Processes, engines and GPUs of a plan."""

    processes: int
    engines: tuple[str, ...]
    """URLs. None to train on recorded runs."""
    gpu: float | None
    """Bytes of a GPU; None without one, or if it is not known."""
    gpus: float
    """GPUs of this machine that may train; infinite if the plan is for another one."""
    shared_gpu: bool
    dtype: Dtype
    cuda: bool
    """True if this machine has a GPU."""


def machine_of(recipe: Recipe, engine: str | None, processes: int | None, *, online: bool = True) -> Machine:
    """Return the machine that a recipe's table [machine] names, and otherwise this one.

    `engine` is the value of `--engine`: URLs, separated by commas. `processes` is the number of processes that are
    started. Without `online` there are no engines.

    The type of the weights is the one that a start on this machine chooses: the recipe's, or bfloat16 with a GPU and
    float32 without one.
    """
    declared = recipe.machine
    cuda = torch.cuda.is_available()
    here = float(torch.cuda.get_device_properties(0).total_memory) if cuda else None
    gpu = declared.gpu_gib * GIB if declared and declared.gpu_gib else here
    if recipe.grpo.get("use_cpu"):
        gpu = None
    urls = [url.strip() for url in engine.split(",")] if engine else []
    if not urls and online:
        urls = [f"http://127.0.0.1:{FIRST_PORT + i}" for i in range(declared.engines if declared else 1)]
    return Machine(
        processes=processes or (declared.processes if declared else 1),
        engines=tuple(urls),
        gpu=gpu,
        gpus=torch.cuda.device_count() if cuda and gpu == here else float("inf"),
        shared_gpu=bool(online and declared and declared.shared_gpu),
        dtype=recipe.dtype or ("float32" if gpu is None else "bfloat16"),
        cuda=cuda,
    )
