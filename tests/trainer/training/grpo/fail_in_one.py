"""A training whose second process fails: what each process says is in the file `FOLDER/RANK`."""

import os
import random
import sys
from pathlib import Path

import torch

from tests.trainer.training.grpo.tiny import make_trainer, record, tiny_model

torch.set_num_threads(1)
folder, place, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
model = tiny_model()
traces = record(model, random.Random(0))
if place == "model" and rank == 1:
    model.lm_head = torch.nn.Linear(32, 33, bias=False)


def source(rows: list[dict]) -> list:
    if place == "rollout":
        raise OSError("the disk is full")
    return traces


trainer = make_trainer(model, folder / "out", source)
if place == "forward" and rank == 1:

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    trainer._score_inputs = fail
try:
    trainer.train()
    said = "nothing"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
(folder / str(rank)).write_text(said)
