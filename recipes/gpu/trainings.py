"""The stages that train: in both ways, after a kill -9, ahead, on several GPUs; and verify."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from engine_half import start_engine
from lines import Line, at_least, at_most, fact, failed, skipped
from plans import ROLLTAP, SHORT, TRAININGS, Setting, environment_of, require_start

import rolltap
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.runs.views.check import KINDS

NOT_APPLIED = 0.5
"""Largest difference from the trainer, over what a step moved. It was 0.65 to 36 where engines were
made to drop the step, and below 1e-5 in float32 where they had it."""
SHOWS = 3
"""A step shows if it moves tokens by at least so many times the difference of the base weights."""
PEAK = 1.1
"""Largest peak of memory, over the planned one."""
Metrics = list[dict[str, Any]]


def checkpoint(setting: Setting) -> Iterator[Line]:
    """Train two batches, and publish all weights."""
    yield from train(setting, "checkpoint")


def lora(setting: Setting) -> Iterator[Line]:
    """Train two batches, and publish an adapter. A kill -9 comes after the first."""
    require_start(setting, "lora")
    run = setting.folder / "lora"
    started = start_training(setting, "lora")
    while started.poll() is None and published_step(run) == 0:
        time.sleep(0.1)
    started.kill()
    status = started.wait()
    if status != -9:
        why = f"it ended before, with status {status}: {end_of_log(setting, 'lora')}"
        yield failed("lora: kill -9", why)
        return
    yield fact("lora: kill -9", note="after its first batch; the same command starts it again")
    yield from train(setting, "lora")


def ahead(setting: Setting) -> Iterator[Line]:
    """Train while sessions run ahead, more than in the other trainings at once."""
    for line in train(setting, "ahead"):
        yield line
        if line.result == "failed":
            return
    metrics = read_metrics(setting.folder / "ahead")
    sessions = rolltap.open_run(setting.folder / "ahead").sessions()
    faults = [session for session in sessions if session.status == "infrastructure"]
    note = f"{len(sessions)} sessions"
    if faults:
        note = faults[0].error or ""
    yield at_most("ahead: sessions with a fault", len(faults), 0, note)
    stale = max(line.get("stale_share", 0.0) for line in metrics)
    yield fact("ahead: largest share of stale tokens in a step", stale)


def engines(setting: Setting) -> Iterator[Line]:
    """Start an engine on the second GPU, and publish to both."""
    if not setting.several:
        yield skipped("engines: publication to two", "there is one GPU: it needs two")
        return
    if setting.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = setting.gpus[1]
    second = start_engine(setting, setting.folder / "second-vllm.log")
    if setting.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = setting.gpus[0]
    urls = [setting.url, second.url]
    yield from train(setting, "engines", urls)
    policy = json.loads((setting.folder / "engines" / "policy.json").read_text())
    loaded = [url for url in urls if policy["model"] in EngineAdmin(url).models().adapters]
    yield at_least("engines: engines with the last adapter", len(loaded), 2, policy["version"])


def sharding(setting: Setting) -> Iterator[Line]:
    """Train on the recorded run with two processes that share out the weights."""
    if not setting.several:
        yield skipped("sharding: two processes", "there is one GPU: it needs two")
        return
    setting.servers.close()
    setting.url = ""
    yield from train(setting, "sharding")


def train(setting: Setting, name: str, urls: list[str] | None = None) -> Iterator[Line]:
    """Run a training to its end, and yield its lines. Raises `RolltapError`, by its plan."""
    require_start(setting, name)
    began = time.monotonic()
    status = start_training(setting, name, urls).wait()
    if status:
        yield failed(f"{name}: training", f"status {status}: {end_of_log(setting, name)}")
        return
    run = setting.folder / name
    metrics = read_metrics(run)
    seconds = time.monotonic() - began
    note = f"{len(metrics)} optimizer steps, with its start"
    yield fact(f"{name}: seconds of the training", seconds, note)
    yield from agreement(name, metrics, setting.limit)
    if TRAININGS[name].moves:
        yield applied(name, metrics)
    yield from speed(name, metrics)
    yield peak(setting, name, metrics)
    for large in ("checkpoints", "published", "model"):
        shutil.rmtree(run / large, ignore_errors=True)


def start_training(
    setting: Setting,
    name: str,
    urls: list[str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a training of the check. Its output is appended to its log."""
    command: list[str | Path] = [
        *ROLLTAP,
        "train",
        setting.folder / f"{name}.toml",
        "--out",
        setting.folder / name,
    ]
    if TRAININGS[name].sharded:
        launcher = [
            ROLLTAP[0],
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        command = [*launcher, *command[1:], "--from", setting.folder / "record"]
    else:
        command += ["--engine", ",".join(urls or [setting.url])]
    with log_of(setting, name).open("a") as log:
        variables = environment_of(setting, name)
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)


