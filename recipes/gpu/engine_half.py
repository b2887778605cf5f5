"""The engine's half of the check: serve, record, score again, train and publish in two ways, verify.

The engine and the trainer share one GPU, as the plan divides it.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from lines import Line, failed, measured, skipped

import rolltap
from rolltap.trainer.engine.admin import EngineAdmin

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
CONTEXT = 8192
"""Tokens of a session."""
SESSIONS = {True: 2, False: 4}
"""Form without a GPU -> sessions of a group. Their number is even: half of them get a reward."""
DIFFERENCE = {True: 1e-3, False: 0.1}
"""Form without a GPU -> largest mean difference of log-probabilities in nats, which are computed in float32 there, and
in bfloat16 on a GPU. Provisional: those of a training."""
NOT_APPLIED = 0.5
"""Largest difference from the trainer, over what the step changed. An engine that did not apply the step has 1."""
STEP = 'optim = "sgd"\nmax_grad_norm = 1e-4\nlearning_rate = 1000.0\nlr_scheduler_type = "constant"\n'
"""A step of the length 0.1 whatever the model's gradients are: one that shows, and does not ruin the model."""
TRAININGS = {
    "checkpoint": STEP,
    "lora": STEP + '[lora]\nr = 8\nlora_alpha = 32\ntarget_modules = "all-linear"\n',
}
"""Way of publishing -> the end of its recipe, in the table [grpo]."""
ROLLTAP = [sys.executable, "-m", "rolltap"]


def engine_half(model: Path, vllm: str, cpu: bool, folder: Path) -> Iterator[Line]:
    """Start an engine, and yield the lines. Logs, recipes and runs go into `folder`."""
    try:
        plans = {way: plan_of(model, way, cpu, folder) for way in TRAININGS}
        extra = engine_arguments(plans, cpu)
        started = time.monotonic()
        with rolltap.EngineServer(
            model,
            vllm=vllm,
            port=free_port(),
            max_model_len=CONTEXT,
            lora_rank=8,
            log=folder / "vllm.log",
            extra=extra,
        ) as engine:
            os.environ["ROLLTAP_ENGINE_KEY_FILE"] = str(engine.key_file)
            yield Line("serve: seconds to start", "passed", time.monotonic() - started)
            yield from with_engine(engine.url, model, cpu, folder, plans)
    except rolltap.RolltapError as error:
        yield failed("serve", error)


def with_engine(url: str, model: Path, cpu: bool, folder: Path, plans: dict[str, Any]) -> Iterator[Line]:
    """Yield the lines of a running engine that serves `model`, from recording on."""
    if shutil.which("mini") is None:
        for what in ("record", "check", *TRAININGS, "verify"):
            yield skipped(what, "mini-swe-agent is not installed")
        return
    yield from guarded("record", lambda: record(url, model, folder))
    yield from guarded("check", lambda: check(url, folder / "record", cpu))
    for way, planned in plans.items():
        yield from guarded(way, partial(training, url, folder, way, planned, cpu))
    yield from guarded("verify", lambda: verify(folder))


def engine_arguments(plans: dict[str, Any], cpu: bool) -> list[str]:
    """Return further arguments of vLLM: its type and share of the GPU, as `rolltap train --dry-run` says."""
    extra = ["--seed", "0"]
    if not cpu:
        shares = [plan["memory"]["engine"]["utilization"] for plan in plans.values() if plan["can_start"]]
        extra += ["--dtype", "bfloat16", "--gpu-memory-utilization", f"{min(shares, default=0.4):.2f}"]
    return extra


