"""The plan of a training: what a recipe takes and needs, found without starting anything.

The memory of a machine: what a recipe takes of it, and whether it fits.

A plan as tables for people.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rolltap.trainer.training.dry_run import findings as found
from rolltap.trainer.training.dry_run.findings import Finding, Machine
from rolltap.trainer.training.dry_run.memory import (
    GIB,
    SLACK,
    Disk,
    EngineShare,
    Fixed,
    Rows,
    Variable,
    checkpoints_at_once,
    disk,
    divide,
    fixed,
    own_gpu,
    session_bytes,
    variable,
)
from rolltap.trainer.training.dry_run.model import ModelNumbers
from rolltap.trainer.training.recipe import Recipe

if TYPE_CHECKING:
    pass
    pass
import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from rolltap.addons.errors import RolltapError
from rolltap.trainer.models.loading import kernels
from rolltap.trainer.training.dry_run.findings import machine_of
from rolltap.trainer.training.dry_run.launch import lines
from rolltap.trainer.training.dry_run.memory import checkpoints_written, rows
from rolltap.trainer.training.dry_run.model import model_numbers


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a training process and of an engine."""

    always: Fixed
    traces: Variable
    planned_traces: int | None
    """Room for the traces; None when the GPU's memory is not known."""
    suggested_memory_gib: float | None
    """Value of `grpo.memory_gib` on a shared GPU that the recipe does not give."""
    engine: EngineShare | None
    """None when the GPU's memory is not known, and for recorded runs."""
    disk: Disk


