"""The phases of a rollout; and rollouts beside the trainer's steps: how busy the engine is, by the
recipe's `max_staleness`.

A rollout runs programs that call the model twice and take a log-normal time in between, with sigma
1.

Of trainings the loop, its schedule and its run folder are real. Sessions and steps take time, and
compute nothing: sessions log-normal times, a judge a tenth of their median. The engine is busy
while a session runs. `optimum` are the steps of a trainer that never waits, or of an engine whose
slots are never free, if these are fewer.
"""

import asyncio
import math
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import click
from transformers import AutoTokenizer

import rolltap
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.rollouts import session
from rolltap.trainer.rollouts.node import Enter, SessionAttempt
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.facts import Facts
from tests.bench import fleet
from tests.bench.frame import Rows, command, model_option
from tests.scripted_engine import Say, ScriptedEngine
from tests.trainer.training.test_online import Loop, sampled

GROUPS, SESSIONS = 8, 8
"""Groups of a step, and sessions of a group."""


class Timed(Loop):
    """A training of which sessions and steps take time. It is also the node of its sessions, and
    their recorder."""

    name = ""

    def __init__(self, folder: Path, median: float, slots: int, steps: int, ahead: int) -> None:
        settings = {
            "publish": "lora",
            "lora": {"r": 1},
            "max_staleness": ahead,
            "adapters": ahead + 2,
        }
        super().__init__(folder, groups_per_step=GROUPS, concurrency=slots, **settings)
        further = {
            "steps": steps + ahead + 1,
            "sessions": SESSIONS,
        }  # a training that goes on after the measurement
        self.recipe = self.recipe.model_copy(update=further)
        self.slots = self.recipe.slots()
        self.steps = steps
        self.median = median
        self.running, self.busy, self.used, self.since = 0, 0.0, 0.0, time.monotonic()
        self.ages: list[float] = []
        self.stale, self.recorded = 0, 0
        self.lock = threading.Lock()

    def published_version(self) -> str:
        return self.published[-1]

    def count(self, change: int) -> None:
        """Add to the number of sessions that run."""
        now = time.monotonic()
        self.busy += (now - self.since) * (self.running > 0)
        self.used += (now - self.since) * self.running
        self.since, self.running = now, self.running + change

    async def run(self, attempt: SessionAttempt, enter: Enter) -> Facts:
        """Run a session, as a node."""
        session = Session(
            session_id=attempt.session_id,
            task_id=attempt.group.task.id,
            group_id=attempt.group.group_id,
            status="unknown",
        )
        attempt.row = session
        place = session.session_id.partition(".")[2]
        seconds = self.median * random.Random(place).lognormvariate(0, 1)
        await enter("running")
        session.policy_version, session.status = self.published_version(), "cancelled"
        self.count(1)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.write(session)
            raise
        finally:
            self.count(-1)
        await enter("judging")
        await asyncio.sleep(self.median / 10)
        index = int(place.partition("-")[2].partition(".")[0])
        session.status, session.reward = "completed", float(index % 2)
        await asyncio.to_thread(self.write, session)
        return Facts(completed_calls=1)

    def write(self, session) -> None:
        with self.lock:
            self.writer.add_call(sampled(session.session_id, session.policy_version))
            self.writer.add_session(session)

    def first_version(self, session_id: str) -> str | None:
        return None

    def open_runner(self, advance, *, share):
        return GroupRunner([self], advance, retries=0, give_up_after=8)

    def train(self, seconds: float) -> float:
        """Take the steps, which take so long each without their rollouts. Returns the seconds of
        all."""
        source = self.source(0)
        source.trainer.log_metrics = lambda metrics: self.ages.append(metrics.get("age/max", 0.0))
        with RunWriter(self.folder, "never") as self.writer:
            began = self.since = time.monotonic()
            for step in range(self.steps):
                source.trainer.state.global_step = step
                source.before_batch()
                ledger = source(self.rows_of(step)).ledger
                self.stale, self.recorded = (
                    self.stale + ledger.left_out.get("stale", 0),
                    self.recorded + ledger.sampled,
                )
                time.sleep(seconds)
            self.count(0)
            taken = time.monotonic() - began
        return taken


HARNESS = """
import json, math, os, random, sys, time, urllib.parse, urllib.request
def ask(text):
    body = json.dumps({"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request("https://api.openai.com/v1/chat/completions", body, headers)
    urllib.request.urlopen(request, timeout=600).read()
ask("Hello")
name = urllib.parse.unquote(urllib.parse.urlsplit(os.environ["HTTPS_PROXY"]).username)
time.sleep(random.Random(name.rpartition("-")[2]).lognormvariate(math.log(float(sys.argv[1])), 1))
ask("More")
"""
FILES = 200
"""Files of the workspace."""


run_session = session.run_session


async def hold_a_slot(context, attempt, enter) -> Facts:
    """Run a session that keeps its slot until it is judged."""

    async def enter_once(phase) -> None:
        if phase == "running":
            await enter(phase)

    return await run_session(context, attempt, enter_once)


