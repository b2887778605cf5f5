"""A folder to train in, with stand-ins for engines, harness and recorder."""

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from rolltap.trainer.cli import main
from rolltap.trainer.training.recipe import FINISHED
from tests.conftest import free_port
from tests.trainer.training.stand_ins import write_inputs
from tests.trainer.training.started import stand_in

ROOT = Path(__file__).resolve().parents[3]
RECIPE = """
model = "model"
tasks = "tasks.jsonl"
harness = "harness.toml"
steps = 2
groups_per_step = 2
sessions = 2
[grpo]
learning_rate = 1e-2
gradient_accumulation_steps = 2
"""
LORA = '[lora]\nr = 2\ntarget_modules = "all-linear"\n'
URLS = ("http://127.0.0.1:9", "http://127.0.0.1:10")
ENGINES = ("--engine", ",".join(URLS))


class Training:
    """A folder with recipe, model and tasks, and the ways to train by them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_inputs(folder, "abc")
        self.recipe(RECIPE)

    def recipe(self, text: str) -> None:
        """Write the recipe."""
        (self.folder / "recipe.toml").write_text(text)

    def in_two(
        self, out: str = "run", *, fault: str = "none", more: tuple[str, ...] = ENGINES
    ) -> str:
        """Train in two processes of `torchrun`, with a fault of `started`. All processes must end.

        Returns the exit status in the first line, and then what was printed.
        """
        arguments = self._arguments(out, more)
        return self._launched(fault, {("--nproc-per-node", "2", "--standalone"): arguments})[0]

    def on_two_nodes(
        self, *, fault: str = "none", more: tuple[str, ...] = ENGINES, second: Path | None = None
    ) -> list[str]:
        """Train as `in_two`, in a process of each of two launchers. `second` is the second one's
        folder, if another."""
        where = ("--nproc-per-node", "1", "--nnodes", "2", "--master-port", str(free_port()))
        launchers = {}
        for node, folder in enumerate((self.folder, second or self.folder)):
            launcher = (*where, "--node-rank", str(node))
            launchers[launcher] = self._arguments("run", more, folder)
        return self._launched(fault, launchers)

    def _launched(self, fault: str, arguments: dict[tuple[str, ...], list[str]]) -> list[str]:
        mark = secrets.token_hex(8)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ROLLTAP_MARK": mark}
        program = ("-m", "tests.trainer.training.started", str(self.folder), fault)
        how = {"cwd": ROOT, "env": environment, "stderr": subprocess.PIPE, "text": True}
        started = []
        for launcher, own in arguments.items():
            command = [sys.executable, "-m", "torch.distributed.run", *launcher, *program, *own]
            started.append(subprocess.Popen(command, **how))
        ended = []
        for process in started:
            printed = process.communicate()[1]
            ended.append(f"{process.returncode}\n{printed}")
        assert running(mark) == []
        return ended

    def here(
        self, monkeypatch: pytest.MonkeyPatch, out: str = "run", *, more: tuple[str, ...] = ENGINES
    ) -> Result:
        stand_in(self.folder, monkeypatch.setattr)
        return CliRunner().invoke(main.rolltap, self._arguments(out, more))

    def weights(self, out: str = "run") -> dict[str, Any]:
        return load_file(self.folder / out / FINISHED / "model.safetensors")

    def base(self) -> dict[str, Any]:
        return load_file(self.folder / "model" / "model.safetensors")

    def owners(self) -> list[str]:
        return [file.read_text() for file in self.folder.glob("engine/*/owner")]

    def _arguments(self, out: str, more: tuple[str, ...], folder: Path | None = None) -> list[str]:
        place = folder or self.folder
        return ["train", str(place / "recipe.toml"), "--out", str(place / out), *more]


def running(mark: str) -> list[str]:
    """Return the commands of the processes that have a mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def apart(one, two, base) -> float:
    """Return the distance of two trainings' weights, relative to how far they have come from
    `base`.

    Adam makes a step of any size out of a gradient that is rounding: the largest difference of a
    weight says little.
    """

    def distance(first, second) -> float:
        squares = 0.0
        for name in first:
            squares += float((first[name] - second[name]).double().square().sum())
        return squares**0.5

    return distance(one, two) / distance(one, base)
