"""Publish checkpoints to an engine on this machine, from the disk and from `/dev/shm`.

    python -m tests.bench.publish --vllm .venvs/vllm/bin/vllm

The model has random weights in bfloat16, and layers of the size of Qwen3-1.7B.
The folders take turns. `saved` is the time to write the checkpoint, `reloaded` the time from the
pause of the engine until it goes on with the new weights. `most_gb` is what lies in the folder
during the reload: the new checkpoint, and the one before, to which a failure goes back.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import torch
from transformers import AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rolltap.addons.engine.key import KEY_FILE
from rolltap.trainer.engine.engines import Engines, Weights
from rolltap.trainer.engine.publish import make_publisher
from rolltap.trainer.engine.serve import EngineServer
from tests.bench.frame import Rows, command, model_option
from tests.conftest import free_port
from tests.trainer.engine.acting import agreed

GB = 1e9
MEMORY = "/dev/shm"


class Watched(Engines):
    """Engines that note when a reload begins and ends."""

    @contextmanager
    def reloaded(self, new: Weights, old: Weights) -> Iterator[None]:
        self.begun = perf_counter()
        with super().reloaded(new, old):
            self.ended = perf_counter()
            yield


class Publications:
    """Publications by way of one folder."""

    def __init__(self, engines: Watched, folder: Path, base: Path) -> None:
        self._engines = engines
        self._folder = folder
        places = {"folder": folder, "run": base.parent, "base": base}
        self._publisher = make_publisher("checkpoint", engines, **places, adapters=2)
        self.saved: list[float] = []
        self.reloaded: list[float] = []
        self.most = 0

    def publish(self, model: PreTrainedModel, step: int) -> None:
        start = perf_counter()
        self._publisher.publish(model, f"1a2b3c4d.{step}.0", self._look)
        self.saved.append(self._engines.begun - start)
        self.reloaded.append(self._engines.ended - self._engines.begun)

    def _look(self, name: str | None) -> None:
        agreed(name)
        self.most = max(self.most, stored_bytes(self._folder))


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_model(folder: Path, tokenizer_folder: Path, layers: int) -> PreTrainedModel:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@command
@click.option("--vllm", default="vllm", help="The `vllm` program.")
@click.option("--layers", default=16, help="Layers of the model.")
@click.option("--rounds", default=5, help="Publications of each folder.")
@model_option
def main(vllm: str, layers: int, rounds: int, model: Path) -> dict[str, Rows]:
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir=MEMORY) as memory,
    ):
        base = Path(disk, "base")
        policy = write_model(base, model, layers)
        how = {"max_model_len": 1024, "log": Path(disk, "vllm.log")}
        extra = ["--dtype", "bfloat16"]
        with EngineServer(base, vllm=vllm, port=free_port(), extra=extra, **how) as server:
            os.environ[KEY_FILE] = str(server.key_file)
            engines = Watched(server.url)
            folders = {
                "disk": Publications(engines, Path(disk, "published"), base),
                MEMORY: Publications(engines, Path(memory), base),
            }
            for step in range(rounds + 1):
                for place, publications in enumerate(folders.values()):
                    publications.publish(policy, 2 * step + place + 1)
        checkpoint = stored_bytes(base)
    rows: Rows = []
    for name, publications in folders.items():
        # without the first publication: nothing lies in the folder before it
        row = {"folder": name, "most_gb": publications.most / GB}
        rows.append(row)
        for figure in ("saved", "reloaded"):
            row[f"{figure}_s"] = median(getattr(publications, figure)[1:])
            row[f"{figure}_of_disk"] = row[f"{figure}_s"] / rows[0][f"{figure}_s"]
    return {f"a checkpoint of {checkpoint / GB:.2f} GB": rows}


if __name__ == "__main__":
    main()
