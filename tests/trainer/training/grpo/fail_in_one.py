"""Two processes that meet before there is a model, and trainings of which one process fails: `FOLDER`.

Each process writes JSON to the file `FOLDER/RANK`: place of the failure -> error; "meeting" -> words of rank 0.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rolltap.trainer.training.grpo.ranks import on_main
from rolltap.trainer.training.loop import join_processes
from tests.trainer.training.grpo.tiny import make_trainer, record, tiny_model

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
join_processes(None)
join_processes(None)
said = {"meeting": on_main(lambda: f"rank {dist.get_rank()} of {dist.get_world_size()}")}
for place in ("model", "forward", "rollout", "sharded"):  # after the last one the processes have left each other
    model = tiny_model()
    traces = record(model, random.Random(0))
    if place == "model" and rank == 1:
        model.lm_head = torch.nn.Linear(32, 33, bias=False)

    def source(rows: list[dict], place: str = place, traces: list = traces) -> list:
        if place == "rollout":
            raise OSError("the disk is full")
        return traces

    sharded = {"sharding": "full", "activation_checkpointing": True} if place == "sharded" else {}
    trainer = make_trainer(model, folder / "out", source, **sharded)

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    if place == "forward" and rank == 1:
        trainer._score_inputs = fail
    if place == "sharded" and rank == 1:
        layer = trainer.model.model.layers[1].mlp
        trainer.before_batch = lambda layer=layer: layer.register_forward_hook(fail)
    try:
        trainer.train()
    except Exception as error:
        said[place] = f"{type(error).__name__}: {error}"
(folder / str(rank)).write_text(json.dumps(said))
