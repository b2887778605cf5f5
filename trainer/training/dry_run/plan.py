"""The plan of a training: what a recipe takes and needs, found without starting anything, and printed as tables."""

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rolltap.addons.errors import RolltapError
from rolltap.trainer.training.dry_run import findings as found
from rolltap.trainer.training.dry_run.findings import Finding
from rolltap.trainer.training.dry_run.memory import (
    GIB,
    UTILIZATION,
    EngineShare,
    Machine,
    Memory,
    Rows,
    checkpoints_of,
    gib,
    machine_of,
    memory_of,
    rows,
)
from rolltap.trainer.training.dry_run.model import ModelNumbers, model_numbers
from rolltap.trainer.training.recipe import Recipe

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for `--max-lora-rank`. vLLM 0.32."""
KEY = "export ROLLTAP_ENGINE_KEY_FILE=$PWD/engine.key"
"""Line of every terminal: the file is made if it does not exist."""
WIDTH = 74
"""Characters of a line of a command, without its end: a terminal has 80."""

_WORK = (
    "{steps:,} steps of {sessions_per_step:,} sessions = {sessions:,} sessions, {optimizer_steps:,} optimizer steps, "
    "{checkpoints:,} checkpoints"
)
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
    traces_per_pass: Rows | None = None
    """Longest forward pass of a training process, if sessions are single traces."""
    memory: Memory | None = None
    lines: list[str] = dataclasses.field(default_factory=list)

    @property
    def can_start(self) -> bool:
        """True if no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values. Sizes are bytes."""
        own = dataclasses.asdict(self)
        if self.model is not None:
            own["model"]["trained"] = sum(own["model"].pop("sizes"))
        return {"can_start": self.can_start, **own, "recipe": self.recipe.model_dump(mode="json")}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the plan as tables: its findings last, where they are read."""
        if self.model is not None and self.traces_per_pass is not None and self.memory is not None:
            yield _summary(self, self.model, self.traces_per_pass)
            for title, table in _sizes(self, self.memory).items():
                yield Text(f"\n{title}", style="bold")
                yield Padding(table, (0, 0, 0, 2), expand=False)
            yield Text("\nTo start", style="bold")
            # as text of its own, not in a frame, which would be cut at the edge of a narrow terminal
            yield Text("\n".join(map(_broken, self.lines)))
        yield Text()
        for finding in sorted(self.findings, key=lambda finding: list(_STYLES).index(finding.level)):
            yield Text.assemble((f"{finding.level}: ", _STYLES[finding.level]), f"{finding.text}. Fix: {finding.fix}.")
        yield Text("This can start.", "bold green") if self.can_start else Text("This cannot start.", "bold red")


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
    refuse is a finding, without numbers.
    """
    machine = machine_of(recipe, engine, processes, online=not runs)
    typed = recipe.model_copy(update={"dtype": machine.dtype})  # this machine's GPU does not decide
    findings = list(found.of_recipe(recipe, machine))
    try:
        found.check_start(typed, machine)
        numbers = model_numbers(recipe, machine.dtype)
    except RolltapError as error:
        return TrainingPlan(recipe, machine, [found.refused(error), *findings])
    traces = rows(recipe, numbers, machine.processes)
    memory = memory_of(recipe, machine, numbers, traces)
    findings += found.of_numbers(recipe, machine, numbers, traces, memory)
    file = file or Path("recipe.toml")
    train = _training(recipe, machine, file, runs, out or Path("runs", file.stem))
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
            "optimizer_steps": recipe.steps * int(recipe.grpo.get("num_iterations", 1)),
            "checkpoints": checkpoints_of(recipe)[0],
        },
        traces_per_pass=traces,
        memory=memory,
        lines=[train] if runs else [KEY, *_serving(recipe, machine, numbers, memory.engine), train],
    )


def _serving(recipe: Recipe, machine: Machine, numbers: ModelNumbers, engine: EngineShare | None) -> Iterator[str]:
    """Yield the lines that start the engines. One that begins with `#` names the machine of the next, if another."""
    arguments = _engine_arguments(recipe, machine, numbers, engine)
    hosts: dict[str, list[SplitResult]] = {}
    for url in map(urlsplit, machine.engines):
        hosts.setdefault("" if _is_here(url) else str(url.hostname), []).append(url)
    for host, urls in hosts.items():
        if host:
            yield f"# on {host}, with a copy of engine.key:"
        for gpu, url in enumerate(urls):
            command = ["rolltap", "serve", str(recipe.model), *(["--host", host] if host else [])]
            if port := url.port or {"http": 80}.get(url.scheme):
                command += ["--port", str(port)]
            yield _on_gpus(machine, gpu, 1) + shlex.join([*command, *arguments])
    if any(hosts):
        yield "# here:"


def _engine_arguments(recipe: Recipe, machine: Machine, numbers: ModelNumbers, engine: EngineShare | None) -> list[str]:
    own = ["--max-model-len", str(recipe.max_tokens)] if recipe.max_tokens else []
    if recipe.publish == "lora":
        rank = max([recipe.lora.get("r", 8), *(recipe.lora.get("rank_pattern") or {}).values()])
        own += ["--lora-rank", str(next((size for size in LORA_RANKS if size >= rank), rank))]
    extra = ["--dtype", machine.dtype] if recipe.dtype or machine.gpu is not None else []
    if engine is not None and engine.utilization != UTILIZATION:
        extra += ["--gpu-memory-utilization", f"{engine.utilization:.2f}"]
    if numbers.other_towers:
        extra += ["--language-model-only"]
    return [*own, "--", *extra] if extra else own


def _training(recipe: Recipe, machine: Machine, file: Path, runs: Sequence[Path], out: Path) -> str:
    command = ["rolltap"]
    if machine.processes > 1:
        command = ["torchrun", "--standalone", "--nproc-per-node", str(machine.processes), "-m", "rolltap"]
    command += ["train", str(file), *(word for run in runs for word in ("--from", str(run)))]
    if machine.engines:
        command += ["--engine", ",".join(machine.engines)]
    first = 0 if machine.shared_gpu else sum(_is_here(urlsplit(url)) for url in machine.engines)
    return _on_gpus(machine, first, machine.processes) + shlex.join([*command, "--out", str(out)])


def _is_here(url: SplitResult) -> bool:
    """Return True for the URL of a server that only this machine reaches."""
    try:
        return ip_address(url.hostname or "").is_loopback
    except ValueError:
        return url.hostname == "localhost"


def _on_gpus(machine: Machine, first: int, number: int) -> str:
    gpus = ",".join(map(str, range(first, first + number)))
    return "" if machine.gpu is None else f"CUDA_VISIBLE_DEVICES={gpus} "


def _summary(plan: TrainingPlan, model: ModelNumbers, traces: Rows) -> Table:
    recipe, machine = plan.recipe, plan.machine
    default = "" if recipe.dtype else f", the default {'with a GPU' if machine.gpu else 'without a GPU'}"
    trained = f"LoRA of {model.trained / 1e6:,.1f} M" if recipe.lora else "all weights"
    engines = f", {_number(len(machine.engines), 'engine')}" if machine.engines else ""
    shared = ", one GPU for both" if machine.shared_gpu else ""
    memory = f", GPUs of {machine.gpu / GIB:.0f} GiB" if machine.gpu else ""
    return _table(
        ("model", f"{model.architecture}, {model.parameters / 1e9:.2f} B parameters in {machine.dtype}{default}"),
        ("trains", trained + (f", published as {recipe.publish}" if machine.engines else ", on recorded runs")),
        ("machine", _number(machine.processes, "training process", "es") + engines + shared + memory),
        ("work", _WORK.format_map(plan.work)),
        ("traces", f"{traces.count:,} of {traces.longest:,} tokens in a forward pass, one a session;"),
        ("", "sub-agents, and calls that do not continue the one before, add more"),
    )


def _sizes(plan: TrainingPlan, memory: Memory) -> dict[str, Table]:
    """Return the tables of bytes by their titles."""
    recipe, always, traces, engine = plan.recipe, memory.always, memory.traces, memory.engine
    largest = ", the largest share" if plan.machine.processes > 1 and not recipe.lora else ""
    tokens = traces.tokens_in_memory
    trainer = {
        "gradients": "float32",
        "optimizer": f"float32{largest}",
        "reference model": "grpo.beta",
        "CUDA": "assumed",
        "states": f"of {tokens:,} tokens at once, the rest computed again" if tokens else "of all traces of a pass",
        "activations": f"a batch of {traces.tokens_per_segment:,} tokens",
        "working room": "a quarter of it",
        "logits": "a chunk",
        "room for traces": "states, activations and logits",
    }
    sizes = always | traces.sizes | {"together": always.total + traces.sizes.total}
    tables = {"A training process": _size_table(sizes | {"room for traces": memory.planned_traces or 0}, trainer)}
    if memory.suggested_memory_gib:
        tables["A training process"].add_row("", "", f"grpo.memory_gib = {memory.suggested_memory_gib}")
    if engine is not None:
        about = {
            "working memory": "assumed",
            "cache": f"{engine.cached_tokens:,} tokens, {_number(engine.sessions, 'session')} of the longest at once",
            "together": f"--gpu-memory-utilization {engine.utilization:.2f}",
        }
        tables["An engine"] = _size_table(engine.sizes | {"together": engine.sizes.total}, about)
    files = {
        "published": str(recipe.publish_folder or "in the run folder"),
        "checkpoints": f"{_number(checkpoints_of(recipe)[1], 'checkpoint')} in the run folder, while one is written",
        "finished": "the model in the run folder",
    }
    return tables | {"Files": _size_table(memory.files, files)}


def _size_table(sizes: dict[str, int], about: dict[str, str]) -> Table:
    """Return a table of names, sizes above 0, and texts."""
    return _table(*((name, gib(size, 2), about.get(name, "")) for name, size in sizes.items() if size))


def _table(*lines: tuple[str, ...]) -> Table:
    """Return a table whose columns are a name, a size if there are three, and a text."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right" if len(lines[0]) == 3 else "left")
    for line in lines:
        table.add_row(*line)
    return table


def _broken(command: str) -> str:
    """Return a command as indented lines of at most `WIDTH` characters, where its words allow it. A comment is one."""
    if command.startswith("#"):
        return f"  {command}"
    lines = [" "]
    for word in re.findall(r"(?:'[^']*'|\S)+", command):
        if lines[-1].strip() and len(lines[-1]) + len(word) > WIDTH:
            lines.append("     ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def _number(count: int, one: str, plural: str = "s") -> str:
    return f"{count:,} {one}{'' if count == 1 else plural}"
