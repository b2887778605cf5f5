"""Measure rollouts beside the trainer's steps: how busy the engine is, by the recipe's
`max_staleness`.

    python -m tests.bench.rollouts

Of trainings the loop, its schedule and its run folder are real. Sessions and steps take time, and
compute nothing: sessions log-normal times with sigma 1, a judge a tenth of their median. The engine
is busy while a session runs. `optimum` are the steps of a trainer that never waits, or of an engine
whose slots are never free, if these are fewer.
"""

import asyncio
import random
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import click

from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.rollouts.node import Enter, SessionAttempt
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.traces.facts import Facts
from tests.bench.frame import Rows, command
from tests.factories import make_call
from tests.trainer.training.test_online import Loop

GROUPS = 8
SESSIONS = 8
"""Groups of a step, and sessions of a group."""


class Timed(Loop):
    """A training of which sessions and steps take time. It is also the node of its sessions, and
    their recorder."""

    name = ""

    def __init__(self, folder: Path, median: float, slots: int, steps: int, ahead: int) -> None:
        settings = {"publish": "lora", "lora": {"r": 1}, "adapters": ahead + 2}
        settings |= {"max_staleness": ahead, "groups_per_step": GROUPS, "concurrency": slots}
        super().__init__(folder, **settings)
        # a training that goes on after the measurement
        further = {"steps": steps + ahead + 1, "sessions": SESSIONS}
        self.recipe = self.recipe.model_copy(update=further)
        self.slots = self.recipe.slots()
        self.steps = steps
        self.median = median
        self.active = 0
        """Sessions that run now."""
        self.since = time.monotonic()
        """When their number changed."""
        self.busy = 0.0
        self.used = 0.0
        """Seconds in which a session ran, and those of all sessions."""
        self.stale = 0
        self.recorded = 0
        """Tokens that were too old, and all."""
        self.lock = threading.Lock()

    def count(self, change: int) -> None:
        """Add to the number of sessions that run."""
        now = time.monotonic()
        self.busy += (now - self.since) * (self.active > 0)
        self.used += (now - self.since) * self.active
        self.since = now
        self.active += change

    async def run(self, attempt: SessionAttempt, enter: Enter) -> Facts:
        """Run a session, as a node."""
        row = Session(
            session_id=attempt.session_id,
            task_id=attempt.group.task.id,
            group_id=attempt.group.group_id,
            status="cancelled",
        )
        attempt.row = row
        place = row.session_id.partition(".")[2]
        await enter("running")
        row.policy_version = self.published[-1]
        self.count(1)
        try:
            await asyncio.sleep(self.median * random.Random(place).lognormvariate(0, 1))
        except asyncio.CancelledError:
            self.write(row)
            raise
        finally:
            self.count(-1)
        await enter("judging")
        await asyncio.sleep(self.median / 10)
        row.status = "completed"
        row.reward = float(int(place.partition("-")[2].partition(".")[0]) % 2)
        await asyncio.to_thread(self.write, row)
        return Facts(completed_calls=1)

    def write(self, row: Session) -> None:
        call = make_call(session_id=row.session_id, version=row.policy_version)
        with self.lock:
            self.writer.add_call(call)
            self.writer.add_session(row)

    def first_version(self, session_id: str) -> str | None:
        return None

    def open_runner(self, advance, *, share):
        return GroupRunner([self], advance, retries=0, give_up_after=8)

    def train(self, seconds: float) -> float:
        """Take the steps, which take so long each without their rollouts. Returns the seconds of
        all."""
        with self.source(0) as source, RunWriter(self.folder, "never") as self.writer:
            source._worker = SimpleNamespace(runner=self.open_runner)
            began = self.since = time.monotonic()
            for step in range(self.steps):
                source.trainer.state.global_step = step
                source.before_batch()
                ledger = source(self.rows_of(step)).ledger
                self.stale += ledger.left_out.get("stale", 0)
                self.recorded += ledger.sampled
                time.sleep(seconds)
            self.count(0)
            taken = time.monotonic() - began
        return taken


def measure(median: float, slots: int, steps: int) -> dict[str, Rows]:
    """Measure trainings by how far their rollouts may run ahead."""

    def timed(number: int, seconds: float) -> tuple[Timed, float]:
        with tempfile.TemporaryDirectory() as folder:
            training = Timed(Path(folder), median, slots, steps, number)
            return training, training.train(seconds)

    alone, taken = timed(0, 0.0)
    rollout = taken / steps
    work = alone.used / steps / slots
    tables = {}
    for share in (0.5, 1.0):
        rows: Rows = []
        for number in (0, 1, 2):
            training, taken = timed(number, share * rollout)
            row = {"max_staleness": number, "steps an hour": steps / taken * 3600}
            rows.append(row)
            row |= {
                "of max_staleness 0": row["steps an hour"] / rows[0]["steps an hour"],
                "optimum": 3600 / max(share * rollout, work),
                "engine busy": training.busy / taken,
                "slots used": training.used / slots / taken,
                "oldest": max((line.get("age/max", 0.0) for line in training.logged), default=0.0),
                "stale": training.stale / max(1, training.recorded),
            }
        step = f"a training step of {share} times the synchronous rollout"
        tables[f"{GROUPS} groups of {SESSIONS}, {step}"] = rows
    return tables


@command
@click.option("--median", default=0.5, help="Median seconds of a session.")
@click.option("--slots", default=32, help="Sessions that run at a time.")
@click.option("--steps", default=8, help="Steps of each training.")
def main(median: float, slots: int, steps: int) -> dict[str, Rows]:
    """Measure trainings by how far their rollouts run ahead."""
    return measure(median, slots, steps)


if __name__ == "__main__":
    main()
