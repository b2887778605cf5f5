"""Training recipe: one TOML file with the model, the tasks, the harness and TRL's arguments."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rolltap.addons.errors import InputError
from rolltap.addons.options import require_options
from rolltap.addons.store.records import CallRole
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.toml import load_toml
from rolltap.trainer.traces.build import TRAINED_ROLES, Strategy
from rolltap.trainer.traces.sessions import Outcomes, RewardRules, Suspicious, TraceOptions

FINISHED = "model"
"""Folder in the run with the trained model. It exists once the training is finished."""
CHECKPOINTS = "checkpoints"
"""Folder in the run with the trainer's checkpoints."""

Dtype = Literal["bfloat16", "float32"]


class Machine(BaseModel):
    """Keys of a recipe's table [machine]: where it runs. A start with other numbers is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    processes: int = Field(default=1, ge=1)
    """Training processes of all nodes, one for each GPU that trains."""
    nodes: int = Field(default=1, ge=1)
    """Machines that train, each with as many of the processes."""
    engines: int = Field(default=1, ge=1)
    """Engines that serve: the number of URLs of `--engine`."""
    gpu_gib: float | None = Field(default=None, gt=0)
    """Memory of a GPU in GiB, for the plan. By default the memory of this machine's GPU, if it has
    one."""
    shared_gpu: bool = False
    """True if an engine and a training process share a GPU."""


class HeldOut(BaseModel):
    """Keys of a recipe's table [evaluation]: tasks that are rolled out with the weights of a step,
    and not trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: Path
    """Held-out tasks, in the forms of the recipe's `tasks`."""
    every: int = Field(default=1, ge=1)
    """Steps between evaluations. The first is before the first step, the last after the last one.
    """
    sessions: int = Field(default=4, ge=1)
    """Sessions of each task."""
    sampling: dict[str, int | float] = {"temperature": 0.0}
    """Sampling parameters in place of the training's, key by key (those of `rolltap_sampling`).
    `{}` samples as the training does."""
    share: float = Field(default=0.25, gt=0, lt=1)
    """Share of the slots (`concurrency`) for these tasks while sessions of the training wait too.
    Not with `service`, which has its own `--evaluation-share`."""


