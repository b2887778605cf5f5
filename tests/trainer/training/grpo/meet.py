"""Processes that meet before there is a model: each writes what rank 0 says to the file `FOLDER/RANK`."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from rolltap.trainer.training.grpo.config import TraceGRPOConfig
from rolltap.trainer.training.grpo.ranks import initialise, on_main

folder = Path(sys.argv[1])
args = TraceGRPOConfig(output_dir=str(folder / "out"), use_cpu=True, bf16=False)
initialise(args)
initialise(args)
said = on_main(lambda: f"rank {dist.get_rank()} of {dist.get_world_size()}")
(folder / os.environ["RANK"]).write_text(said)
