"""Ranks of the tests end together."""

import os

import pytest
import torch.distributed as dist

from tests.trainer.training.step.gloo import run_ranks, run_two

PROGRAM = """
import os
import torch.distributed as dist
if os.environ["RANK"] == "1":
    raise SystemExit("no memory on 1")
dist.init_process_group("gloo")
"""


def test_all_ranks_of_a_program_end_when_one_ends_before_it_has_joined(tmp_path, monkeypatch):
    (tmp_path / "program_of_ranks.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("program_of_ranks")
    (tmp_path / "program_of_ranks.py").write_text(PROGRAM)
    with pytest.raises(RuntimeError, match="rank 1 has ended without a result"):
        run_two("program_of_ranks")


def test_all_ranks_of_a_function_end_when_one_ends_before_it_has_joined(monkeypatch):
    join = dist.init_process_group

    def end(backend):
        if os.environ["RANK"] == "1":
            os._exit(9)
        join(backend)

    monkeypatch.setattr(dist, "init_process_group", end)
    with pytest.raises(RuntimeError, match="rank 1 has ended without a result"):
        run_ranks(lambda rank: rank)
