"""The plan of a training: what a recipe takes and needs, found without starting anything, and
printed."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rolltap.addons.errors import RolltapError
from rolltap.trainer.models.loading import LINEAR_ATTENTION
from rolltap.trainer.training.plan import commands
from rolltap.trainer.training.plan import findings as found
from rolltap.trainer.training.plan.engine import CALLS_PER_SESSION, LEAST_SEQUENCES, sequences_of
from rolltap.trainer.training.plan.findings import Finding
from rolltap.trainer.training.plan.memory import (
    GIB,
    Machine,
    Memory,
    Micro,
    Sizes,
    checkpoints_of,
    gib,
    machine_of,
    memory_of,
    micro_batch,
    shards,
)
from rolltap.trainer.training.plan.model import ModelNumbers, fake_step, model_numbers
from rolltap.trainer.training.recipe import Recipe

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Plan of a training: its memory, its work, the lines of a shell that start it, and
    findings."""

    recipe: Recipe
    machine: Machine
    findings: list[Finding]
    model: ModelNumbers | None = None
    """None, with all that follows, when a start would be refused, or there is no such model: a
    finding says why."""
    work: dict[str, int] = dataclasses.field(default_factory=dict)
    """Numbers of the whole training. Sessions are without those that replace groups of equal
    rewards."""
    micro_batch: Micro | None = None
    """Largest micro-batch of a training process: one row."""
    memory: Memory | None = None
    lines: list[str] = dataclasses.field(default_factory=list)

    @property
    def can_start(self) -> bool:
        """True if no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values. Sizes are bytes."""
        own = dataclasses.asdict(self)
        own["recipe"] = self.recipe.model_dump(mode="json")
        return {"can_start": self.can_start, **own}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the plan: its findings last, where they are read. A command is one line, which can
        be copied."""
        if self.model is not None and self.micro_batch is not None and self.memory is not None:
            yield from _summary(self, self.model, self.micro_batch)
            yield from _training_process(self, self.memory)
            yield from _engine(self.memory)
            yield Text("\nTo start", style="bold")
            yield Text("\n".join(self.lines))
        yield Text()
        for level, style in _STYLES.items():
            for finding in self.findings:
                if finding.level == level:
                    text = f"{finding.text}. Fix: {finding.fix}."
                    yield Text.assemble((f"{level}: ", style), text)
        if self.can_start:
            yield Text("This can start.", "bold green")
        else:
            yield Text("This cannot start.", "bold red")


def plan(
    recipe: Recipe,
    *,
    engine: str | None = None,
    processes: int | None = None,
    file: Path = Path("recipe.toml"),
    runs: Sequence[Path] = (),
    out: Path | None = None,
) -> TrainingPlan:
    """Plan a training, and start nothing. The model needs no weights.

    `engine` is the value of `--engine`, and `processes` the number of training processes: by
    default what the recipe's table [machine] says. `file` is the recipe's path, and `out` the run
    folder, for the lines. Groups of recorded `runs` are taken to be as large as the recipe's. What
    the training would refuse is a finding, without numbers.
    """
    machine = machine_of(recipe, engine, processes, online=not runs)
    typed = recipe.model_copy(update={"dtype": machine.dtype})  # this machine's GPU does not decide
    findings = [*found.of_recipe(recipe, machine)]
    try:
        found.check_start(typed, machine)
        numbers = model_numbers(recipe, machine.dtype, gpu=machine.gpu is not None)
    except RolltapError as error:
        what, _, fix = str(error).rpartition(": ")  # the remedy comes last
        refused = Finding("error", what, fix)
        if not what:
            refused = Finding("error", fix, "correct the recipe")
        return TrainingPlan(recipe, machine, [refused, *findings])
    micro = micro_batch(recipe, numbers, machine.processes)
    sharded = shards(recipe, machine.processes)
    step = fake_step(recipe, numbers, machine.dtype, sharded=sharded).memory()
    memory = memory_of(recipe, machine, numbers, micro, step)
    findings += found.of_model(recipe, machine, numbers)
    findings += found.of_memory(recipe, machine, micro, memory, step)
    findings += found.of_engine(recipe, machine, numbers, micro, memory)
    lines: list[str] = []
    if not runs:
        lines += commands.serving(recipe, machine, memory.engine)
    lines += commands.training(machine, file, runs, out or Path("runs", file.stem))
    sessions = recipe.groups_per_step * recipe.sessions
    work = {
        "steps": recipe.steps,
        "sessions_per_step": sessions,
        "sessions": sessions * recipe.steps,
        "optimizer_steps": recipe.steps * recipe.iterations,
        **checkpoints_of(recipe, numbers),
    }
    return TrainingPlan(recipe, machine, findings, numbers, work, micro, memory, lines)


def _summary(plan: TrainingPlan, model: ModelNumbers, micro: Micro) -> Iterator[Text]:
    recipe = plan.recipe
    machine = plan.machine
    work = plan.work
    lines = {}
    size = f"{model.parameters / 1e9:.2f} B parameters in {machine.dtype}"
    lines["model"] = f"{model.architecture}, {size}"
    if not recipe.dtype:
        with_gpu = "with a GPU" if machine.gpu else "without a GPU"
        lines["model"] += f", the default {with_gpu}"
    lines["trains"] = "all weights, in float32"
    if recipe.lora:
        lines["trains"] = f"LoRA of {model.trained / 1e6:,.1f} M"
    if machine.engines:
        lines["trains"] += f", published as {recipe.publish}"
        if recipe.max_staleness and recipe.publish == "lora":
            lines["trains"] += f", {recipe.adapters} adapters loaded"
    else:
        lines["trains"] += ", on recorded runs"
    lines["machine"] = f"training processes: {machine.processes}"
    if machine.nodes > 1:
        lines["machine"] += f" on {machine.nodes} nodes"
    if machine.engines:
        lines["machine"] += f", engines: {len(machine.engines)}"
    if machine.shared_gpu:
        lines["machine"] += ", one GPU for both"
    if machine.gpu:
        lines["machine"] += f", GPUs of {machine.gpu / GIB:.0f} GiB"
    lines["kernels"] = _kernels(plan, model)
    if machine.engines:
        number = sequences_of(recipe, len(machine.engines))
        why = "for each session, as sub-agents and side questions call too"
        lines["calls"] = f"{number} at once in an engine: {CALLS_PER_SESSION} {why}"
        lines["calls"] += f"; at least {LEAST_SEQUENCES}"
    lines["work"] = (
        f"{work['steps']:,} steps of {work['sessions_per_step']:,} sessions = "
        f"{work['sessions']:,} sessions, optimizer steps: {work['optimizer_steps']:,}"
    )
    lines["disk"] = (
        f"checkpoints: {work['checkpoints']:,} of {gib(work['checkpoint_bytes'], 2)} each, "
        f"{work['checkpoints_at_once']} at once"
    )
    lines["row"] = (
        f"{micro.tokens:,} tokens in a micro-batch: {micro.sessions:,} x {micro.longest:,}, "
        "if each session is one trace and none shares a prefix"
    )
    for name, text in lines.items():
        yield Text.assemble((f"{name:9}", "dim"), text)


def _kernels(plan: TrainingPlan, model: ModelNumbers) -> str:
    """Return which kernels the memory is counted with."""
    attention = "torch's FlashAttention"
    if plan.machine.gpu is not None and plan.recipe.grpo.get("forward") != "padded":
        attention = "FlexAttention"
    if not model.linear_layers:
        return attention
    package = LINEAR_ATTENTION if model.fla else "torch"
    return f"{attention}; {package} computes linear attention"


def _training_process(plan: TrainingPlan, memory: Memory) -> Iterator[Text]:
    sizes = Sizes(memory.always | memory.row)
    sizes["together"] = sizes.total
    notes = {
        "gradients": "float32",
        "optimizer": "float32",
        "reference model": "grpo.beta",
        "buckets": "in which processes average gradients",
        "gathered layers": "two, what is outside of layers, and gradients",
        "CUDA": "assumed",
        "checkpoints": "what layers are computed again from",
        "a layer": "computed again, with its gradients",
    }
    if shards(plan.recipe, plan.machine.processes):
        share = f"a share of 1 / {plan.machine.processes}"
        notes["weights"] = share
        notes["gradients"] += f", {share}"
        notes["optimizer"] += f", {share}"
    if memory.on_host:
        notes["checkpoints"] = f"{gib(memory.on_host)} more in the host's memory"
    if memory.room is not None:
        sizes["room"] = memory.room
        notes["room"] = f"for a row of at most {memory.longest_row:,} tokens"
    yield from _table("A training process", sizes, notes)


def _engine(memory: Memory) -> Iterator[Text]:
    engine = memory.engine
    if engine is None:
        return
    notes = {
        "logits": f"and counts of penalties, of {engine.sequences} calls",
        "working memory": "assumed",
        "cache": f"{engine.sessions} of the longest sessions at once",
        "together": f"--gpu-memory-utilization {engine.utilization:.2f}",
    }
    sizes = Sizes(engine.sizes)
    sizes["together"] = sizes.total
    yield from _table("An engine", sizes, notes)


def _table(title: str, sizes: Sizes, notes: dict[str, str]) -> Iterator[Text]:
    yield Text(f"\n{title}", style="bold")
    for name, size in sizes.items():
        if size:
            line = f"{gib(size, 2):>10}  {notes.get(name, '')}".rstrip()
            yield Text.assemble((f"  {name:17}", "dim"), line)