def guarded(what: str, lines: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """Yield lines, and a failed one for an error: the other checks go on."""
    try:
        yield from lines()
    except Exception as error:
        yield failed(what, f"{type(error).__name__}: {error}")


def plan_of(model: Path, way: str, cpu: bool, folder: Path) -> dict[str, Any]:
    """Write the recipe of a training with the room that its plan gives it, and return the plan.

    The plan is made by a process, which leaves the GPU when it ends. Raises `RolltapError` when there is none.
    """
    recipe = write_recipe(folder, model, way, cpu)
    ended = subprocess.run([*ROLLTAP, "train", recipe, "--dry-run", "--json"], capture_output=True, text=True)
    if not ended.stdout:
        raise rolltap.RolltapError(f"{recipe} has no plan: {ended.stderr.strip()[-500:]}")
    plan: dict[str, Any] = json.loads(ended.stdout)
    memory = plan["memory"]
    if memory and memory["suggested_memory_gib"]:
        write_recipe(folder, model, way, cpu, memory["suggested_memory_gib"])
    return plan


def write_recipe(folder: Path, model: Path, way: str, cpu: bool, memory_gib: float | None = None) -> Path:
    """Write the recipe and the task of a training, and return the recipe's path."""
    # The evaluator passes every second session, whatever the agent did: each group has a signal. mkdir is atomic.
    task = json.loads((QUICKSTART / "tasks.jsonl").read_text())
    task["evaluate"] = ["sh", "-c", 'mkdir "$0" 2>/dev/null || ! rmdir "$0"', str(folder / f"{way}.flag")]
    task["workspace"] = str(QUICKSTART / "workspace")
    (folder / f"{way}.jsonl").write_text(json.dumps(task) + "\n")
    keys = {
        "model": str(model),
        "tasks": f"{way}.jsonl",
        "harness": "mini-swe-agent",
        "steps": 2,  # the second one is sampled by the weights that the first one made
        "sessions": SESSIONS[cpu],
        "concurrency": SESSIONS[cpu],
        "timeout": 300,
        "max_tokens": CONTEXT,
        "publish": way,
        "save_steps": 2,
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    if not cpu:
        text += "[machine]\nshared_gpu = true\n"
    text += "[grpo]\n" + (f"memory_gib = {memory_gib}\n" if memory_gib else "")
    path = folder / f"{way}.toml"
    path.write_text(text + TRAININGS[way])
    return path


def record(url: str, model: Path, folder: Path) -> Iterator[Line]:
    """Record sessions of mini-swe-agent."""
    tasks = QUICKSTART / "tasks.jsonl"
    run = rolltap.rollout(
        tasks, harness="mini-swe-agent", engine=url, model=model, out=folder / "record", sessions=2, timeout=300
    )
    sessions = run.sessions()
    faults = [session for session in sessions if session.status == "infrastructure"]
    calls = sum(len(recorded) for recorded in run.calls.values())
    vllm = run.metadata["engines"][url]["vllm"]
    note = f"{len(sessions)} sessions, {calls} calls, vLLM {vllm}"
    yield measured("record: sessions with a fault", len(faults), 0, faults[0].error or "" if faults else note)


def check(url: str, run: Path, cpu: bool) -> Iterator[Line]:
    """Score the recorded calls again."""
    report = rolltap.open_run(run).check(url, threshold=DIFFERENCE[cpu], progress=False)
    for row in report.rows:
        note = f"{row.calls} calls, {row.tokens} tokens, largest {row.max_difference:.2g}"
        yield measured(f"check: {row.kind} prompts, nats", row.mean_difference, DIFFERENCE[cpu], note)


def training(url: str, folder: Path, way: str, plan: dict[str, Any], cpu: bool) -> Iterator[Line]:
    """Train two steps, and compare the engine with the trainer by the weights of the first."""
    if not plan["can_start"]:
        errors = [finding["text"] for finding in plan["findings"] if finding["level"] == "error"]
        yield failed(way, f"the plan: {'; '.join(errors)}")
        return
    run, log = folder / way, folder / f"{way}.log"
    with log.open("w") as output:
        command: list[str | Path] = [*ROLLTAP, "train", folder / f"{way}.toml", "--engine", url, "--out", run]
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    if status:
        yield failed(way, f"status {status}: {log.read_text().strip()[-500:]}")
        return
    first, second = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:2])
    limit = DIFFERENCE[cpu]
    yield measured(f"{way}: engine and trainer before the first step, nats", first["engine_difference"], limit)
    yield measured(f"{way}: engine and trainer after the step, nats", second["engine_difference"], limit)
    sampled = max(value for name, value in second.items() if name.startswith("difference/"))
    yield measured(f"{way}: sampled tokens after the step, nats", sampled, limit)
    change = moved(url, run)
    yield applied(way, sampled, change, f"tokens moved by {change:.2g} nats")
    what = f"{way}: peak memory over the plan"
    if cpu:
        yield skipped(what, "on a CPU the peak is that of the whole process")
    else:
        always, traces = plan["memory"]["always"], plan["memory"]["traces"]
        planned = always["total"] - always["cuda"] + traces["total"]  # the allocator does not count CUDA itself
        peak = max(first["peak_memory_gib"], second["peak_memory_gib"])
        yield measured(what, peak * 2**30 / planned, 1.1, f"{peak:.3g} of {planned / 2**30:.3g} GiB")
    for large in ("checkpoints", "published", "model"):
        shutil.rmtree(run / large, ignore_errors=True)


def applied(way: str, sampled: float, change: float, note: str) -> Line:
    """Return the line that fails when the engine did not apply the steps: `change` is what they moved it by."""
    ratio = sampled / change if change else float("inf")
    return measured(f"{way}: of what the steps changed", ratio, NOT_APPLIED, note)


def moved(url: str, run: Path) -> float:
    """Return by how much the engine's log-probabilities of the first step's tokens moved, in nats."""
    engine = EngineAdmin(url)
    name = json.loads((run / "policy.json").read_text())["model"] or engine.models().base
    calls = [call for recorded in rolltap.open_run(run).calls.values() for call in recorded]
    [start] = {span.version for call in calls for span in call.weight_versions if span.version.split(".")[1] == "0"}
    # vLLM samples a token after what it scores
    scored = [call for call in calls if len(call.prompt_ids) + len(call.completion_ids) < CONTEXT]
    return fmean(
        abs(recorded - now)
        for call in scored
        if {span.version for span in call.weight_versions} == {start}
        for recorded, now in zip(call.logprobs, engine.score(name, call.prompt_ids, call.completion_ids), strict=True)
    )


def verify(folder: Path) -> Iterator[Line]:
    """Verify the three runs."""
    for run in ("record", *TRAININGS):
        if (folder / run).exists():
            found = rolltap.verify_run(folder / run, progress=False)
            damage = [finding for finding in found.findings if finding.grade == "damage"]
            note = damage[0].what if damage else f"{found.rows['calls']} calls"
            yield measured(f"verify: damage in {run}", len(damage), 0, note)


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