@contextmanager
def scripted(model: Path) -> Iterator[str]:
    """Yield the URL of a scripted engine that always answers."""
    with ScriptedEngine(AutoTokenizer.from_pretrained(model)) as engine:
        engine.otherwise = lambda request: Say("Done.")
        yield engine.url


def phases(model: Path, folder: Path, median: float, slots: int, engine: str | None) -> Rows:
    """Roll out 32 sessions in each case, whose programs take log-normal times, and judges a tenth
    of their median."""
    workspace = folder / "workspace"
    for number in range(FILES):
        file = workspace / str(number // 100) / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number}\n" * 100)
    judge = {"kind": "command", "command": ["sleep", str(median / 10)]}
    tasks = [Task(id=f"t{n}", instruction="go", judge=judge, workspace=workspace) for n in range(4)]
    program = {"program": sys.executable, "headless": ["-I", "-c", HARNESS, str(median)]}
    cases = {
        "judges hold a slot": {"ready": 0},
        "ready 0": {"ready": 0},
        "ready 4, judges not warmed": {},
        "ready 4": {},
    }
    drawn = [
        random.Random(str(n)).lognormvariate(math.log(median), 1)
        for _ in tasks
        for n in range(SESSIONS)
    ]
    rows: Rows = []
    for name, settings in cases.items():
        with ExitStack() as stack:
            if name != "ready 4":
                stack.enter_context(patch.object(session, "prepare_ahead", lambda job: None))
            if name == "judges hold a slot":
                stack.enter_context(patch.object(session, "run_session", hold_a_slot))
            began = time.monotonic()
            rolltap.rollout(
                tasks,
                harness=rolltap.Harness(name="timed", **program),
                engine=engine or stack.enter_context(scripted(model)),
                model=model,
                out=folder / name,
                sessions=SESSIONS,
                concurrency=slots,
                runtime="sandbox" if shutil.which("bwrap") else "process",
                progress=False,
                **settings,
            )
            taken = time.monotonic() - began
        rows.append(
            {
                "case": name,
                "sessions an hour": len(drawn) / taken * 3600,
                "of the first": (
                    (rows[0]["sessions an hour"] * taken / len(drawn) / 3600) ** -1 if rows else 1.0
                ),
                "slots used": sum(drawn) / slots / taken,
            }
        )
    return rows


@command
@model_option
@click.option(
    "--ahead",
    is_flag=True,
    help="Measure trainings whose rollouts run ahead, in place of a rollout.",
)
@click.option(
    "--ray",
    is_flag=True,
    help="Measure fleets of Ray nodes on this machine, in place of a rollout.",
)
@click.option(
    "--engine", help="URL of a vLLM server with the model, in place of a scripted engine."
)
@click.option("--median", default=0.5, show_default=True, help="Median seconds of a session.")
@click.option("--slots", default=32, show_default=True, help="Sessions that run at a time.")
@click.option("--steps", default=8, show_default=True, help="Steps of each training.")
def main(
    model: Path, ahead: bool, ray: bool, engine: str | None, median: float, slots: int, steps: int
) -> dict[str, Rows]:
    """Measure the phases of a rollout, trainings by how far their rollouts may run ahead, or
    fleets."""
    if ray:
        placed = [row for losses in (0, 4) for row in fleet.simulate(losses=losses)]
        return {"placement in virtual time": placed, **fleet.measure_nodes(model, median, slots)}
    if not ahead:
        with tempfile.TemporaryDirectory() as folder:
            return {
                f"{slots} slots, median {median} s": phases(
                    model, Path(folder), median, slots, engine
                )
            }

    def timed(number: int, seconds: float) -> tuple[Timed, float]:
        with tempfile.TemporaryDirectory() as folder:
            training = Timed(Path(folder), median, slots, steps, number)
            return training, training.train(seconds)

    alone, taken = timed(0, 0.0)
    rollout, work = taken / steps, alone.used / steps / slots
    tables = {}
    for share in (0.5, 1.0):
        rows: Rows = []
        for number in (0, 1, 2):
            training, taken = timed(number, share * rollout)
            synchronous = rows[0]["steps an hour"] if rows else steps / taken * 3600
            rows.append(
                {
                    "max_staleness": number,
                    "steps an hour": steps / taken * 3600,
                    "of max_staleness 0": steps / taken * 3600 / synchronous,
                    "optimum": 3600 / max(share * rollout, work),
                    "engine busy": training.busy / taken,
                    "slots used": training.used / slots / taken,
                    "oldest": max(training.ages, default=0.0),
                    "stale": training.stale / max(1, training.recorded),
                }
            )
        title = (
            f"{GROUPS} groups of {SESSIONS}, a training step of {share} times the synchronous"
            " rollout"
        )
        tables[title] = rows
    return tables


if __name__ == "__main__":
    main()
