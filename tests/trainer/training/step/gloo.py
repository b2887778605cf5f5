"""Several gloo ranks: one program as two processes, or one function as forks of this process.

`python -m tests.trainer.training.step.gloo MODULE NUMBER ARGUMENTS` imports the trainer once and forks the ranks.
"""

import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from queue import Empty

import torch
import torch.distributed as dist

from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[4]


def run_two(module: str, *arguments: str, number: int = 2) -> None:
    """Run `python -m MODULE ARGUMENTS` as two gloo ranks. Raises CalledProcessError unless all end with status 0."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(number)}
    once = {"OMP_NUM_THREADS": "1", "HF_DEACTIVATE_ASYNC_LOAD": "1"}  # no threads before the forks
    launcher = [sys.executable, "-m", __name__, module, str(number), *arguments]
    subprocess.run(launcher, cwd=ROOT, env=os.environ | shared | once, check=True)


def run_ranks(function, number=2, dead=(), seconds=120):
    """Run `function(rank)` as each rank of a gloo group.

    Return per rank its result, or "Error: message"; None of the `dead` ones, which end in `function`. Raises
    TimeoutError for ranks that are silent for so long.
    """
    port = free_port()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(function, rank, number, port, results)) for rank in range(number)]
    for rank in ranks:
        rank.start()
    found = dict.fromkeys(dead)
    try:
        while len(found) < number:
            rank, outcome = results.get(timeout=seconds)
            found[rank] = outcome
    except Empty:
        raise TimeoutError(f"only {sorted(found)} of {number} ranks have ended") from None
    finally:
        for process in ranks:
            process.kill()
    return [found[rank] for rank in range(number)]


def _rank(function, rank, number, port, results):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=number)
    try:
        outcome = function(rank)
    except Exception as error:
        traceback.print_exc()
        outcome = f"{type(error).__name__}: {error}"
    results.put((rank, outcome))
    if dist.is_initialized():
        dist.barrier()


def _run(program, rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    program = importlib.import_module(sys.argv.pop(1)).__file__  # with the trainer, once for all
    number = int(sys.argv.pop(1))
    gc.freeze()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_run, args=(program, rank)) for rank in range(number)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode) for rank in ranks))
