"""The lines of a shell that start the engines and the training of a plan."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from rolltap.addons.options import is_loopback
from rolltap.trainer.training.arguments import LORA_RANKS
from rolltap.trainer.training.plan.engine import sequences_of
from rolltap.trainer.training.plan.memory import UTILIZATION, EngineShare, Machine
from rolltap.trainer.training.recipe import Recipe

KEY = "export ROLLTAP_ENGINE_KEY_FILE=$PWD/engine.key"
"""In every terminal. The file is made if it does not exist."""
_OTHERS = "and on the others: the name of this node, and their own numbers, 1 and so on"
NODE = f"HEAD=$(hostname) NODE=0  # {_OTHERS}"


def serving(recipe: Recipe, machine: Machine, engine: EngineShare | None) -> Iterator[str]:
    """Yield the lines that start the engines. One that begins with `#` names the machine of the
    next, if another."""
    yield KEY
    arguments = _engine_arguments(recipe, machine, engine)
    machines: dict[str, list[SplitResult]] = {}
    for given in machine.engines:
        url = urlsplit(given)
        machines.setdefault(_host(url), []).append(url)
    host = ""
    for host, urls in sorted(machines.items()):
        if host:
            yield f"# on {host}, with a copy of engine.key:"
        for gpu, url in enumerate(urls):
            words = ["rolltap", "serve", str(recipe.model)]
            if host:
                words += ["--host", host]
            port = url.port
            if port is None and url.scheme == "http":
                port = 80
            if port is not None:
                words += ["--port", str(port)]
            yield _on_gpus(machine, gpu, 1) + shlex.join([*words, *arguments])
    if host:
        yield "# here:"


def training(
    machine: Machine,
    file: Path,
    runs: Sequence[Path],
    out: Path,
) -> Iterator[str]:
    """Yield the line that starts the training, on each node. Engines of this machine have the
    first GPUs."""
    words = ["rolltap", "train", str(file)]
    for run in runs:
        words += ["--from", str(run)]
    if machine.engines:
        words += ["--engine", ",".join(machine.engines)]
    words += ["--out", str(out)]
    where = "--standalone"
    if machine.nodes > 1:
        where = f"--nnodes {machine.nodes} --node-rank $NODE --master-addr $HEAD"
        yield NODE
    each = machine.processes // machine.nodes
    launcher = ""
    if machine.processes > 1:
        launcher = f"torchrun {where} --nproc-per-node {each} -m "
    first = 0
    if not machine.shared_gpu:
        first = sum(not _host(urlsplit(url)) for url in machine.engines)
    yield _on_gpus(machine, first, each) + launcher + shlex.join(words)


def _engine_arguments(recipe: Recipe, machine: Machine, engine: EngineShare | None) -> list[str]:
    words = []
    if recipe.max_tokens:
        words += ["--max-model-len", str(recipe.max_tokens)]
    if recipe.publish == "lora":
        ranks = recipe.lora.get("rank_pattern") or {}
        rank = max([recipe.lora.get("r", 8), *ranks.values()])
        served = [size for size in LORA_RANKS if size >= rank]  # larger ones are refused
        words += ["--lora-rank", str(served[0])]
        if recipe.max_staleness:
            words += ["--max-staleness", str(recipe.max_staleness)]
    if recipe.replays_routing:
        words.append("--routing")
    words += ["--", "--max-num-seqs", str(sequences_of(recipe, len(machine.engines)))]
    if recipe.dtype or machine.gpu is not None:
        words += ["--dtype", machine.dtype]
    if engine is not None and engine.utilization != UTILIZATION:
        words += ["--gpu-memory-utilization", f"{engine.utilization:.2f}"]
    return words


def _host(url: SplitResult) -> str:
    """Return the host of a URL; empty for loopback, which is this machine."""
    host = url.hostname or ""
    if is_loopback(host):
        return ""
    return host


def _on_gpus(machine: Machine, first: int, number: int) -> str:
    if machine.gpu is None:
        return ""
    gpus = ",".join(map(str, range(first, first + number)))
    return f"CUDA_VISIBLE_DEVICES={gpus} "
