"""Check a machine: the trainer alone, and the whole loop with vLLM. Called by check.sh.

Prints one table and writes it as JSON. Each line passes, fails or is skipped for a reason; the exit status is 1 if one
fails.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch
from engine_half import engine_half
from lines import Line, failed, measured, skipped, table
from rich.console import Console

import rolltap

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
console = Console(stderr=True)


@click.command()
@click.option("--model", type=FOLDER, help="Folder of the model that is served and trained: the quickstart's, if none.")
@click.option("--vllm", default="vllm", show_default=True, help="The vllm program.")
@click.option("--trainer-only", is_flag=True, help="Check the trainer alone, without vLLM.")
@click.option("--cpu", is_flag=True, help="The small form, for machines without a GPU.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=ROOT / "runs" / "gpu-check" / "check.json", show_default=True
)
def main(model: Path | None, vllm: str, trainer_only: bool, cpu: bool, out: Path) -> None:
    """Check this machine."""
    if not cpu and not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA GPU: --cpu is the small form without one")
    started = datetime.now(UTC)
    out.parent.mkdir(parents=True, exist_ok=True)
    lines, machine = trainer_half(cpu)
    why = "--trainer-only" if trainer_only else f"there is no vLLM ({vllm})"
    if trainer_only or shutil.which(vllm) is None:
        console.print(f"only the trainer's half is checked: {why}", markup=False)
        lines.append(skipped("engine half", why))
    else:
        folder = out.absolute().parent / f"{started:%Y%m%d-%H%M%S}"
        folder.mkdir()
        console.print(f"logs, recipes and runs: {folder}", markup=False, soft_wrap=True)
        for line in engine_half(model or quickstart_model(), vllm, cpu, folder):
            console.print(f"{line.what}: {line.result}", markup=False)
            lines.append(line)
    Console().print(table(lines))
    found = {
        "started_at": started.isoformat(),
        "rolltap": rolltap.__version__,
        "model": model and str(model),
        **machine,
    }
    out.write_text(json.dumps(found | {"checks": [line.to_json() for line in lines]}, indent=2))
    sys.exit(any(line.result == "failed" for line in lines))


def trainer_half(cpu: bool) -> tuple[list[Line], dict[str, Any]]:
    """Run trainer_half.py in a process of its own, whose memory is free afterwards. Return its lines, and the rest."""
    with tempfile.TemporaryDirectory() as made, console.status("the trainer's half"):
        file = Path(made, "found.json")
        command: list[str | Path] = [
            sys.executable,
            HERE / "trainer_half.py",
            "--out",
            file,
            *(["--cpu"] if cpu else []),
        ]
        ended = subprocess.run(command, capture_output=True, text=True)
        if not file.exists():
            return [failed("trainer half", "\n".join(ended.stderr.splitlines()[-3:]))], {}
        found = json.loads(file.read_text())
    rows = found.pop("checks")
    return [_line(row) for row in rows], found


def _line(row: dict[str, Any]) -> Line:
    value = math.inf if row["value"] is None else row["value"]
    return measured(f"{row['check']}, {row['model']}", value, row["limit"])


def quickstart_model() -> Path:
    """Make the quickstart's tiny model if it is not there, and return its folder."""
    folder = ROOT / "runs" / "quickstart" / "model"
    subprocess.run([sys.executable, ROOT / "recipes" / "quickstart" / "make_model.py", folder], check=True)
    return folder


if __name__ == "__main__":
    main()
