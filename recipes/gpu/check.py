"""Check a machine: the trainer alone, and the whole loop with vLLM. Called by check.sh.

The check walks its stages, prints one table, and writes it as JSON. Each line passes, fails or is
skipped for a reason; the exit status is 1 if one fails.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import torch
from engine_half import check, record, serve
from lines import COLUMNS, Line, fact, failed, skipped
from machine import DRIVER, gpus, machine_lines, visible
from plans import MODEL, Setting
from rich.console import Console
from rich.table import Table
from rich.text import Text
from trainings import ahead, checkpoint, engines, lora, sharding, verify

import rolltap
from rolltap.trainer.cli.main import run
from rolltap.trainer.models.loading import LINEAR_ATTENTION

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "runs" / "gpu-check" / "check.json"
FILE = click.Path(path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}
PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "flash-linear-attention",
    "triton",
    "vllm",
)
"""Packages of the trainer and of the engine whose versions are in the JSON file."""
KERNELS = """
import json
from rolltap.trainer.models.loading import kernels
print(json.dumps(kernels("qwen3_5")))
"""
"""A program that prints the packages of kernels for Qwen3.5."""
VERSIONS = """
import importlib.metadata, json
found = importlib.metadata.distributions()
print(json.dumps({each.name: each.version for each in found}))
"""
"""A program that prints the versions of all packages of its Python."""
console = Console(stderr=True)


def machine(setting: Setting) -> Iterator[Line]:
    """Say what the machine has, and whether torch sees its GPU."""
    yield from machine_lines(setting.cpu)
    built = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}"
    if setting.cpu or torch.cuda.is_available():
        yield fact("machine: torch", note=built)
    else:
        why = f"{built}, sees no GPU: the driver must be {DRIVER} or newer for CUDA 13"
        yield failed("machine: torch", why)


def linear_attention(setting: Setting) -> Iterator[Line]:
    """Say what computes the linear attention of Qwen3.5."""
    what = "kernels: linear attention of Qwen3.5"
    used = [name for name, importable in packages().items() if importable]
    if setting.cpu or LINEAR_ATTENTION in used:
        yield fact(what, note=", ".join(used) or "torch")
    else:
        why = f"{LINEAR_ATTENTION} cannot be imported: `python -c 'import fla'` says why"
        yield failed(what, why)


def packages() -> dict[str, bool]:
    """Return the packages for Qwen3.5, and whether each can be imported.

    Imported here, fla would stay on the GPU.
    """
    ended = subprocess.run([sys.executable, "-c", KERNELS], stdout=subprocess.PIPE, check=True)
    found: dict[str, bool] = json.loads(ended.stdout.splitlines()[-1])
    return found


def trainer(setting: Setting) -> Iterator[Line]:
    """Run trainer_half.py in a process of its own, whose memory is free afterwards."""
    with tempfile.TemporaryDirectory() as made, console.status("the trainer's half"):
        file = Path(made, "lines.jsonl")
        command: list[str | Path] = [sys.executable, HERE / "trainer_half.py", "--out", file]
        if setting.cpu:
            command.append("--cpu")
        ended = subprocess.run(command, capture_output=True, text=True)
        for row in file.read_text().splitlines() if file.exists() else ():
            yield Line(**json.loads(row))
        if ended.returncode:
            yield failed("trainer", "\n".join(ended.stderr.splitlines()[-3:]))


Stage = Callable[[Setting], Iterator[Line]]
STAGES: dict[str, Stage] = {
    "machine": machine,
    "kernels": linear_attention,
    "trainer": trainer,
    "serve": serve,
    "record": record,
    "check": check,
    "checkpoint": checkpoint,
    "lora": lora,
    "ahead": ahead,
    "engines": engines,
    "sharding": sharding,
    "verify": verify,
}
"""The stages by name, in their order. README.md lists those that have not been run on CUDA."""
ENGINE_HALF = tuple(STAGES)[3:]
"""The stages from `serve` on."""


@click.command()
@click.option(
    "--model",
    type=FOLDER,
    help="Folder of the model that is served and trained: the quickstart's, if none.",
)
@click.option("--vllm", default="vllm", show_default=True, help="The vllm program.")
@click.option("--trainer-only", is_flag=True, help="Check the trainer alone, without vLLM.")
@click.option("--cpu", is_flag=True, help="The small form, for machines without a GPU.")
@click.option("--out", type=FILE, default=OUT, show_default=True, help="The JSON file.")
def main(model: Path | None, vllm: str, trainer_only: bool, cpu: bool, out: Path) -> None:
    """Check this machine."""
    started = datetime.now(UTC)
    beside = out.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{started:%Y%m%d-%H%M%S}-", dir=beside))
    setting = Setting(model or MODEL, vllm, cpu, folder)
    if not cpu:
        setting.gpus = visible(gpus())[:2]
        os.environ["CUDA_VISIBLE_DEVICES"] = setting.gpus[0] if setting.gpus else ""
    no_engine = ""
    if trainer_only:
        no_engine = "--trainer-only"
    elif shutil.which(vllm) is None:
        no_engine = f"there is no vLLM ({vllm})"
    elif shutil.which("mini") is None:
        no_engine = "mini-swe-agent is not installed"
    console.print(f"logs, recipes and runs: {folder}", markup=False, soft_wrap=True)
    lines = []
    for line in walk(setting, no_engine):
        cells = [cell for cell in line.cells() if cell]
        console.print("  ".join(cells), markup=False, highlight=False, soft_wrap=True)
        lines.append(line)
    width = None if sys.stdout.isatty() else 140
    Console(width=width).print(table(lines))
    found = {
        "started_at": started.isoformat(),
        "seconds": (datetime.now(UTC) - started).total_seconds(),
        "rolltap": rolltap.__version__,
        "model": model.name if model else "the quickstart's",
        "gpus": [f"{gpu.name}, {gpu.memory_mib:.0f} MiB, driver {gpu.driver}" for gpu in gpus()],
        "trainer": versions(sys.executable),
        "engine": versions(Path(vllm).with_name("python")),
        "checks": [line.to_json() for line in lines],
    }
    out.write_text(json.dumps(found, indent=2))
    click.echo(f"This file has the table, GPUs and versions; it may be sent to the project: {out}")
    sys.exit(any(line.result == "failed" for line in lines))


def walk(setting: Setting, no_engine: str) -> Iterator[Line]:
    """Yield the lines of all stages. `no_engine` is why no engine is started; empty if one is.

    Without the machine nothing more is checked, and without an engine nothing from `serve` on.
    """
    why: dict[str, str] = {}
    if no_engine:
        why = dict.fromkeys(ENGINE_HALF, no_engine)
    with setting.servers:
        for name, stage in STAGES.items():
            if name in why:
                yield skipped(name, why[name])
                continue
            machine_failed = False
            for line in guarded(name, stage, setting):
                machine_failed = name == "machine" and (machine_failed or line.result == "failed")
                yield line
            if machine_failed:
                why = dict.fromkeys(STAGES, "the machine lacks something")
            if name == "serve" and not setting.url:
                why = dict.fromkeys(STAGES, "the engine did not start")


def guarded(name: str, stage: Stage, setting: Setting) -> Iterator[Line]:
    """Yield the lines of a stage, and a failed one for an error."""
    try:
        yield from stage(setting)
    except Exception as error:
        yield failed(name, f"{type(error).__name__}: {error}")


def table(lines: list[Line]) -> Table:
    """Return the table of all lines."""
    shown = Table(*COLUMNS)
    for line in lines:
        what, result, *numbers, note = line.cells()
        shown.add_row(Text(what), Text(result, STYLES[result]), *numbers, Text(note))
    return shown


def versions(python: str | Path) -> dict[str, str]:
    """Return the versions of the packages that a Python has; none without such a program."""
    try:
        ended = subprocess.run([python, "-c", VERSIONS], stdout=subprocess.PIPE, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    found = json.loads(ended.stdout)
    return {name: found[name] for name in PACKAGES if name in found}


if __name__ == "__main__":
    run(main)
