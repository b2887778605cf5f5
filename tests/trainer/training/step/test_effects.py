"""Each field that may be set changes what a training does, or is refused."""

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
from tests.trainer.training.step.tiny import make_trainer, record

FREE = re.compile(r"time|second|runtime|memory|^epoch$|_loss$|flos")
"""Names of what is logged that differs each time."""
ONE = {"gradient_accumulation_steps": 1}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 9.0, **ONE}
SAPO = {"loss_type": "sapo"}
SAVES = {"save_strategy": "steps", "save_steps": 1}
VESPO = {"loss_type": "vespo"}
WEIGHED = {"vllm_importance_sampling_correction": True}
VALUES = {
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "adam_epsilon": 0.1,
    "beta": 0.1,
    "delta": 1.01,
    "disable_tqdm": False,
    "entropy_coef": 0.1,
    "entropy_coef_delta": 0.2,
    "entropy_coef_max": 0.06,
    "entropy_coef_min": 0.04,
    "entropy_target": 0.0,
    "epsilon": 1e-6,
    "epsilon_high": 1e-6,
    "forward": "padded",
    "gradient_accumulation_steps": 1,
    "importance_sampling_level": "sequence",
    "learning_rate": 0.5,
    "log_level": "debug",
    "logging_first_step": True,
    "logging_steps": 2,
    "logging_strategy": "no",
    "loss_type": "cispo",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "lr_scheduler_type": "linear",
    "max_grad_norm": 0.01,
    "max_steps": 2,
    "num_iterations": 3,
    "num_train_epochs": 2.0,
    "off_policy_mask_threshold": 0.0,
    "optim": "sgd",
    "output_dir": "other",
    "sapo_temperature_neg": 3.0,
    "sapo_temperature_pos": 3.0,
    "save_steps": 2,
    "save_strategy": "steps",
    "save_total_limit": 1,
    "scale_rewards": "none",
    "seed": 5,
    "shuffle_dataset": False,
    "temperature": 2.0,
    "top_entropy_quantile": 0.5,
    "use_adaptive_entropy": True,
    "use_bias_correction_kl": False,
    "vespo_k_neg": 1.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_neg": 1.0,
    "vespo_lambda_pos": 1.0,
    "vllm_importance_sampling_clip_max": 1.0,
    "vllm_importance_sampling_clip_min": 1.0,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_truncate",
    "warmup_steps": 2,
    "weight_decay": 0.5,
}
"""Field -> a value of it that is not the default."""
NEEDS = {
    "entropy_coef": ONE,
    "entropy_coef_delta": ADAPTIVE,
    "entropy_coef_max": ADAPTIVE,
    "entropy_coef_min": ADAPTIVE | {"entropy_target": 0.0},
    "entropy_target": ADAPTIVE,
    "logging_first_step": {"logging_steps": 3},
    "loss_type": {"epsilon_high": 5.0},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine"},
    "num_train_epochs": {"max_steps": -1},
    "output_dir": SAVES,
    "sapo_temperature_neg": SAPO,
    "sapo_temperature_pos": SAPO,
    "save_steps": SAVES,
    "save_strategy": SAVES,
    "save_total_limit": SAVES,
    "top_entropy_quantile": ONE,
    "use_adaptive_entropy": ONE | {"entropy_coef": 0.05},
    "use_bias_correction_kl": {"beta": 0.1},
    "vespo_k_neg": VESPO,
    "vespo_k_pos": VESPO,
    "vespo_lambda_neg": VESPO,
    "vespo_lambda_pos": VESPO,
    "vllm_importance_sampling_clip_max": WEIGHED,
    "vllm_importance_sampling_clip_min": WEIGHED,
    "vllm_importance_sampling_mode": WEIGHED,
    "warmup_steps": {"lr_scheduler_type": "linear"},
}
"""Field -> other fields without which it has no effect."""
ELSEWHERE = {
    "activation_checkpointing": "test_trainer",
    "max_completion_length": "test_config",
    "model_init_kwargs": "test_trainer",
    "offload_checkpoints": "test_trainer",
    "optim_args": "test_config",
    "report_to": "test_config",
    "routing": "test_replayed",
    "sharding": "test_processes",
    "teacher_share": "test_teacher",
    "trust_remote_code": "test_loading",
    "use_cpu": "test_devices",
}
"""Field -> the module of the test that shows its effect or its refusal."""
NEED_A_SERVICE = ["project", "run_name", "trackio_space_id"]
"""Fields that only dashboards read: no test has one."""


@pytest.fixture
def seen(model, monkeypatch, capfd):
    """Return a function that returns what can be seen of a training with some settings, in a
    folder."""
    monkeypatch.setattr(tiny, "GROUPS", Dataset.from_dict({"task_id": [*"abcd"]}))
    level = transformers_logging.get_verbosity()
    traces = {}
    for number, task in enumerate("abcd"):
        traces[task] = record(model, random.Random(number), sessions=2)

    def seen(folder, settings):
        folder.mkdir()
        monkeypatch.chdir(folder)
        asked = []

        def source(rows):
            tasks = [row["task_id"] for row in rows]
            asked.append(tasks)
            return traces[tasks[0]]

        capfd.readouterr()
        trainer = make_trainer(model, "run", source, **{"max_steps": 3} | settings)
        trainer.train()
        logged = []
        for line in trainer.state.log_history:
            logged.append({name: value for name, value in line.items() if not FREE.search(name)})
        return {
            "weights": [each for step in trainer.spy.weights for each in step.values()],
            "logged": logged,
            "asked": asked,
            "files": sorted(Path().rglob("*")),
            "said": len(capfd.readouterr().err.splitlines()),
            "level": transformers_logging.get_verbosity(),
        }

    yield seen
    transformers_logging.set_verbosity(level)


@pytest.mark.parametrize("name", cases(VALUES, 0, [*VALUES].index("warmup_steps")))
def test_a_field_changes_what_can_be_seen(tmp_path, seen, name):
    others = {key: value for key, value in NEEDS.get(name, {}).items() if key != name}
    found = seen(tmp_path / "with", others | {name: VALUES[name]})
    without = seen(tmp_path / "without", others)
    pairs = zip(found.pop("weights"), without.pop("weights"), strict=False)
    assert found != without or not all(torch.equal(*pair) for pair in pairs)


def test_every_field_that_may_be_set_is_among_these():
    assert sorted([*VALUES, *ELSEWHERE, *NEED_A_SERVICE]) == sorted(ACCEPTED)
    for name, module in ELSEWHERE.items():
        found = Path(__file__).parents[2].rglob(f"{module}.py")
        assert any(name in path.read_text() for path in found), name