def memory_of(recipe: Recipe, machine: Machine, numbers: ModelNumbers, traces: Rows) -> Memory:
    """Return what a training process and an engine take, and how much room there is for the traces."""
    always = fixed(recipe, numbers, machine.processes, cuda=machine.gpu is not None)
    given = recipe.grpo.get("memory_gib")
    suggested, engine = None, None
    if machine.gpu is None:
        room = int(given * GIB) if given else None
        chosen = variable(recipe, numbers, traces, room)
    elif machine.shared_gpu:
        at_once = -(-recipe.concurrency // len(machine.engines))
        divided = divide(recipe, numbers, always, traces, machine.gpu, at_once)
        engine, chosen, room = divided.engine, divided.trainer, divided.memory
        suggested = None if given else room // (GIB // 10) / 10
    else:
        engine = own_gpu(recipe, numbers, machine.gpu, traces.longest) if machine.engines else None
        room = int(given * GIB) if given else max(0, int(SLACK * machine.gpu) - always.total)
        chosen = variable(recipe, numbers, traces, room)
    return Memory(always, chosen, room, suggested, engine, disk(recipe, numbers, online=bool(machine.engines)))


def too_little(
    recipe: Recipe, machine: Machine, numbers: ModelNumbers, traces: Rows, memory: Memory
) -> Iterator[Finding]:
    """Yield a finding for each way in which the memory is too small."""
    if machine.gpu is None:
        yield Finding("note", "the memory of a GPU is not known: nothing is said about what fits", "machine.gpu_gib")
        return
    gpu, always, engine = machine.gpu, memory.always, memory.engine
    if always.total > SLACK * gpu:
        yield found.error(
            f"weights, gradients and optimizer take {_gib(always.total)} of a GPU's {_gib(gpu)}",
            "more machine.processes, which share the optimizer's state, or a larger GPU"
            if recipe.lora
            else "a [lora] table, or more machine.processes, which share the optimizer's state",
        )
        return
    room = memory.planned_traces or 0
    smaller = "a smaller max_tokens" + ("" if recipe.grpo.get("offload_states") else ", or offload_states = true")
    if memory.traces.total > room:
        yield found.error(
            f"a trace of {traces.longest:,} tokens takes {_gib(memory.traces.total)}, of which {_gib(room)} are there",
            smaller + (", or a machine with a GPU for each" if machine.shared_gpu else ""),
        )
    elif always.total + room + (engine.total if engine and machine.shared_gpu else 0) > gpu:
        yield found.error(
            f"grpo.memory_gib = {recipe.grpo['memory_gib']} is more than the GPU has besides {_gib(always.total)}",
            "a smaller grpo.memory_gib, or none",
        )
    if engine is None:
        return
    if engine.sessions < 1:
        yield found.error(
            f"the engine's cache of {_gib(engine.cache)} does not hold a session of {traces.longest:,} tokens "
            f"({_gib(session_bytes(numbers, traces.longest))})",
            "a smaller max_tokens" + (", or another GPU for the engine" if machine.shared_gpu else ""),
        )
    elif engine.sessions * len(machine.engines) < recipe.concurrency:
        yield found.warning(
            f"{recipe.concurrency} sessions run at once, but the engines hold {engine.sessions * len(machine.engines)} "
            "of the longest: vLLM would compute some of them again",
            "a smaller concurrency, unless most sessions are much shorter",
        )
    folder = recipe.publish_folder
    if folder and folder.is_relative_to("/dev/shm") and Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        if free < memory.disk.published:
            yield Finding(
                "note",
                f"{folder} needs {_gib(memory.disk.published)} of memory, and {_gib(free)} are free here",
                "a larger /dev/shm (docker run --shm-size)",
            )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


WIDTH = 74
"""Characters of a line of a command, without its end: a terminal has 80."""

_WORD = re.compile(r"(?:'[^']*'|\S)+")
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def render(plan: TrainingPlan) -> Iterator[RenderableType]:
    """Yield the parts of a plan: its findings last, where they are read."""
    if plan.model is not None and plan.work is not None and plan.memory is not None:
        yield _summary(plan)
        yield Text("\nA training process", style="bold")
        yield Padding(_trainer(plan, plan.memory), (0, 0, 0, 2), expand=False)
        if plan.memory.engine is not None:
            yield Text("\nAn engine", style="bold")
            yield Padding(_engine(plan.memory), (0, 0, 0, 2), expand=False)
        yield Text("\nFiles", style="bold")
        yield Padding(_files(plan), (0, 0, 0, 2), expand=False)
        yield Text("\nTo start", style="bold")
        # as text of its own, not in a frame, which would be cut at the edge of a narrow terminal
        yield Text("\n".join(map(_broken, plan.lines)))
    yield Text()
    for finding in plan.findings:
        yield Text.assemble((f"{finding.level}: ", _STYLES[finding.level]), f"{finding.text}. Fix: {finding.fix}.")
    if plan.can_start:
        yield Text("This can start.", style="bold green")
    else:
        yield Text("This cannot start.", style="bold red")


def _summary(plan: TrainingPlan) -> Table:
    model, work, machine = plan.model, plan.work, plan.machine
    assert model is not None
    assert work is not None
    table = _table()
    trained = f"LoRA of {model.trained / 1e6:,.1f} M" if plan.recipe.lora else "all weights"
    default = "" if plan.recipe.dtype else f", the default {'with a GPU' if machine.gpu else 'without a GPU'}"
    table.add_row(
        "model", f"{model.architecture}, {model.parameters / 1e9:.2f} B parameters in {machine.dtype}{default}"
    )
    published = f", published as {plan.recipe.publish}" if machine.engines else ", on recorded runs"
    table.add_row("trains", f"{trained}{published}")
    shared = ", one GPU for both" if machine.shared_gpu else ""
    memory = f", GPUs of {machine.gpu / GIB:.0f} GiB" if machine.gpu else ""
    processes = _number(machine.processes, "training process", "training processes")
    engines = f", {_number(len(machine.engines), 'engine', 'engines')}" if machine.engines else ""
    table.add_row("machine", f"{processes}{engines}{shared}{memory}")
    table.add_row(
        "work",
        f"{work.steps:,} steps of {work.sessions_per_step:,} sessions = {work.sessions:,} sessions, "
        f"{work.optimizer_steps:,} optimizer steps, {work.checkpoints:,} checkpoints",
    )
    rows = work.traces_per_pass
    table.add_row("traces", f"{rows.count:,} of {rows.longest:,} tokens in a forward pass, one a session;")
    table.add_row("", "sub-agents, and calls that do not continue the one before, add more")
    names = [f"{name} {'yes' if there else 'no'}" for name, there in plan.kernels.items()]
    if names:
        table.add_row("kernels here", ", ".join(names))
    return table


def _trainer(plan: TrainingPlan, memory: Memory) -> Table:
    always, traces = memory.always, memory.traces
    table = _table(sizes=True)
    for name, size, about in [
        ("weights", always.weights, ""),
        ("gradients", always.gradients, "float32"),
        (
            "optimizer",
            always.optimizer,
            "float32" + (", the largest share" if plan.machine.processes > 1 and not plan.recipe.lora else ""),
        ),
        ("reference model", always.reference, "grpo.beta"),
        ("CUDA", always.cuda, "assumed"),
        ("states", traces.states, _kept(memory)),
        ("activations", traces.activations, f"a batch of {traces.tokens_per_segment:,} tokens"),
        ("working room", traces.working, "a quarter of it"),
        ("logits", traces.logits, "a chunk"),
    ]:
        if size:
            table.add_row(name, _gib_exact(size), about)
    table.add_section()
    table.add_row("together", _gib_exact(always.total + traces.total), "")
    if memory.planned_traces is not None:
        table.add_row("room for traces", _gib_exact(memory.planned_traces), "states, activations and logits")
    if memory.suggested_memory_gib:
        table.add_row("", "", f"grpo.memory_gib = {memory.suggested_memory_gib}")
    return table


def _kept(memory: Memory) -> str:
    tokens = memory.traces.tokens_in_memory
    return "of all traces of a pass" if tokens is None else f"of {tokens:,} tokens at once, the rest computed again"


def _engine(memory: Memory) -> Table:
    engine = memory.engine
    assert engine is not None
    table = _table(sizes=True)
    table.add_row("weights", _gib_exact(engine.weights), "")
    if engine.adapters:
        table.add_row("adapters", _gib_exact(engine.adapters), "")
    table.add_row("working memory", _gib_exact(engine.working), "assumed")
    sessions = _number(engine.sessions, "session", "sessions")
    table.add_row(
        "cache", _gib_exact(engine.cache), f"{engine.cached_tokens:,} tokens, {sessions} of the longest at once"
    )
    table.add_section()
    table.add_row("together", _gib_exact(engine.total), f"--gpu-memory-utilization {engine.utilization:.2f}")
    return table


def _files(plan: TrainingPlan) -> Table:
    assert plan.memory is not None
    disk = plan.memory.disk
    table = _table(sizes=True)
    if disk.published:
        table.add_row("published", _gib_exact(disk.published), str(plan.recipe.publish_folder or "in the run folder"))
    kept = _number(checkpoints_at_once(plan.recipe), "checkpoint", "checkpoints")
    table.add_row("checkpoints", _gib_exact(disk.checkpoints), f"{kept} in the run folder, while one is written")
    table.add_row("finished", _gib_exact(disk.finished), "the model in the run folder")
    return table


def _broken(command: str) -> str:
    """Return a command of a shell as indented lines of at most `WIDTH` characters, where its words allow it.

    A comment stays one line.
    """
    if command.startswith("#"):
        return f"  {command}"
    lines = [" "]
    for word in _WORD.findall(command):
        if lines[-1].strip() and len(lines[-1]) + len(word) > WIDTH:
            lines.append("     ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def _table(*, sizes: bool = False) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right" if sizes else "left")
    return table


def _gib_exact(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _number(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


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
    sessions = recipe.groups_per_step * recipe.sessions
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
