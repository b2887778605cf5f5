"""Several gloo ranks as forks of this process: they run one function, or one program."""

import importlib
import multiprocessing
import os
import runpy
import sys
import traceback
import warnings
from functools import partial
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from tests.conftest import free_port


def run_two(module, *arguments, number=2):
    """Run `python -m MODULE ARGUMENTS` as each rank. Raises RuntimeError unless all reach its
    end."""
    program = importlib.import_module(module).__file__  # with what it imports, once for all
    _fork(partial(_run, program, arguments), number, seconds=600)


def run_ranks(function, number=2, dead=(), seconds=120):
    """Run `function(rank)` as each rank of a gloo group.

    Return per rank its result, or "Error: message"; None of the `dead` ones, which end in
    `function`. Raises RuntimeError if another one ends, and TimeoutError for ranks that are silent
    for so long.
    """
    return _fork(partial(_join, function), number, dead, seconds)


def _fork(function, number, dead=(), seconds=120):
    context = multiprocessing.get_context("fork")
    port = free_port()
    silent = {}
    processes = []
    for rank in range(number):
        receiver, sender = context.Pipe(duplex=False)
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(number),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        process = context.Process(target=_rank, args=(function, rank, environment, sender))
        process.start()
        sender.close()  # the rank has the only one: its end is the end of the pipe
        silent[receiver] = rank
        processes.append(process)
    found = {}
    try:
        while silent:
            ready = wait(silent, seconds)
            if not ready:
                raise TimeoutError(f"the ranks {[*silent.values()]} of {number} do not end")
            for receiver in ready:
                rank = silent.pop(receiver)
                try:
                    found[rank] = receiver.recv()
                except EOFError:
                    if rank not in dead:
                        raise RuntimeError(f"rank {rank} has ended without a result") from None
                    found[rank] = None
    finally:
        for process in processes:
            process.kill()
    return [found[rank] for rank in range(number)]


def _rank(function, rank, environment, sender):
    torch.set_num_threads(1)
    os.environ |= environment
    sender.send(function(rank))
    if dist.is_initialized():
        dist.barrier()


def _join(function, rank):
    dist.init_process_group("gloo")
    try:
        return function(rank)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def _run(program, arguments, rank):
    sys.argv = [program, *arguments]
    warnings.simplefilter("ignore")
    runpy.run_path(program, run_name="__main__")
