"""Each field that may be set changes what a training does, or is refused."""

import os
import random
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers.utils import logging as transformers_logging

from rolltap.trainer.training.step.config import ACCEPTED
from tests.deep import cases
from tests.trainer.training.step import tiny
from tests.trainer.training.step.tiny import make_trainer, record, tiny_model

FREE = re.compile(r"time|second|runtime|memory|^epoch$|_loss$|flos")
"""Names of what is logged that differs each time."""
ONE = {"gradient_accumulation_steps": 1}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 9.0, **ONE}
CORRECTED = {"vllm_importance_sampling_correction": True}
CHANGES = {
    "adam_beta1": {"adam_beta1": 0.5},
    "adam_beta2": {"adam_beta2": 0.5},
    "adam_epsilon": {"adam_epsilon": 0.1},
    "beta": {"beta": 0.1},
    "delta": {"delta": 1.01},
    "disable_tqdm": {"disable_tqdm": False},
    "entropy_coef": {"entropy_coef": 0.1, **ONE},
    "entropy_coef_delta": {"entropy_coef_delta": 0.2, **ADAPTIVE},
    "entropy_coef_max": {"entropy_coef_max": 0.06, **ADAPTIVE},
    "entropy_coef_min": {"entropy_coef_min": 0.04, **ADAPTIVE, "entropy_target": 0.0},
    "entropy_target": {"entropy_target": 0.0, **ADAPTIVE},
    "epsilon": {"epsilon": 1e-6},
    "epsilon_high": {"epsilon_high": 1e-6},
    "forward": {"forward": "padded"},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 1},
    "importance_sampling_level": {"importance_sampling_level": "sequence"},
    "learning_rate": {"learning_rate": 0.5},
    "log_level": {"log_level": "debug"},
    "logging_first_step": {"logging_first_step": True, "logging_steps": 3},
    "logging_steps": {"logging_steps": 2},
    "logging_strategy": {"logging_strategy": "no"},
    "loss_type": {"loss_type": "cispo", "epsilon_high": 5.0},
    "lr_scheduler_kwargs": {
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "lr_scheduler_type": "cosine",
    },
    "lr_scheduler_type": {"lr_scheduler_type": "linear"},
    "max_grad_norm": {"max_grad_norm": 0.01},
    "max_steps": {"max_steps": 2},
    "num_iterations": {"num_iterations": 3},
    "num_train_epochs": {"num_train_epochs": 2.0, "max_steps": -1},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.0},
    "optim": {"optim": "sgd"},
    "output_dir": {"output_dir": "other", "save_strategy": "steps"},
    "sapo_temperature_neg": {"sapo_temperature_neg": 3.0, "loss_type": "sapo"},
    "sapo_temperature_pos": {"sapo_temperature_pos": 3.0, "loss_type": "sapo"},
    "save_steps": {"save_steps": 2, "save_strategy": "steps"},
    "save_strategy": {"save_strategy": "steps", "save_steps": 1},
    "save_total_limit": {"save_total_limit": 1, "save_strategy": "steps", "save_steps": 1},
    "scale_rewards": {"scale_rewards": "none"},
    "seed": {"seed": 5},
    "shuffle_dataset": {"shuffle_dataset": False},
    "temperature": {"temperature": 2.0},
    "top_entropy_quantile": {"top_entropy_quantile": 0.5, **ONE},
    "use_adaptive_entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.05, **ONE},
    "use_bias_correction_kl": {"use_bias_correction_kl": False, "beta": 0.1},
    "vespo_k_neg": {"vespo_k_neg": 1.0, "loss_type": "vespo"},
    "vespo_k_pos": {"vespo_k_pos": 1.0, "loss_type": "vespo"},
    "vespo_lambda_neg": {"vespo_lambda_neg": 1.0, "loss_type": "vespo"},
    "vespo_lambda_pos": {"vespo_lambda_pos": 1.0, "loss_type": "vespo"},
    "vllm_importance_sampling_clip_max": {"vllm_importance_sampling_clip_max": 1.0, **CORRECTED},
    "vllm_importance_sampling_clip_min": {"vllm_importance_sampling_clip_min": 1.0, **CORRECTED},
    "vllm_importance_sampling_correction": CORRECTED,
    "vllm_importance_sampling_mode": {
        "vllm_importance_sampling_mode": "sequence_truncate",
        **CORRECTED,
    },
    "warmup_steps": {"warmup_steps": 2, "lr_scheduler_type": "linear"},
    "weight_decay": {"weight_decay": 0.5},
}
"""Field -> a value of it, with fields that it needs."""


def seen(folder, monkeypatch, capfd, **settings) -> dict:
    """Return what can be seen of a training of three steps with these settings."""
    monkeypatch.chdir(folder)
    level = transformers_logging.get_verbosity()
    monkeypatch.setattr(tiny, "GROUPS", Dataset.from_dict({"task_id": [*"abcd"]}))
    model = tiny_model()
    asked = []
    traces = [record(model, random.Random(number), sessions=2) for number in range(4)]

    def batch(rows):
        asked.append([row["task_id"] for row in rows])
        return traces["abcd".index(rows[0]["task_id"])]

    capfd.readouterr()
    trainer = make_trainer(model, "run", batch, **{"max_steps": 3} | settings)
    trainer.train()
    logged = [
        {name: value for name, value in line.items() if not FREE.search(name)}
        for line in trainer.state.log_history
    ]
    found = {
        "weights": [list(step.values()) for step in trainer.spy.weights],
        "logged": logged,
        "asked": asked,
        "files": sorted(os.path.join(at, name) for at, _, names in os.walk(".") for name in names),
        "said": len(capfd.readouterr().err.splitlines()),
        "level": transformers_logging.get_verbosity(),
    }
    transformers_logging.set_verbosity(level)
    return found


def same(first, second) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, list) and len(first) == len(second):
        return all(same(*pair) for pair in zip(first, second, strict=True))
    return first == second


ELSEWHERE = {
    "activation_checkpointing": "test_trainer",
    "max_completion_length": "test_config",
    "model_init_kwargs": "test_trainer",
    "offload_checkpoints": "test_trainer",
    "optim_args": "test_config",
    "report_to": "test_config",
    "routing": "test_replayed",
    "run_name": "test_loop",
    "sharding": "test_processes",
    "teacher_share": "test_teacher",
    "trust_remote_code": "test_loading",
    "use_cpu": "test_devices",
}
"""Field -> the module of the test that shows its effect or its refusal."""
NEED_A_SERVICE = ["project", "trackio_space_id"]
"""Fields that only trackio reads, where it keeps a dashboard: no test has one."""


@pytest.mark.parametrize(
    "name", cases(CHANGES, *map([*CHANGES].index, ("adam_beta1", "warmup_steps")))
)
def test_a_field_changes_what_can_be_seen(tmp_path, monkeypatch, capfd, name):
    others = {key: value for key, value in CHANGES[name].items() if key != name}
    found = []
    for folder, settings in (("with", CHANGES[name]), ("without", others)):
        (tmp_path / folder).mkdir()
        found.append(seen(tmp_path / folder, monkeypatch, capfd, **settings))
    assert [what for what in found[0] if not same(found[0][what], found[1][what])]


def test_every_field_that_may_be_set_is_among_these():
    assert sorted([*CHANGES, *ELSEWHERE, *NEED_A_SERVICE]) == sorted(ACCEPTED)
    for name, module in ELSEWHERE.items():
        found = Path(__file__).parents[2].rglob(f"{module}.py")
        assert any(name in path.read_text() for path in found), name
