"""A training on two nodes, one of which is killed: `python -m tests.trainer.training.nodes FOLDER`.

FOLDER has what `Training` writes, and the run `recorded`. One process imports everything and has no
threads. It forks torch's launchers, which fork their training processes: `torchrun` would import
everything again in each. The report is JSON on stdout, see `report`.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rolltap.trainer.cli.main import main
from rolltap.trainer.training import offline, online
from tests.conftest import free_port
from tests.trainer.training.started import publish_is_refused, second_launcher_is_killed, stand_in
from tests.trainer.training.trainings import ENGINES

IMPORTED = (offline, online)  # once, for all


def forked(function: Callable[[], Any], printed: Path) -> int:
    """Call a function in a process of its own, which prints into a file. Returns its id."""
    if child := os.fork():
        return child
    status = 1
    try:
        os.dup2(os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
        function()
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def status_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def train(
    folder: Path, out: str, fault: Callable[[Path], None] | None = None, rolls_out: bool = False
) -> None:
    """Train on the recorded run, or `rolls_out` with stand-ins, as the command does."""
    if rolls_out:
        stand_in(folder)
    if fault is not None:
        fault(folder)
    sys.argv = ["rolltap", "train", str(folder / "recipe.toml"), "--out", str(folder / out)]
    sys.argv += ENGINES if rolls_out else ("--from", str(folder / "recorded"))
    main()


def on_two_nodes(
    folder: Path,
    fault: Callable[[Path], None] | None = None,
    out: str = "run",
    rolls_out: bool = False,
) -> list[tuple[int, str]]:
    """Train by two launchers. Returns the exit status of each, and what it and its process
    printed."""
    address = f"127.0.0.1:{free_port()}"
    started = []
    for rank in range(2):
        printed = folder / f"printed-{rank}"
        # as `torchrun --node-rank`
        config = LaunchConfig(
            min_nodes=2,
            max_nodes=2,
            nproc_per_node=1,
            run_id="none",
            rdzv_backend="static",
            rdzv_endpoint=address,
            rdzv_configs={"rank": rank},
            max_restarts=0,
            start_method="fork",
            monitor_interval=0.1,
        )
        launch = partial(elastic_launch(config, train), folder, out, fault, rolls_out)
        started.append((forked(launch, printed), printed))
    return [(status_of(process), printed.read_text()) for process, printed in started]


def report(folder: Path) -> dict[str, Any]:
    """Return the outcomes of the nodes: of a start in which the second one is killed, and of one
    more; of an online training whose weights are refused. `alone` is the status of one process that
    trains the same."""
    killed = on_two_nodes(folder, second_launcher_is_killed)
    resumed = on_two_nodes(folder)
    refused = on_two_nodes(folder, publish_is_refused, "refused", rolls_out=True)
    alone = forked(partial(train, folder, "alone"), folder / "printed")
    return {"killed": killed, "resumed": resumed, "refused": refused, "alone": status_of(alone)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    # no threads before the forks
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.freeze()
    print(json.dumps(report(Path(sys.argv[1]))))
