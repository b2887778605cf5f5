"""Rollouts beside the trainer's steps: steps an hour, and how busy the engine is, by the recipe's `ahead`.

The loop, its schedule and its run folder are those of a training. Sessions and training steps take time, and compute
nothing: sessions log-normal times with sigma 1, a judge a tenth of their median. The engine is busy while a session
runs. `optimum` are the steps of a trainer that never waits, or of an engine whose slots are never free, if these are
fewer.
"""

import asyncio
import random
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import click

from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.rollouts import schedule
from rolltap.trainer.rollouts.facts import Facts
from rolltap.trainer.tasks.task import Task
from tests.bench.frame import Rows, command
from tests.trainer.training.test_online import TASKS, Loop, sampled

GROUPS, SESSIONS = 8, 8
"""Groups of a step, and sessions of a group."""


class Timed(Loop):
    """A training of which sessions and steps take time. It is also the stage of its sessions, and their recorder."""

    runtime = SimpleNamespace(name="timed", warning=None)
    harness = SimpleNamespace(name="timed", digest=str)

    def __init__(self, folder: Path, median: float, slots: int, steps: int, ahead: int) -> None:
        settings = {"publish": "lora", "lora": {"r": 1}, "ahead": ahead, "adapters": ahead + 2}
        super().__init__(folder, groups_per_step=GROUPS, concurrency=slots, **settings)
        further = {"steps": steps + ahead + 1, "sessions": SESSIONS}  # a training that goes on after the measurement
        self.recipe = self.config = self.recipe.model_copy(update=further)
        self.steps = steps
        self.median, self.recorder = median, self
        self.digests = {task.id: "" for task in TASKS}
        self.running, self.busy, self.used, self.since = 0, 0.0, 0.0, time.monotonic()
        self.ages: list[float] = []
        self.stale, self.recorded = 0, 0
        self.lock = threading.Lock()

    def check(self) -> None:
        """Stand in for the recorder's."""

    def published_version(self) -> str:
        return self.published[-1]

    async def digest(self, task: Task) -> str:
        return ""

    def count(self, change: int) -> None:
        """Add to the number of sessions that run."""
        now = time.monotonic()
        self.busy += (now - self.since) * (self.running > 0)
        self.used += (now - self.since) * self.running
        self.since, self.running = now, self.running + change

    async def session(self, stage, session, group, enter) -> Facts:
        """Run a session in place of `run_session`."""
        place = session.session_id.partition(".")[2]
        seconds = self.median * random.Random(place).lognormvariate(0, 1)
        await enter("running")
        session.policy_version, session.status = self.published_version(), "cancelled"
        self.count(1)
        try:
            await asyncio.sleep(seconds)
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

    def run_sessions(self, groups, version):
        return run_blocking(schedule.run_groups(groups, self, policy_version=version, advance=lambda *_: None))

    def open_schedule(self, advance):
        return schedule.Schedule(self, advance)

    def train(self, seconds: float) -> float:
        """Take the steps, which take so long each without their rollouts. Returns the seconds of all."""
        source = self.source(0)
        source.trainer.log_metrics = lambda metrics: self.ages.append(metrics.get("age/max", 0.0))
        source._checked = True  # there is no engine
        with RunWriter(self.folder, "never") as self.writer, patch.object(schedule, "run_session", self.session):
            began = self.since = time.monotonic()
            for step in range(self.steps):
                source.trainer.state.global_step = step
                source.before_batch()
                ledger = source(self.rows_of(step)).ledger
                self.stale, self.recorded = self.stale + ledger.left_out.get("stale", 0), self.recorded + ledger.sampled
                time.sleep(seconds)
            self.count(0)
            taken = time.monotonic() - began
            source._beside.close()
        return taken


@command
@click.option("--ahead", "ahead", type=int, multiple=True, default=(0, 1, 2), show_default=True, help="Steps ahead.")
@click.option("--median", default=0.2, show_default=True, help="Median seconds of a session.")
@click.option("--slots", default=32, show_default=True, help="Sessions that run at a time.")
@click.option("--steps", default=8, show_default=True, help="Steps of each training.")
def main(ahead: tuple[int, ...], median: float, slots: int, steps: int) -> dict[str, Rows]:
    """Train with steps that take half of a synchronous rollout, and as long as one."""

    def timed(number: int, seconds: float) -> tuple[Timed, float]:
        with tempfile.TemporaryDirectory() as folder:
            training = Timed(Path(folder), median, slots, steps, number)
            return training, training.train(seconds)

    alone, taken = timed(0, 0.0)
    rollout, work = taken / steps, alone.used / steps / slots
    tables = {}
    for share in (0.5, 1.0):
        rows: Rows = []
        for number in ahead:
            training, taken = timed(number, share * rollout)
            synchronous = rows[0]["steps an hour"] if rows else steps / taken * 3600
            rows.append(
                {
                    "ahead": number,
                    "steps an hour": steps / taken * 3600,
                    "of ahead 0": steps / taken * 3600 / synchronous,
                    "optimum": 3600 / max(share * rollout, work),
                    "engine busy": training.busy / taken,
                    "slots used": training.used / slots / taken,
                    "oldest": max(training.ages, default=0.0),
                    "stale": training.stale / max(1, training.recorded),
                }
            )
        title = f"{GROUPS} groups of {SESSIONS}, a training step of {share} times the synchronous rollout"
        tables[title] = rows
    return tables


if __name__ == "__main__":
    main()