class Forks(BaseModel):
    """Keys of a recipe's table [forks]: forks of a session of each group whose rewards are all
    equal.

    They are a group of their own: only what they sample themselves is trained, and compared with
    each other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["failed", "any"] = Field(default="failed", alias="from")
    """Sessions that can be forked. `"failed"`: sessions with a reward below the reward of a solved
    task. `"any"`: all sessions with a reward. The first such session of a group with two calls of
    its agent is forked."""
    at: Literal["middle", "last"] = "middle"
    """The call of the agent from which a fork samples."""
    sessions: int = Field(default=4, ge=2)
    """Forks of a session."""


def _adapters_by_default(settings: dict[str, Any]) -> int:
    max_staleness: int = settings.get("max_staleness", 0)
    return max(4, max_staleness + 2)


class Recipe(RolloutConfig):
    """Keys of a recipe: these, and those of `RolloutConfig`. Paths are relative to the recipe's
    folder."""

    model: Path
    """Folder of the model to train; the engine serves the same model."""
    tasks: Path | None = None
    """Tasks: a task file (JSON Lines), a folder of Harbor tasks, or SWE rows. Required to roll out;
    recorded runs need none."""
    harness: str | None = None
    """Name of a harness preset, or path of a preset file that ends in `.toml`. Required to roll
    out."""
    service: str | None = None
    """URL of a rollout service (`rolltap service`) that runs the sessions, into the same run
    folder. By default they run here."""
    steps: int = Field(ge=1)
    """Number of rollout and training rounds. Each trains on newly recorded sessions,
    `grpo.num_iterations` times. Recorded runs are read again until this number is reached."""
    groups_per_step: int = Field(default=1, ge=1)
    """Groups per step, each of one task."""
    sessions: int = Field(default=8, ge=2)
    """Sessions of a group, which GRPO compares with each other."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps by which rollouts may be ahead of the trainer. With 0 a step waits for its own
    sessions; with more they run beside the steps, and a token is trained by weights that are at
    most this number of steps newer than the weights that sampled it."""
    replace_zero_variance: int = Field(default=0, ge=0)
    """Maximum number of further groups of a step. One is run for each group whose rewards are all
    equal, which trains nothing: the next group in the order of the tasks."""
    forks: Forks | None = None
    """Forks for groups whose rewards are all equal, before `replace_zero_variance` adds groups. By
    default none."""
    outcomes: Outcomes = Outcomes()
    """Rewards of sessions that were not completed, by status."""
    suspicious: Suspicious = "keep"
    """Sessions with evidence of cheating (`rolltap inspect` shows it): `"keep"`, `"exclude"`, or a
    number that is subtracted from their reward."""
    strategy: Strategy = "prefix_merging"
    """Way from calls to traces."""
    roles: tuple[CallRole, ...] = Field(default=TRAINED_ROLES, min_length=1)
    """Roles of the calls to train. Tokens of other calls are context, with mask 0, where a trained
    call continues them."""
    teacher: str | None = None
    """Name of the scores (`rolltap score`) that train tokens, as `grpo.teacher_share` says. By
    default none."""
    teacher_engine: str | None = None
    """URL of the vLLM server that scores the sessions of each step under that name, if the training
    rolls out."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum length of a trace in tokens, prompt included. Longer ones are truncated at the end.
    """
    dtype: Dtype | None = None
    """Type of the weights. By default the engine's if it is bfloat16 or float32, else bfloat16 on a
    CUDA GPU and float32 on a CPU."""
    publish: Literal["checkpoint", "lora"] = "checkpoint"
    """Way of new weights to the engines: a checkpoint that they reload, or a LoRA adapter that they
    load."""
    publish_folder: Path | None = None
    """Folder for checkpoints and adapters on their way to the engines, which must see it under the
    same path. By default `published` in the run folder; `/dev/shm` keeps them in memory where all
    is on one machine."""
    adapters: int = Field(default_factory=_adapters_by_default, ge=2)
    """Adapters that stay loaded, with `publish = "lora"`. A session keeps the adapter that it began
    with. At least `max_staleness + 2`, which is the default where it is more."""
    max_difference: float | None = Field(default=None, gt=0)
    """Largest mean difference, in nats, between the log-probabilities of a fixed text by the
    trainer and by an engine. A larger one ends the training. By default 0.001 for float32 and 0.1
    for bfloat16."""
    save_steps: int = Field(default=1, ge=1)
    """Steps between the checkpoints from which a stopped training resumes."""
    evaluation: HeldOut | None = None
    """Held-out tasks. By default none."""
    machine: Machine | None = None
    """Machines on which the recipe runs. By default one process and the engines that are given."""
    grpo: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `rolltap.TraceGRPOConfig`: fields of TRL's `GRPOConfig`, and rolltap's own."""
    lora: dict[str, Any] = Field(default_factory=dict)
    """Arguments of PEFT's `LoraConfig`. With the table an adapter is trained instead of the full
    model."""

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        least = self.max_staleness + 2
        if self.publish == "lora" and self.adapters < least:
            given = f"adapters = {self.adapters} with max_staleness = {self.max_staleness}"
            raise ValueError(f"{given}: give at least {least}, or remove it")
        return self

    @property
    def keeps_adapters(self) -> bool:
        """True when a session goes on with the adapter that it began with, whatever is
        published."""
        return self.publish == "lora" and self.recorder.get("rolltap_keep_adapter") != "false"

    @property
    def iterations(self) -> int:
        """Optimizer steps of a step."""
        given = self.grpo.get("num_iterations", 1)
        if isinstance(given, int):
            return given
        return 1  # `check_arguments` refuses others

    def trace_options(self) -> TraceOptions:
        """Return the way from its sessions to labelled traces."""
        unrewarded = None
        if self.teacher is not None and self.grpo.get("teacher_share", 1) == 1:
            unrewarded = 0.0
        return TraceOptions(
            strategy=self.strategy,
            roles=self.roles,
            max_tokens=self.max_tokens,
            max_staleness=self.max_staleness * self.iterations,  # a version counts optimizer steps
            rewards=RewardRules(self.outcomes, self.suspicious, unrewarded=unrewarded),
            routing=self.replays_routing,
            scores=self.teacher,
        )

    @property
    def replays_routing(self) -> bool:
        """True if experts are recorded, and replayed by the trainer."""
        return self.grpo.get("routing") == "recorded"


