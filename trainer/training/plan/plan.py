"""The plan of a training: what a recipe takes and needs, found without starting anything, and printed."""

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rolltap.addons.errors import RolltapError
from rolltap.addons.options import is_loopback
from rolltap.trainer.models.loading import LINEAR_ATTENTION
from rolltap.trainer.training.arguments import LORA_RANKS
from rolltap.trainer.training.plan import findings as found
from rolltap.trainer.training.plan.engine import CALLS_PER_SESSION, LEAST_SEQUENCES, sequences_of
from rolltap.trainer.training.plan.findings import Finding
from rolltap.trainer.training.plan.memory import (
    GIB,
    UTILIZATION,
    EngineShare,
    Machine,
    Memory,
    Micro,
    checkpoints_of,
    gib,
    machine_of,
    memory_of,
    micro_batch,
    shards,
)
from rolltap.trainer.training.plan.model import ModelNumbers, fake_step, model_numbers
from rolltap.trainer.training.recipe import Recipe

KEY = "export ROLLTAP_ENGINE_KEY_FILE=$PWD/engine.key"  # in every terminal; the file is made if it does not exist
NODE = "HEAD=$(hostname) NODE=0  # and on the others: the name of this node, and their own numbers, 1 and so on"
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Plan of a training: its memory, its work, the lines of a shell that start it, and findings."""

    recipe: Recipe
    machine: Machine
    findings: list[Finding]
    model: ModelNumbers | None = None
    """None, with all that follows, when a start would be refused, or there is no such model: a finding says why."""
    work: dict[str, int] = dataclasses.field(default_factory=dict)
    """Numbers of the whole training. Sessions are without those that replace groups of equal rewards."""
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
        return {"can_start": self.can_start, **own, "recipe": self.recipe.model_dump(mode="json")}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the plan: its findings last, where they are read. A command is one line, which can be copied."""
        if self.model is not None and self.micro_batch is not None and self.memory is not None:
            for name, text in _summary(self, self.model, self.micro_batch):
                yield Text.assemble((f"{name:9}", "dim"), text)
            for title, sizes, notes in _sizes(self, self.model, self.memory):
                yield Text(f"\n{title}", style="bold")
                for name, size in sizes.items():
                    if size:
                        line = f"{gib(size, 2):>10}  {notes.get(name, '')}".rstrip()
                        yield Text.assemble((f"  {name:17}", "dim"), line)
            yield Text("\nTo start", style="bold")
            yield Text("\n".join(self.lines))
        yield Text()
        for finding in sorted(self.findings, key=lambda finding: list(_STYLES).index(finding.level)):
            yield Text.assemble(
                (f"{finding.level}: ", _STYLES[finding.level]),
                f"{finding.text}. Fix: {finding.fix}.",
            )
        yield (Text("This can start.", "bold green") if self.can_start else Text("This cannot start.", "bold red"))


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

    `engine` is the value of `--engine`, and `processes` the number of training processes: by default what the recipe's
    table [machine] says. `file` is the recipe's path, and `out` the run folder, for the lines. Groups of recorded
    `runs` are taken to be as large as the recipe's. What the training would refuse is a finding, without numbers.
    """
    machine = machine_of(recipe, engine, processes, online=not runs)
    typed = recipe.model_copy(update={"dtype": machine.dtype})  # this machine's GPU does not decide
    findings = [*found.of_recipe(recipe, machine)]
    try:
        found.check_start(typed, machine)
        numbers = model_numbers(recipe, machine.dtype, gpu=machine.gpu is not None)
    except RolltapError as error:
        what, _, fix = str(error).rpartition(": ")  # the remedy comes last
        refused = Finding("error", what or fix, fix if what else "correct the recipe")
        return TrainingPlan(recipe, machine, [refused, *findings])
    micro = micro_batch(recipe, numbers, machine.processes)
    offload = bool(recipe.grpo.get("offload_checkpoints"))
    traced = fake_step(recipe, numbers, machine.dtype, sharded=shards(recipe, machine.processes))
    memory = memory_of(recipe, machine, numbers, micro, traced.memory(offload=offload))
    offloaded = None
    if not offload and memory.room is not None and memory.row.total > memory.room:
        offloaded = memory_of(recipe, machine, numbers, micro, traced.memory(offload=True))
    findings += found.of_model(recipe, machine, numbers)
    findings += found.of_memory(recipe, machine, micro, memory, offloaded)
    findings += found.of_engine(recipe, machine, numbers, micro, memory)
    train = [*_training(machine, file, runs, out or Path("runs", file.stem))]
    sessions = recipe.groups_per_step * recipe.sessions
    return TrainingPlan(
        recipe,
        machine,
        findings,
        model=numbers,
        work={
            "steps": recipe.steps,
            "sessions_per_step": sessions,
            "sessions": sessions * recipe.steps,
            "optimizer_steps": recipe.steps * recipe.iterations,
            **checkpoints_of(recipe, numbers),
        },
        micro_batch=micro,
        memory=memory,
        lines=train if runs else [KEY, *_serving(recipe, machine, memory.engine), *train],
    )


def _serving(recipe: Recipe, machine: Machine, engine: EngineShare | None) -> Iterator[str]:
    """Yield the lines that start the engines. One that begins with `#` names the machine of the next, if another."""
    arguments = _engine_arguments(recipe, machine, engine)
    host = ""
    for host, urls in groupby(sorted(map(urlsplit, machine.engines), key=_host), _host):
        if host:
            yield f"# on {host}, with a copy of engine.key:"
        for gpu, url in enumerate(urls):
            port = url.port or {"http": 80}.get(url.scheme)
            where = (["--host", host] if host else []) + (["--port", str(port)] if port else [])
            yield _on_gpus(machine, gpu, 1) + shlex.join(["rolltap", "serve", str(recipe.model), *where, *arguments])
    if host:
        yield "# here:"


def _engine_arguments(recipe: Recipe, machine: Machine, engine: EngineShare | None) -> list[str]:
    own = ["--max-model-len", str(recipe.max_tokens)] if recipe.max_tokens else []
    if recipe.publish == "lora":
        rank = max([recipe.lora.get("r", 8), *(recipe.lora.get("rank_pattern") or {}).values()])
        own += ["--lora-rank", str(next((size for size in LORA_RANKS if size >= rank), rank))]
        own += ["--ahead", str(recipe.ahead)] if recipe.ahead else []
    own += ["--routing"] if recipe.replays_routing else []
    extra = ["--max-num-seqs", str(sequences_of(recipe, len(machine.engines)))]
    extra += ["--dtype", machine.dtype] if recipe.dtype or machine.gpu is not None else []
    if engine is not None and engine.utilization != UTILIZATION:
        extra += ["--gpu-memory-utilization", f"{engine.utilization:.2f}"]
    return [*own, "--", *extra]


def _training(machine: Machine, file: Path, runs: Sequence[Path], out: Path) -> Iterator[str]:
    """Yield the line that starts the training, on each node. Engines of this machine have the first GPUs."""
    each, where = machine.processes // machine.nodes, "--standalone"
    command = [
        "rolltap",
        "train",
        str(file),
        *(word for run in runs for word in ("--from", str(run))),
    ]
    if machine.engines:
        command += ["--engine", ",".join(machine.engines)]
    first = 0 if machine.shared_gpu else sum(not _host(urlsplit(url)) for url in machine.engines)
    if machine.nodes > 1:
        where = f"--nnodes {machine.nodes} --node-rank $NODE --master-addr $HEAD"
        yield NODE
    launched = f"torchrun {where} --nproc-per-node {each} -m " if machine.processes > 1 else ""
    yield _on_gpus(machine, first, each) + launched + shlex.join([*command, "--out", str(out)])


def _host(url: SplitResult) -> str:
    """Return the host of a URL; empty for loopback, which is this machine."""
    host = url.hostname or ""
    return "" if is_loopback(host) else host


def _on_gpus(machine: Machine, first: int, number: int) -> str:
    gpus = ",".join(map(str, range(first, first + number)))
    return "" if machine.gpu is None else f"CUDA_VISIBLE_DEVICES={gpus} "


def _summary(plan: TrainingPlan, model: ModelNumbers, micro: Micro) -> Iterator[tuple[str, str]]:
    recipe, machine, work = plan.recipe, plan.machine, plan.work
    default = ""
    if not recipe.dtype:
        default = f", the default {'with a GPU' if machine.gpu else 'without a GPU'}"
    yield (
        "model",
        f"{model.architecture}, {model.parameters / 1e9:.2f} B parameters in {machine.dtype}{default}",
    )
    trained = "all weights, in float32"
    if recipe.lora:
        trained = f"LoRA of {model.trained / 1e6:,.1f} M"
    published = ", on recorded runs"
    if machine.engines:
        published = f", published as {recipe.publish}"
        if recipe.ahead and recipe.publish == "lora":
            published += f", {recipe.adapters} adapters loaded"
    yield "trains", trained + published
    where = f"training processes: {machine.processes}"
    if machine.nodes > 1:
        where += f" on {machine.nodes} nodes"
    if machine.engines:
        where += f", engines: {len(machine.engines)}"
    if machine.shared_gpu:
        where += ", one GPU for both"
    if machine.gpu:
        where += f", GPUs of {machine.gpu / GIB:.0f} GiB"
    yield "machine", where
    yield "kernels", _kernels(plan, model)
    if machine.engines:
        number = sequences_of(recipe, len(machine.engines))
        why = f"{CALLS_PER_SESSION} for each session, as sub-agents and side questions call too"
        yield "calls", f"{number} at once in an engine: {why}; at least {LEAST_SEQUENCES}"
    sessions = f"{work['steps']:,} steps of {work['sessions_per_step']:,} sessions = {work['sessions']:,} sessions"
    yield "work", f"{sessions}, optimizer steps: {work['optimizer_steps']:,}"
    size = gib(work["checkpoint_bytes"], 2)
    yield (
        "disk",
        f"checkpoints: {work['checkpoints']:,} of {size} each, {work['checkpoints_at_once']} at once",
    )
    row = f"{micro.tokens:,} tokens in a micro-batch: {micro.sessions:,} x {micro.longest:,}"
    yield "row", f"{row}, if each session is one trace and none shares a prefix"


def _kernels(plan: TrainingPlan, model: ModelNumbers) -> str:
    """Return which kernels the memory is counted with."""
    attention = "torch's FlashAttention"
    if plan.machine.gpu is not None and plan.recipe.grpo.get("forward") != "padded":
        attention = "FlexAttention"
    if not model.linear_layers:
        return attention
    package = LINEAR_ATTENTION if model.fla else "torch"
    return f"{attention}; {package} computes linear attention"


def _sizes(
    plan: TrainingPlan, model: ModelNumbers, memory: Memory
) -> Iterator[tuple[str, dict[str, int], dict[str, str]]]:
    """Yield titles, bytes by names, and notes on the names."""
    recipe, engine = plan.recipe, memory.engine
    share = ""
    if shards(recipe, plan.machine.processes):
        share = f"a share of 1 / {plan.machine.processes}"
    room = ""
    if memory.longest_row is not None:
        room = f"for a row of at most {memory.longest_row:,} tokens"
    offloaded = ""
    if memory.on_host:
        offloaded = f"{gib(memory.on_host)} more in the host's memory"
    sizes = memory.always | memory.row
    sizes |= {"together": memory.always.total + memory.row.total, "room": memory.room or 0}
    notes = {
        "weights": share,
        "gradients": f"float32{share and ', ' + share}",
        "optimizer": f"float32{share and ', ' + share}",
        "reference model": "grpo.beta",
        "buckets": "in which processes average gradients",
        "gathered layers": "two, what is outside of layers, and gradients",
        "CUDA": "assumed",
        "checkpoints": offloaded or "what layers are computed again from",
        "a layer": "computed again, with its gradients",
        "room": room,
    }
    yield "A training process", sizes, notes
    if engine is not None:
        notes = {
            "logits": f"and counts of penalties, of {engine.sequences} calls",
            "working memory": "assumed",
            "cache": f"{engine.sessions} of the longest sessions at once",
            "together": f"--gpu-memory-utilization {engine.utilization:.2f}",
        }
        yield "An engine", engine.sizes | {"together": engine.sizes.total}, notes
