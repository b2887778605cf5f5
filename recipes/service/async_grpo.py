"""TRL's AsyncGRPOTrainer on groups of a rollout service. README.md has the commands."""

import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import rolltap
from rolltap.trainer.service.async_grpo import LoraTransfer, ServiceRollouts

STEPS = {"max_steps": 3, "per_device_train_batch_size": 16, "token_budget": -1}
GRADIENT_DESCENT = {"optim": "sgd", "learning_rate": 60, "max_grad_norm": 0.005}


def make_trainer(url: str, token_file: str, out: str, sessions: int = 16, **settings: object) -> AsyncGRPOTrainer:
    """Return a trainer of an adapter on the tasks of a service, which publishes it there after each step."""
    client = rolltap.Client(url, token_file=token_file)
    base, tasks = client.service()["model"], [*client.service()["tasks"]]
    folder = Path(out, "adapters").absolute()
    trainer = AsyncGRPOTrainer(
        base,
        args=AsyncGRPOConfig(out, **STEPS | GRADIENT_DESCENT | settings),
        train_dataset=Dataset.from_dict({"prompt": tasks}),
        peft_config=LoraConfig(r=8, lora_alpha=64, target_modules="all-linear"),
        rollout_worker=ServiceRollouts(client, tasks, sessions=sessions, ahead=1),
        weight_transfer=LoraTransfer(client, folder, base, lambda: trainer.accelerator.unwrap_model(trainer.model)),
    )
    return trainer


if __name__ == "__main__":
    make_trainer(*sys.argv[1:]).train()