def load_recipe(path: Path, ray: str | None = None) -> Recipe:
    """Read a recipe from a TOML file, with paths made absolute, and with another `ray`. Raises
    `InputError`."""
    recipe = load_toml(path, Recipe)
    if ray is not None:
        recipe = recipe.model_copy(update={"ray": ray})
    for fault in _faults(recipe):
        raise InputError(f"{path}: {fault}")
    require_options(recipe.recorder, f"{path}: recorder.")
    folder = path.parent
    paths: dict[str, Any] = {}
    for name in ("model", "tasks", "repositories", "publish_folder"):
        given = getattr(recipe, name)
        if given is not None:
            paths[name] = (folder / given).resolve()
    if recipe.runtime != "ssh":  # else they are folders of another machine
        paths["tools"] = tuple((folder / tool).resolve() for tool in recipe.tools)
    program = recipe.harbor_python
    if program is not None and "/" in program:
        # not resolved: the Python of an environment is a link
        paths["harbor_python"] = str(folder.absolute() / Path(program).expanduser())
    boxes = recipe.harbor_environment
    if boxes is not None and boxes.endswith(".json"):
        paths["harbor_environment"] = str((folder / Path(boxes).expanduser()).resolve())
    if recipe.harness is not None and recipe.harness.endswith(".toml"):
        paths["harness"] = str((folder / recipe.harness).resolve())
    held_out = recipe.evaluation
    if held_out is not None:
        options = {"rolltap_sampling": json.dumps(held_out.sampling)}
        require_options(options, f"{path}: evaluation.sampling: ")
        tasks = (folder / held_out.tasks).resolve()
        paths["evaluation"] = held_out.model_copy(update={"tasks": tasks})
    return recipe.model_copy(update=paths)


def _faults(recipe: Recipe) -> Iterator[str]:
    """Yield the reasons why valid keys do not fit each other."""
    publish = f'publish = "{recipe.publish}"'
    if recipe.publish == "lora" and not recipe.lora:
        yield f'{publish} needs a [lora] table; publish = "checkpoint" trains without one'
    if recipe.publish != "lora" and "adapters" in recipe.model_fields_set:
        yield f"adapters does nothing with {publish}: remove it"
    has_teacher = recipe.teacher is not None
    if has_teacher != bool(recipe.grpo.get("teacher_share", has_teacher)):
        yield "teacher and a grpo.teacher_share above 0 need each other: add or remove one"
    if recipe.teacher_engine and not has_teacher:
        yield "teacher_engine does nothing without teacher: add teacher, or remove it"
    for key in ("replace_zero_variance", "forks"):
        if has_teacher and getattr(recipe, key):
            yield f"with a teacher all groups train: remove {key}"
    if recipe.service is not None and recipe.ray is not None:
        yield "service and ray: the service has the sessions: give --ray to `rolltap service`"
    if recipe.runtime not in ("container", "ssh") and (
        recipe.container_engine or recipe.container_arguments
    ):
        what = 'container_engine and container_arguments are for runtime = "container"'
        yield f'{what}, not "{recipe.runtime}"'
    why = recipe.why_no_evaluations()
    if recipe.evaluation is not None and why:
        fix = "remove [evaluation], or listen_port and the runtime that needs it"
        yield f"[evaluation] cannot run, because {why}: {fix}"
    held_out = recipe.evaluation
    if recipe.service is not None and held_out is not None and "share" in held_out.model_fields_set:
        what = (
            f"evaluation.share = {held_out.share:g} does nothing with service, which has the slots"
        )
        yield f"{what}: remove it, and give --evaluation-share to `rolltap service`"
    has_own_slots = recipe.service is None
    if held_out is not None and has_own_slots and recipe.concurrency == 1:
        what = f"evaluation.share = {held_out.share:g} leaves no slot for the training"
        yield f"{what} with concurrency = 1: set concurrency = 2 or more"


def checkpoint_step(checkpoint: Path) -> int:
    """Return the number of optimizer steps before a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def require_steps_left(out: Path, recipe: Recipe) -> None:
    """Raise `InputError` when the training in `out` is finished and the recipe has no more
    steps."""
    if not (out / FINISHED).exists():
        return
    checkpoints = (out / CHECKPOINTS).glob("checkpoint-*")
    steps = max(map(checkpoint_step, checkpoints), default=0) // recipe.iterations
    if not steps:
        fix = go_on_elsewhere(out, recipe.steps)
        raise InputError(f"{out} holds a finished training without checkpoints: {fix}")
    if recipe.steps <= steps:
        what = f"steps = {recipe.steps} is no more than its {steps}"
        fix = "choose another folder, or set more steps"
        raise InputError(f"{out} holds a finished training, and {what}: {fix}")


def go_on_elsewhere(out: Path, steps: int) -> str:
    """Return what to do to train the model of a finished training for further steps with new
    learning rates."""
    model = json.dumps(str((out / FINISHED).absolute()))
    what = "to train its model further, start in another folder with a recipe that has the lines"
    return f"{what}\nmodel = {model}\nsteps = {max(steps, 1)}"
