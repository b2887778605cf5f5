"""Trainings with sharded weights, and the program that several ranks run: `FOLDER`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rolltap.trainer.models.saving import save_whole
from rolltap.trainer.training.grpo.ranks import is_main, on_main
from tests.deep import DEEP
from tests.trainer.training.grpo import invariance, replicated, tiny_models
from tests.trainer.training.grpo.tiny import Spy

BETA: dict[str, Any] = {"beta": 0.3, "mismatch": "truncate"}
MANY: dict[str, Any] = {"gradient_accumulation_steps": 5}
"""More micro-batches than sessions on two ranks: one has none."""
SHORT: dict[str, dict[str, Any]] = {
    "qwen3, full, segments": MANY,
    "qwen3, LoRA, padded": BETA | MANY,
    "qwen3, bfloat16, segments": {"beta": 0.3, "num_iterations": 2},
    "qwen3-moe, LoRA, segments": {"memory_gib": 1e-4},
}
"""Case of `replicated.trainer_of` -> further settings."""
DEEPER: dict[str, dict[str, Any]] = {
    f"{family}, {kind}, {forward}": BETA
    for family in tiny_models.FAMILIES
    for kind in ("full", "LoRA")
    for forward in ("segments", "padded")
} | {
    f"qwen3, full, segments, {option}": MANY | values
    for option, values in invariance.OPTIONS.items()
    if "lora" not in values
}
CASES = {**DEEPER, **SHORT} if DEEP else SHORT
RESUMED = (
    [case for case in CASES if case.count(",") == 2]
    if DEEP
    else ["qwen3, bfloat16, segments", "qwen3-moe, LoRA, segments"]
)
BEGAN = 2
"""Number of ranks whose checkpoints others resume."""


def trainer_of(case: str, out: Path, ranks: int, **config: Any) -> Any:
    trainer = replicated.trainer_of(case, out, ranks, sharding="full", **CASES[case] | config)
    trainer.model.config.pad_token_id = 0
    return trainer


def trained(folder: Path, ranks: int) -> dict[str, Spy]:
    """Train all cases for two iterations of two steps, with a checkpoint after the first in `FOLDER/RANKS/CASE`."""
    found = {}
    for case in CASES:
        steps = CASES[case].get("num_iterations", 1)
        saved = {"save_strategy": "steps", "save_steps": steps} if ranks == BEGAN else {}
        trainer = trainer_of(case, folder / str(ranks) / case, ranks, max_steps=2 * steps, **saved)
        trainer.train()
        found[case] = trainer.spy
        found[case].gathered = [entry.get("gathered_gib") for entry in trainer.state.log_history[:-1]]
        if ranks > 1 and case in RESUMED:
            found[case].published = published(trainer, case, folder, ranks)
        found[case].held = sum(tensor.nbytes for tensor in map(_local, trainer.model.parameters()))
    return found


def resumed(folder: Path, ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    """Go on from the checkpoints of `BEGAN` ranks, and return the weights after the last step."""
    found = {}
    for case in RESUMED:
        steps = CASES[case].get("num_iterations", 1)
        trainer = trainer_of(case, folder / "out", ranks, max_steps=2 * steps)
        trainer.train(resume_from_checkpoint=str(folder / str(BEGAN) / case / f"checkpoint-{steps}"))
        found[case] = trainer.spy.weights[-1]
    return found


def published(trainer: Any, case: str, folder: Path, ranks: int) -> tuple[Any, ...] | None:
    """Return the files of the sharded model and of the same model whole, and log-probabilities by both."""
    base = folder / f"base-{ranks}-{case}"
    on_main(lambda: tiny_models.tiny(case.partition(",")[0]).save_pretrained(base))
    trainer.model.config._name_or_path = str(base)
    trainer.save_model(str(folder / "saved"))
    scores = on_main(lambda: trainer.score([3, 4, 5, 6, 7]))
    if not is_main():
        return None
    whole = replicated.trainer_of(case, folder / "out", ranks, **CASES[case])
    whole.model.load_state_dict(trainer.spy.weights[-1], strict=False)
    save_whole(whole.model, folder / "whole", base)
    files = [load_file(folder / name / "model.safetensors") for name in ("saved", "whole")]
    return (*files, scores, whole.score([3, 4, 5, 6, 7]), next(trainer.model.parameters()).dtype)


def _local(weight: Any) -> torch.Tensor:
    local: torch.Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return local


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    spies = trained(folder, ranks)
    results = {"trained": {case: vars(spy) for case, spy in spies.items()}}
    if DEEP or ranks == BEGAN:
        results["resumed"] = resumed(folder, ranks)
    torch.save(results, folder / f"{ranks}-{os.environ['RANK']}.pt")
