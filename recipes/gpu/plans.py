"""The trainings of the check: recipes, and plans by which engine and trainer divide one GPU."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rolltap
from rolltap.trainer.engine.weights import LIMITS

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart"
MODEL = ROOT / "runs" / "quickstart" / "model"
"""The quickstart's tiny model."""
ROLLTAP = [sys.executable, "-m", "rolltap"]
CONTEXT = 8192
"""Tokens of a session."""
LENGTH = 1.0
"""Length of a step that moves, whatever the gradients are.

In the quickstart's model, in bfloat16 too, it moved a sampled token by 0.1 nats, and by 0.01 with
an adapter. In a model of 4e9 weights, most of a step of 0.1 would be lost where weights are rounded
to bfloat16. That a step of 1 shows there, and does not ruin the model, is an estimate.
"""
SHORT = 1e-4
"""Norm to which gradients are cut: shorter than they are."""
SHARED_MEMORY = Path("/dev/shm")
ROOM = 3
"""Published weights for which the shared memory must have room: old, new, and as much again."""


@dataclass(frozen=True)
class Training:
    """A training of the check."""

    publish: str
    steps: int = 2
    groups: int = 1
    max_staleness: int = 0
    engines: int = 1
    moves: bool = False
    """True if a batch makes two optimizer steps, of a length that shows."""
    sharded: bool = False
    """True if two processes train on the recorded run, with sharded weights."""


TRAININGS = {
    "checkpoint": Training("checkpoint", moves=True),
    "lora": Training("lora", moves=True),
    "ahead": Training("lora", steps=4, groups=2, max_staleness=1),
    "engines": Training("lora", engines=2),
    "sharding": Training("checkpoint", steps=2, sharded=True),
}
"""Stage of the check -> its training."""
SHARING = ("checkpoint", "lora", "ahead", "engines")
"""The trainings that share a GPU with an engine."""


@dataclass
class Setting:
    """Settings that the stages of a check share."""

    model: Path
    vllm: str
    cpu: bool
    folder: Path
    """For logs, recipes and runs."""
    gpus: list[str] = field(default_factory=list)
    """One or two, as `CUDA_VISIBLE_DEVICES` names them; none with `cpu`."""
    plans: dict[str, Any] = field(default_factory=dict)
    """Training -> its plan as JSON values."""
    url: str = ""
    """The engine; empty while none serves."""
    servers: ExitStack = field(default_factory=ExitStack)
    """Stops the engines."""

    @property
    def sessions(self) -> int:
        """Sessions of a group. Their number is even: half of them get a reward."""
        return 2 if self.cpu else 4

    @property
    def limit(self) -> float:
        """Largest mean difference of log-probabilities in nats, as that of a training."""
        return LIMITS["float32" if self.cpu else "bfloat16"]

    @property
    def several(self) -> bool:
        """True if two engines or two processes can run. A CPU can have both."""
        return self.cpu or len(self.gpus) > 1


def make_plan(setting: Setting, name: str) -> dict[str, Any]:
    """Write the recipe of a training with the room that its plan gives it, and return the plan.

    The plan is made by a process, which leaves the GPU when it ends. Raises `RolltapError` when
    there is none.
    """
    recipe = write_recipe(setting, name)
    command: list[str | Path] = [*ROLLTAP, "train", recipe, "--dry-run", "--json"]
    if TRAININGS[name].sharded:
        command += ["--from", setting.folder / "record"]
    variables = environment_of(setting, name)
    ended = subprocess.run(command, capture_output=True, text=True, env=variables)
    if not ended.stdout:
        raise rolltap.RolltapError(f"{recipe} has no plan: {ended.stderr.strip()[-500:]}")
    plan: dict[str, Any] = json.loads(ended.stdout)
    setting.plans[name] = plan
    write_recipe(setting, name, plan)
    return plan


def environment_of(setting: Setting, name: str) -> dict[str, str]:
    """Return the environment of a training: with the GPUs that it uses, and wide lines."""
    gpus = setting.gpus if TRAININGS[name].sharded else setting.gpus[:1]
    environment = {**os.environ, "COLUMNS": "200"}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment


def require_start(setting: Setting, name: str) -> None:
    """Make the plan of a training if there is none. Raises `RolltapError` if it cannot start."""
    plan = setting.plans.get(name) or make_plan(setting, name)
    if not plan["can_start"]:
        errors = [finding["text"] for finding in plan["findings"] if finding["level"] == "error"]
        raise rolltap.RolltapError(f"the plan: {'; '.join(errors)}")


def write_recipe(setting: Setting, name: str, plan: dict[str, Any] | None = None) -> Path:
    """Write the recipe of a training, and return its path. A `plan` gives it memory."""
    training = TRAININGS[name]
    sessions = setting.sessions * training.groups
    keys: dict[str, Any] = {
        "model": str(setting.model),
        "tasks": write_tasks(setting.folder, name).name,
        "harness": "mini-swe-agent",
        "steps": training.steps,
        "groups_per_step": training.groups,
        "sessions": setting.sessions,
        "concurrency": sessions * (1 + training.max_staleness),
        "timeout": 300,
        "max_tokens": CONTEXT,
        "publish": training.publish,
        "max_staleness": training.max_staleness,
    }
    numbers = (plan or {}).get("model")
    if numbers and has_room(numbers["weights"]):
        keys["publish_folder"] = str(SHARED_MEMORY)
    machine: dict[str, Any] = {"engines": training.engines}
    if training.sharded:
        machine = {"processes": 2}
    elif not setting.cpu:
        machine["shared_gpu"] = True
    grpo = step_arguments(training)
    tables = {"budget": {"sampled_tokens": CONTEXT // 4}, "machine": machine, "grpo": grpo}
    if training.publish == "lora":
        tables["lora"] = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"}
    path = setting.folder / f"{name}.toml"
    text = toml(keys)
    for table, of in tables.items():
        text += f"\n[{table}]\n{toml(of)}"
    path.write_text(text)
    return path


def toml(keys: dict[str, Any]) -> str:
    """Return keys as lines of TOML."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())


def step_arguments(training: Training) -> dict[str, Any]:
    """Return TRL's arguments for the steps of a training."""
    if training.sharded:
        return {"sharding": "full", "learning_rate": 1e-6}
    if not training.moves:
        return {"learning_rate": 1e-5}
    return {
        "num_iterations": 2,
        "optim": "sgd",
        "max_grad_norm": SHORT,
        "learning_rate": LENGTH / SHORT,
        "lr_scheduler_type": "constant",
    }


def has_room(weights: int) -> bool:
    """Return True if weights of so many bytes can be published through the shared memory."""
    return SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM * weights


def write_tasks(folder: Path, name: str) -> Path:
    """Write the tasks of a rollout or a training, two of them, and return the file.

    Their evaluator passes every second session, whatever the agent did: each group has a signal.
    mkdir is atomic.
    """
    task = json.loads((QUICKSTART / "tasks.jsonl").read_text())
    task["workspace"] = str(QUICKSTART / "workspace")
    lines = []
    for number in range(2):
        flag = str(folder / f"{name}-{number}.flag")
        task["id"] = f"count-lines-{number}"
        task["evaluate"] = ["sh", "-c", 'mkdir "$0" 2>/dev/null || ! rmdir "$0"', flag]
        lines.append(json.dumps(task) + "\n")
    path = folder / f"{name}.jsonl"
    path.write_text("".join(lines))
    return path
