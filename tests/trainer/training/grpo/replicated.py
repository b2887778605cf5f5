"""Trainings of two steps that have to be the same on one rank and on two, and the program that two ranks run."""

import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from tests.deep import cases
from tests.trainer.training.grpo import tiny, tiny_models

EVERY = [
    *(
        (family, weights, forward)
        for family in ("qwen3", "qwen3.5")
        for weights, forward in [
            ("full", "segments"),
            ("full", "padded"),
            ("LoRA", "segments"),
            ("bfloat16", "segments"),
        ]
    ),
]
CASES = [", ".join(case) for case in cases(EVERY, 1, 2, 7)]
"""The model, what of it is trained, and how rows run."""

DTYPES = {"bfloat16": torch.bfloat16, "LoRA in bfloat16": torch.bfloat16}

COMMON: dict[str, Any] = {
    "learning_rate": 1e-3,
    # without it, a gradient of a weight that should be zero decides by its sign, which is noise
    "adam_epsilon": 1e-4,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "activation_checkpointing": True,
}


def trainer_of(case: str, out: Path, ranks: int, **config: Any) -> Any:
    """Return a trainer of a case. Rank 1 begins with other weights: those of rank 0 count."""
    family, kind, forward, *_ = case.split(", ")
    model = tiny_models.tiny(family).eval()
    traces = tiny.record(model, random.Random(7))
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if "LoRA" in kind else None
    sizes = {"tokens_per_segment": 16} if forward == "segments" else {}
    trainer = tiny.make_trainer(
        model.to(DTYPES.get(kind, torch.float32)),
        out,
        lambda rows: traces,
        peft_config=lora,
        forward=forward,
        **COMMON | {"max_steps": 2, "gradient_accumulation_steps": 4 // ranks} | sizes | config,
    )
    if config.get("sharding") != "full" and os.environ.get("RANK") == "1":
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight.data += 1
    return trainer


def two_steps(folder: Path, ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the trained weights of each case after its second step."""
    found = {}
    for case in CASES:
        trainer = trainer_of(case, folder / "out", ranks)
        trained = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
        trainer.train()
        assert trainer.model_wrapped is trainer.model
        found[case] = {name: trainer.spy.weights[-1][name] for name in trained}
    return found


def spoil(trainer: Any, bad: float) -> None:
    """Let one value of one gradient of the first step be `bad` on this rank."""
    weight = next(weight for weight in trainer.model.parameters() if weight.requires_grad)

    def spoiled(gradient: torch.Tensor) -> torch.Tensor:
        if trainer.has_gradient and trainer.state.global_step == 0:  # not in the probe
            gradient = gradient.clone()
            gradient.view(-1)[0] = bad
        return gradient

    weight.register_hook(spoiled)


def spoiled(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return the weights after each of two steps, in the first of which rank 1 has a gradient that is no number."""
    trainer = trainer_of("qwen3, bfloat16, segments", folder / "out", 2)
    if os.environ["RANK"] == "1":
        spoil(trainer, math.nan)
    trainer.train()
    return trainer.spy.weights


RESUMED = cases(["qwen3, full, segments", "qwen3, bfloat16, segments", "qwen3, LoRA, segments"], 1, 2)


def whole(folder: Path, ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    """Train cases for four steps, with a checkpoint at the second in `FOLDER/RANKS/CASE`, and return the weights."""
    found = {}
    for case in RESUMED:
        trainer = trainer_of(case, folder / str(ranks) / case, ranks, max_steps=4, save_strategy="steps", save_steps=2)
        trainer.train()
        found[case] = trainer.spy.weights[-1]
    return found


def resumed(folder: Path, began: int, ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    """Go on from the checkpoints that `whole` saved with `began` ranks, and return the weights after four steps."""
    found = {}
    for case in RESUMED:
        trainer = trainer_of(case, folder / "out", ranks, max_steps=4)
        trainer.train(resume_from_checkpoint=str(folder / str(began) / case / "checkpoint-2"))
        found[case] = trainer.spy.weights[-1]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    results = {
        "two steps": two_steps(folder, 2),
        "whole": whole(folder, 2),
        "resumed": resumed(folder, 2, 2),
        "resumed from one": resumed(folder, 1, 2),
        "spoiled": spoiled(folder),
    }
    torch.save(results, folder / f"rank-{os.environ['RANK']}.pt")
