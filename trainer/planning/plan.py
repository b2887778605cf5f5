"""The plan of a training: what a recipe takes and needs, found without starting anything."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from rolltap.addons.errors import RolltapError
from rolltap.trainer.models.kernels import kernels
from rolltap.trainer.planning import findings as found
from rolltap.trainer.planning.findings import Finding
from rolltap.trainer.planning.launch import lines
from rolltap.trainer.planning.machine import Machine, machine_of
from rolltap.trainer.planning.memory import Rows, rows
from rolltap.trainer.planning.numbers import ModelNumbers, model_numbers
from rolltap.trainer.planning.publishing import checkpoints_written
from rolltap.trainer.planning.room import Memory, memory_of, too_little
from rolltap.trainer.planning.view import render
from rolltap.trainer.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Work:
    """Numbers of a whole training."""

    steps: int
    sessions_per_step: int
    """Without those that replace groups of equal rewards."""
    sessions: int
    optimizer_steps: int
    checkpoints: int
    """Written in all; the newest are kept."""
    traces_per_pass: Rows
    """Longest forward pass of a training process, if sessions are single traces."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Plan of a training: its memory, its work, its lines and findings."""

    recipe: Recipe
    machine: Machine
    findings: list[Finding]
    model: ModelNumbers | None
    """None when the model could not be built: a finding says why."""
    work: Work | None
    memory: Memory | None
    kernels: dict[str, bool]
    """Packages of fast kernels that the model can use -> there is one here."""
    lines: list[str]

    @property
    def can_start(self) -> bool:
        """True if no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values. Sizes are bytes."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {name: _plain(value) for name, value in own.items() if name != "recipe"}
        return {"can_start": self.can_start, "recipe": self.recipe.model_dump(mode="json"), **plain}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the plan as tables."""
        yield from render(self)


def plan(
    recipe: Recipe,
    *,
    engine: str | None = None,
    processes: int | None = None,
    file: Path | None = None,
    runs: Sequence[Path] = (),
    out: Path | None = None,
) -> TrainingPlan:
    """Plan a training, and start nothing. The model needs no weights.

    `engine` is the value of `--engine`, and `processes` the number of training processes: by default what the recipe's
    table [machine] says. `file` is the recipe's path, and `out` the run folder, for the lines. With recorded `runs` no
    engine and no rollouts are planned; their groups are taken to be as large as the recipe's. What the training would
    refuse is a finding.
    """
    machine = machine_of(recipe, engine, processes, online=not runs)
    typed = recipe.model_copy(update={"dtype": machine.dtype})  # this machine's GPU does not decide
    findings = list(found.of_recipe(typed, machine))
    try:
        numbers = model_numbers(recipe, machine.dtype)
    except RolltapError as error:
        if (refused := found.refused(error)) not in findings:
            findings.append(refused)
        return TrainingPlan(recipe, machine, _ordered(findings), None, None, None, {}, [])
    findings += found.of_model(recipe, machine, numbers)
    traces = rows(recipe, numbers, machine.processes)
    memory = memory_of(recipe, machine, numbers, traces)
    findings += too_little(recipe, machine, numbers, traces, memory)
    return TrainingPlan(
        recipe,
        machine,
        _ordered(findings),
        numbers,
        _work(recipe, traces),
        memory,
        kernels(numbers.model_type),
        lines(recipe, machine, numbers, memory.engine, file=file, runs=runs, out=out),
    )


def _work(recipe: Recipe, traces: Rows) -> Work:
    sessions = recipe.groups_per_step * recipe.sessions_per_group
    return Work(
        steps=recipe.steps,
        sessions_per_step=sessions,
        sessions=sessions * recipe.steps,
        optimizer_steps=recipe.steps * int(recipe.grpo.get("num_iterations", 1)),
        checkpoints=checkpoints_written(recipe),
        traces_per_pass=traces,
    )


def _ordered(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: ["error", "warning", "note"].index(finding.level))


def _plain(value: Any) -> Any:
    """Return a value of dataclasses as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
        fields |= {name: getattr(value, name) for name in ("total", "trained") if name in dir(value)}
        return fields
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if value == float("inf") else value
