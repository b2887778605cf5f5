"""`python -m tests.trainer.training.started FOLDER FAULT ARGUMENTS`: the `rolltap` command with
stand-ins.

The engines are folders below `FOLDER/engine`, and harness and recorder are functions: see
`stand_ins`. Each process writes its id to `FOLDER/pid-RANK`. FAULT is a key of `FAULTS`, or `none`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rolltap.addons.engine.policy import PolicyFile
from rolltap.trainer.cli.main import main
from rolltap.trainer.engine import engines
from rolltap.trainer.rollouts import worker
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer
from tests.trainer.training.stand_ins import FakeRecorder, FolderEngine, Points, runner_by


class RecorderWithChild(FakeRecorder):
    """A recorder with a process of its own, which only leaving the recorder ends."""

    def __enter__(self) -> "RecorderWithChild":
        self.child = subprocess.Popen(["sleep", "600"])
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.child.kill()
        self.child.wait()


def second_dies(folder: Path) -> None:
    """Let the second process be killed while the first one rolls out."""
    _in_second_rollout(folder / "pid-1", signal.SIGKILL)


def second_launcher_is_killed(folder: Path) -> None:
    """Let the second process's launcher be killed before the second step. The process waits to be
    killed too, and after ten minutes goes on."""
    step = TraceGRPOTrainer.training_step

    def waiting(trainer: Any, *args: Any) -> Any:
        if trainer.state.global_step == 1 and os.environ["RANK"] == "1":
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.alarm(600)
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        return step(trainer, *args)

    TraceGRPOTrainer.training_step = waiting


def first_is_stopped(folder: Path) -> None:
    """Let the first process be told to end while it rolls out."""
    _in_second_rollout(folder / "pid-0", signal.SIGTERM)


def publish_is_refused(folder: Path) -> None:
    """Let the last of the engines refuse all weights but those of the base model."""
    FolderEngine.refuses = {"10"}


def _in_second_rollout(file: Path, number: int) -> None:
    """Let the process whose id a file has get a signal."""
    submit = worker.GroupRunner.submit

    async def acting(runner: Any, group: Any) -> Any:
        context = await runner.node.context_of(group)
        version = PolicyFile(context.recorder.path).read().version
        if version.split(".")[1] == "1":
            os.kill(int(file.read_text()), number)
        return await submit(runner, group)

    worker.GroupRunner.submit = acting


FAULTS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (second_dies, second_launcher_is_killed, first_is_stopped, publish_is_refused)
}


def stand_in(folder: Path, set_in: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put the stand-ins in their places by `set_in`. The engines are below `folder`, and serve its
    `model`."""
    points = Points(None)
    FolderEngine.folder = folder / "engine"
    FolderEngine.model = folder / "model"
    FolderEngine.points = points
    set_in(engines, "EngineAdmin", FolderEngine)
    set_in(worker, "Recorder", RecorderWithChild)
    set_in(worker, "GroupRunner", runner_by(points))


def start(folder: Path, fault: str) -> None:
    """Put the stand-ins in their places, and run the command."""
    torch.set_num_threads(1)
    stand_in(folder)
    if fault != "none":
        FAULTS[fault](folder)
    (folder / f"pid-{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))
    main()


if __name__ == "__main__":
    place, fault = Path(sys.argv[1]), sys.argv[2]
    sys.argv = ["rolltap", *sys.argv[3:]]
    start(place, fault)
