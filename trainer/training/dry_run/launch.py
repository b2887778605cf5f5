"""The command lines that a recipe needs."""

import shlex
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from rolltap.trainer.training.dry_run.findings import Machine, adapter_rank
from rolltap.trainer.training.dry_run.memory import UTILIZATION, EngineShare
from rolltap.trainer.training.dry_run.model import ModelNumbers
from rolltap.trainer.training.recipe import Recipe

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for `--max-lora-rank`. vLLM 0.32."""

KEY = "export ROLLTAP_ENGINE_KEY_FILE=$PWD/engine.key"
"""Line of every terminal: the file is made if it does not exist."""

RECIPE = Path("recipe.toml")
"""Recipe of the lines, if its file is not known."""


def lines(
    recipe: Recipe,
    machine: Machine,
    numbers: ModelNumbers,
    engine: EngineShare | None,
    *,
    file: Path | None = None,
    runs: Sequence[Path] = (),
    out: Path | None = None,
) -> list[str]:
    """Return the lines of a shell, in the order of their start: the engines', then the trainer's.

    `runs` are recorded ones to train on, without an engine. A line that begins with `#` names the machine of the next
    ones, where it is not this one.
    """
    file = file or RECIPE
    train = _training(recipe, machine, file, runs, out or Path("runs", file.stem))
    if runs:
        return [train]
    return [KEY, *_serving(recipe, machine, numbers, engine), train]


def _serving(recipe: Recipe, machine: Machine, numbers: ModelNumbers, engine: EngineShare | None) -> Iterator[str]:
    hosts: dict[str, list[SplitResult]] = {}
    for url in map(urlsplit, machine.engines):
        hosts.setdefault("" if _is_here(url) else url.hostname or "", []).append(url)
    for host, urls in hosts.items():
        if host:
            yield f"# on {host}, with a copy of engine.key:"
        for gpu, url in enumerate(urls):
            yield _on_gpus(machine, [gpu]) + shlex.join(_serve(recipe, machine, numbers, engine, url))
    if any(hosts):
        yield "# here:"


def _serve(
    recipe: Recipe, machine: Machine, numbers: ModelNumbers, engine: EngineShare | None, url: SplitResult
) -> list[str]:
    command = ["rolltap", "serve", str(recipe.model)]
    if not _is_here(url):
        command += ["--host", str(url.hostname)]
    if port := url.port or {"http": 80}.get(url.scheme):
        command += ["--port", str(port)]
    if recipe.max_tokens:
        command += ["--max-model-len", str(recipe.max_tokens)]
    if recipe.publish == "lora":
        rank = adapter_rank(recipe)
        command += ["--lora-rank", str(next((size for size in LORA_RANKS if size >= rank), rank))]
    extra = ["--dtype", machine.dtype] if recipe.dtype or machine.gpu is not None else []
    if engine is not None and engine.utilization != UTILIZATION:
        extra += ["--gpu-memory-utilization", f"{engine.utilization:.2f}"]
    if numbers.other_towers:
        extra += ["--language-model-only"]
    return [*command, "--", *extra] if extra else command


def _training(recipe: Recipe, machine: Machine, file: Path, runs: Sequence[Path], out: Path) -> str:
    engines = sum(_is_here(urlsplit(url)) for url in machine.engines)
    first = 0 if machine.shared_gpu else engines
    command = ["rolltap"]
    if machine.processes > 1:
        command = ["torchrun", "--standalone", "--nproc-per-node", str(machine.processes), "-m", "rolltap"]
    command += ["train", str(file)]
    for run in runs:
        command += ["--from", str(run)]
    if machine.engines:
        command += ["--engine", ",".join(machine.engines)]
    command += ["--out", str(out)]
    return _on_gpus(machine, list(range(first, first + machine.processes))) + shlex.join(command)


def _is_here(url: SplitResult) -> bool:
    """Return True for the URL of a server that only this machine reaches."""
    host = url.hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _on_gpus(machine: Machine, which: list[int]) -> str:
    if machine.gpu is None:
        return ""
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, which))} "
