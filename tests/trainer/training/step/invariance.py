"""One gradient, computed in many ways: cases of `test_invariance.py`, and the program that its two
processes run."""

import copy
import gc
import random
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from rolltap.trainer.training.step.distributed import is_main
from tests.deep import cases
from tests.trainer.training.step import stock, tiny
from tests.trainer.training.step.small_models import small_model

CORRECTED = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 1.1}
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {"max_completion_length": 20},
    "cispo": {"epsilon_high": 1.02},
    "sapo": {},
    "luspo": {},
    "vespo": {},  # has no importance ratios of sequences
}
OPTIONS: dict[str, dict[str, Any]] = {}
"""Name -> arguments that change the gradient off policy."""
for name, needed in LOSSES.items():
    OPTIONS[name] = {"loss_type": name, **needed}
for name in list(LOSSES)[:-1]:
    OPTIONS[f"{name}, sequences"] = OPTIONS[name] | {"importance_sampling_level": "sequence"}
for mode, action in product(("token", "sequence"), ("truncate", "mask")):
    OPTIONS[f"{mode} {action}"] = CORRECTED | {"vllm_importance_sampling_mode": f"{mode}_{action}"}
OPTIONS |= {
    "least weight": {
        **CORRECTED,
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.9,
    },
    "vespo, corrected": {**CORRECTED, "loss_type": "vespo"},
    "vespo, other parameters": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 2.0,
        "vespo_k_neg": 2.0,
        "vespo_lambda_neg": 1.0,
    },
    "sapo, other temperatures": {
        "loss_type": "sapo",
        "sapo_temperature_pos": 2.0,
        "sapo_temperature_neg": 3.0,
    },
    "epsilon": {"epsilon": 0.02, "epsilon_high": 0.03},
    "delta": {"delta": 1.05},
    "scale by batch": {"scale_rewards": "batch"},
    "no scale": {"scale_rewards": "none"},
    "temperature": {"temperature": 0.7},
    "reference": {"beta": 0.3},
    "reference without correction": {"beta": 0.3, "use_bias_correction_kl": False},
    "sessions with a reference": {"loss_type": "grpo", "beta": 0.3},
    "off-policy sessions": {"off_policy_mask_threshold": 0.001},
    "two iterations": {"num_iterations": 2},
    "two iterations, corrected": {"num_iterations": 2, **CORRECTED},
}

ENTROPIES: dict[str, dict[str, Any]] = {
    "entropy bonus": {"entropy_coef": 0.05},
    "adaptive entropy bonus": {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.05,
        "entropy_coef_min": 0.01,
        "entropy_coef_max": 0.5,
        "entropy_coef_delta": 0.1,
        "entropy_target": 9.0,
        "num_iterations": 2,
    },
    "high entropies": {"top_entropy_quantile": 0.5},
}
"""Name -> likewise, where a step has one micro-batch."""

WAYS: dict[str, dict[str, Any]] = {
    "micro-batches": {"gradient_accumulation_steps": 3},
    "more micro-batches than sessions": {"strategy": "tree", "gradient_accumulation_steps": 20},
    "checkpointing": {"strategy": "per_request", "activation_checkpointing": True},
    "packed": {"forward": "packed"},
    "packed, checkpointing": {
        "forward": "packed",
        "activation_checkpointing": True,
        "strategy": "per_request",
    },
    "packed micro-batches": {
        "forward": "packed",
        "strategy": "tree",
        "gradient_accumulation_steps": 2,
    },
}
"""Name -> ways to compute the same gradient."""

FORWARDS = ("padded", "packed")
TOGETHER = cases(OPTIONS, 0, 1, 2, 11, 15, 18)
"""Options whose gradients two processes compute."""


@dataclass
class Case:
    """A model, the sessions that it sampled or, off policy, that an older one sampled. That is its
    reference."""

    model: PreTrainedModel
    off_policy: bool
    traces: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recorded = tiny.record_groups(self.model, random.Random(7))
        for strategy in ("per_request", "prefix_merging", "tree"):
            self.traces[strategy] = tiny.traces_of(recorded, strategy)
        self.reference = self.model
        if self.off_policy:
            torch.manual_seed(3)
            self.model = copy.deepcopy(self.model)
            for weight in self.model.parameters():
                weight.data += 0.02 * torch.randn_like(weight)

    def gradients(self, lora: bool = False, **way: Any) -> dict[str, torch.Tensor]:
        options = {"gradient_accumulation_steps": 1, **way}
        traces = self.traces[options.pop("strategy", "prefix_merging")]
        given = self.reference
        adapter = None
        if lora:
            given = self.model
            adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            torch.manual_seed(5)
        with tempfile.TemporaryDirectory() as folder:
            trainer = tiny.make_trainer(
                given,
                Path(folder, "out"),
                traces,
                peft_config=adapter,
                max_steps=way.get("num_iterations", 1),
                optim="sgd",
                **options,
            )
            if not lora:
                trainer.model.load_state_dict(self.model.state_dict())
            trainer.train()
        return trainer.spy.gradients[-1]

    def stock_gradients(self, **options: Any) -> dict[str, torch.Tensor]:
        """Return TRL's own, of merged traces in one padded batch."""
        with tempfile.TemporaryDirectory() as folder:
            return stock.gradients(
                self.model, self.reference, self.traces["prefix_merging"], Path(folder), **options
            )


@cache
def case(name: str) -> Case:
    """Return the case "attention" or "hybrid", followed by ", off policy" or ", on policy"."""
    kind, policy = name.split(", ")
    model = tiny.tiny_model() if kind == "attention" else small_model("qwen3.5")
    return Case(model, policy == "off policy")


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()
    gradients = {}
    for forward, option in product(FORWARDS, TOGETHER):
        way = OPTIONS[option] | {"forward": forward, "gradient_accumulation_steps": 2}
        gradients[forward, option] = case("attention, off policy").gradients(**way)
    if is_main():
        torch.save(gradients, sys.argv[1])
