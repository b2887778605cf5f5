"""One gradient, computed in many ways: cases of `test_invariance.py`, and the program that its two processes run."""

import copy
import gc
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from rolltap.trainer.training.grpo.ranks import is_main
from tests.deep import cases as cases_of_suite
from tests.trainer.training.grpo import tiny, tiny_models

OPTIONS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.02},
    "epsilon": {"epsilon": 0.02, "epsilon_high": 0.03},
    "delta": {"delta": 1.05},
    "scale by batch": {"scale_rewards": "batch"},
    "no scale": {"scale_rewards": "none"},
    "sessions": {"normalise": "sessions"},
    "constant": {"normalise": "constant", "max_completion_length": 20},
    "temperature": {"temperature": 0.7},
    "truncate": {"mismatch": "truncate", "mismatch_min": 0.9, "mismatch_max": 1.1},
    "mask": {"mismatch": "mask", "mismatch_min": 0.9, "mismatch_max": 1.1},
    "reference": {"beta": 0.3},
    "reference without correction": {"beta": 0.3, "use_bias_correction_kl": False},
    "reference of LoRA": {"beta": 0.3, "lora": True},
    "LoRA": {"lora": True},
    "two iterations": {"num_iterations": 2},
    "two iterations, masked": {"num_iterations": 2, "mismatch": "mask", "mismatch_min": 0.9, "mismatch_max": 1.1},
    "sessions with a reference": {"normalise": "sessions", "beta": 0.3},
}
"""Name -> arguments that change the gradient off policy; `lora` is our own."""

WAYS: dict[str, dict[str, Any]] = {
    "micro-batches": {"gradient_accumulation_steps": 3},
    "more micro-batches than traces": {"strategy": "tree", "gradient_accumulation_steps": 20},
    "checkpointing": {"strategy": "per_request", "activation_checkpointing": True},
    "segments in two passes": {"forward": "segments", "activation_checkpointing": True, "tokens_per_segment": 16},
    "segments in one pass": {"forward": "segments", "strategy": "per_request", "gradient_accumulation_steps": 2},
}
"""Name -> ways to compute the same gradient."""


FORWARDS = ("padded", "segments")
TOGETHER = cases_of_suite(OPTIONS, 0, 4, 6, 10, 13, 15)
"""Options whose gradients two processes compute."""


@dataclass
class Case:
    """A model, the sessions that it sampled or, off policy, that an older one sampled. That is its reference."""

    model: PreTrainedModel
    off_policy: bool
    traces: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for strategy in ("per_request", "prefix_merging", "tree"):
            self.traces[strategy] = tiny.record(self.model, random.Random(7), strategy, sessions=3)
        self.reference = self.model
        if self.off_policy:
            torch.manual_seed(3)
            self.model = copy.deepcopy(self.model)
            for weight in self.model.parameters():
                weight.data += 0.02 * torch.randn_like(weight)

    def gradients(self, **way: Any) -> dict[str, torch.Tensor]:
        way = {"gradient_accumulation_steps": 1, "activation_checkpointing": False} | way
        traces = self.traces[way.pop("strategy", "prefix_merging")]
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if way.pop("lora", None) else None
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(5)  # for the adapter
            steps = way.get("num_iterations", 1)
            source = lambda rows: traces  # noqa: E731
            given = self.model if lora else self.reference
            trainer = tiny.make_trainer(
                given, Path(folder, "out"), source, peft_config=lora, max_steps=steps, optim="sgd", **way
            )
            if not lora:
                trainer.model.load_state_dict(self.model.state_dict())
            trainer.train()
        return trainer.spy.gradients[-1]


def cases() -> Iterator[tuple[str, Case]]:
    for name, model in {"attention": tiny.tiny_model(), "hybrid": tiny_models.tiny("qwen3.5")}.items():
        for off_policy in (False, True):
            yield f"{name}, {'off' if off_policy else 'on'} policy", Case(model, off_policy)


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()
    case = dict(cases())["attention, off policy"]
    gradients = {
        (forward, option): case.gradients(**OPTIONS[option], forward=forward, gradient_accumulation_steps=2)
        for forward in FORWARDS
        for option in TOGETHER
    }
    if is_main():
        torch.save(gradients, sys.argv[1])
