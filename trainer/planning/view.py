"""A plan as tables for people."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rolltap.trainer.planning.memory import GIB
from rolltap.trainer.planning.publishing import checkpoints_at_once

if TYPE_CHECKING:
    from rolltap.trainer.planning.plan import TrainingPlan
    from rolltap.trainer.planning.room import Memory

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
            table.add_row(name, _gib(size), about)
    table.add_section()
    table.add_row("together", _gib(always.total + traces.total), "")
    if memory.planned_traces is not None:
        table.add_row("room for traces", _gib(memory.planned_traces), "states, activations and logits")
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
    table.add_row("weights", _gib(engine.weights), "")
    if engine.adapters:
        table.add_row("adapters", _gib(engine.adapters), "")
    table.add_row("working memory", _gib(engine.working), "assumed")
    sessions = _number(engine.sessions, "session", "sessions")
    table.add_row("cache", _gib(engine.cache), f"{engine.cached_tokens:,} tokens, {sessions} of the longest at once")
    table.add_section()
    table.add_row("together", _gib(engine.total), f"--gpu-memory-utilization {engine.utilization:.2f}")
    return table


def _files(plan: TrainingPlan) -> Table:
    assert plan.memory is not None
    disk = plan.memory.disk
    table = _table(sizes=True)
    if disk.published:
        table.add_row("published", _gib(disk.published), str(plan.recipe.publish_folder or "in the run folder"))
    kept = _number(checkpoints_at_once(plan.recipe), "checkpoint", "checkpoints")
    table.add_row("checkpoints", _gib(disk.checkpoints), f"{kept} in the run folder, while one is written")
    table.add_row("finished", _gib(disk.finished), "the model in the run folder")
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


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _number(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"