def log_of(setting: Setting, name: str) -> Path:
    """Return the file with the output of a training."""
    return setting.folder / f"{name}.log"


def end_of_log(setting: Setting, name: str) -> str:
    """Return the end of a training's output."""
    return log_of(setting, name).read_text(errors="replace").strip()[-500:]


def published_step(run: Path) -> int:
    """Return the optimizer steps of the weights that a training published last; 0 before."""
    try:
        version: str = json.loads((run / "policy.json").read_text())["version"]
    except OSError:
        return 0
    return int(version.split(".")[1])


def read_metrics(run: Path) -> Metrics:
    """Return the metrics of each optimizer step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def difference(step: dict[str, Any], of: str) -> float | None:
    """Return the mean difference of a step's tokens from the engine's log-probabilities, in nats.

    `of` is the metric, `difference` or `off_policy`. None for a step without it.
    """
    values = []
    tokens = []
    for kind in KINDS:
        if f"{of}/{kind}" in step:
            values.append(step[f"{of}/{kind}"])
            tokens.append(step[f"tokens/{kind}"])
    return fmean(values, tokens) if values else None


def agreement(name: str, metrics: Metrics, limit: float) -> Iterator[Line]:
    """Yield the lines of what engine and trainer compute for the same tokens."""
    published = [step["engine_difference"] for step in metrics if "engine_difference" in step]
    if published:
        what = f"{name}: engine and trainer after a publication, nats"
        yield at_most(what, max(published), limit, f"the largest of {len(published)}")
    of = "off_policy" if TRAININGS[name].sharded else "difference"
    differences = [difference(step, of) for step in metrics]
    if TRAININGS[name].sharded:
        differences = differences[:1]  # the later ones are of weights that have moved
    found = [each for each in differences if each is not None]
    what = f"{name}: sampled tokens, nats"
    if found:
        yield at_most(what, max(found), limit, f"the largest of {len(found)} steps")
    else:
        yield skipped(what, "no step was trained by the weights that sampled it")


def applied(name: str, metrics: Metrics) -> Line:
    """Return the line that fails when the engine did not apply a step.

    The second optimizer step of the first batch says by how much the trainer's log-probabilities of
    its tokens moved with the first one, by the weights as they are rounded. The next batch is
    sampled by the weights after both.
    """
    what = f"{name}: of what the step moved"
    if len(metrics) < 3:
        return failed(what, f"there are {len(metrics)} optimizer steps, and not 4")
    before = difference(metrics[0], "difference")
    moved = difference(metrics[1], "off_policy")
    after = difference(metrics[2], "difference")
    if before is None or moved is None or after is None:
        return skipped(what, "a batch had no signal")
    if metrics[0]["grad_norm"] < SHORT:
        return skipped(what, "the sessions of the group were alike: their gradients cancel")
    note = f"the step moved tokens by {moved:.2g} nats, the base weights differ by {before:.2g}"
    if moved < SHOWS * before:
        return skipped(what, f"{note}: nothing can be told")
    return at_most(what, after / moved, NOT_APPLIED, note)


def speed(name: str, metrics: Metrics) -> Iterator[Line]:
    """Yield the lines of seconds and tokens a second."""
    phases = ("rollout", "publication", "training")
    means = {
        phase: fmean(step.get(f"seconds_{phase}", 0.0) for step in metrics) for phase in phases
    }
    note = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in means.items())
    yield fact(f"{name}: seconds of a step", sum(means.values()), f"of it {note}")
    fastest = max(step.get("tokens_per_second", 0.0) for step in metrics)
    yield fact(f"{name}: tokens a second of the trainer", fastest, "the fastest step")


def peak(setting: Setting, name: str, metrics: Metrics) -> Line:
    """Return the line of the peak of memory, beside the plan's."""
    what = f"{name}: peak of memory, GiB"
    if setting.cpu:
        return skipped(what, "on a CPU the peak is that of the whole process")
    planned = planned_peak(setting.plans[name]["memory"])
    most = max(step["peak_memory_gib"] for step in metrics)
    return at_most(what, most, PEAK * planned, planned=planned)


def planned_peak(memory: dict[str, Any]) -> float:
    """Return the peak of CUDA's allocator in GiB, without CUDA itself, by a plan's memory."""
    always = sum(memory["always"].values()) - memory["always"]["CUDA"]
    row = sum(memory["row"].values())
    return float(always + row) / 2**30


def verify(setting: Setting) -> Iterator[Line]:
    """Verify the runs."""
    for run in ("record", *TRAININGS):
        if (setting.folder / run / "run.json").exists():
            found = rolltap.verify_run(setting.folder / run, progress=False)
            damage = [finding for finding in found.findings if finding.grade == "damage"]
            note = damage[0].what if damage else f"{found.rows['calls']} calls"
            yield at_most(f"verify: damage in {run}", len(damage), 0, note)
