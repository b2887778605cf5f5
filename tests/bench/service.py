"""Load a service: many sessions at once through one recorder, each a shell that asks the model with
curl.

    python -m tests.bench.service --sessions 256

The engine samples 30 tokens a second for each session. A probe asks for /policy again and again:
its wait is how late the event loop is, with one reading of a small file. The delay of an event is
from its time in the journal to its arrival at a client that reads all. CPU and memory are those of
the processes; `programs` is the CPU of everything that the service has started but the recorder:
supervisors, shells, curl and judges. Exit status 1 when a session has another outcome than
`completed`, or a request another status than it should.
"""

import http.client
import json
import os
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import numpy as np

from tests.bench.frame import Rows, command, model_option
from tests.bench.processes import Engine, resident_mb
from tests.bench.soak import LENGTHS, PACE
from tests.trainer.rollouts.soak import processes
from tests.trainer.service.served import Served

GROUP = 8
"""Sessions of a group."""
PROBE_SECONDS = 0.02
"""Pause between two questions of the probe."""
_ASK = """curl -sSf -o answer.txt -H 'content-type: application/json' -d \
'{"model": "m", "messages": [{"role": "user", "content": "turn %d"}]}' https://api.openai.com/v1/chat/completions"""


@dataclass
class Waits:
    """Seconds that clients waited, and the most memory of service and recorder meanwhile, in MB."""

    policy: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=lambda: [0.0, 0.0])
    wrong: int = 0


class Client:
    """One connection to a service, which stays open."""

    def __init__(self, service: Served) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=600)
        self._headers = {
            "authorization": f"Bearer {service.token}",
            "content-type": "application/json",
        }

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        self._connection.request(method, path, body and json.dumps(body), self._headers)
        return self._connection.getresponse()

    def timed(self, *request: Any) -> tuple[float, int]:
        """Return the seconds until the whole answer is there, and its status."""
        began = time.monotonic()
        answer = self.ask(*request)
        answer.read()
        return time.monotonic() - began, answer.status

    def close(self) -> None:
        self._connection.close()


def follow(service: Served, waits: Waits, groups: int, ready: threading.Event) -> None:
    """Read events until so many groups have ended, after one that ended before `ready`."""
    with closing(Client(service)) as client:
        kind = ""
        for line in client.ask("GET", "/events"):
            now, (name, _, value) = time.time(), line.decode().partition(": ")
            kind = value.strip() if name == "event" else kind
            if name != "data":
                continue
            event = json.loads(value)
            if ready.is_set():
                waits.events.append(now - datetime.fromisoformat(event["at"]).timestamp())
                waits.wrong += kind == "session" and event["status"] != "completed"
                groups -= kind == "ended"
            if kind == "ended":
                ready.set()
            if not groups:
                return


def probe(service: Served, pids: list[int], waits: Waits, over: threading.Event) -> None:
    """Ask for the policy, and look at the memory, until it is over."""
    with closing(Client(service)) as client:
        while not over.wait(PROBE_SECONDS):
            seconds, status = client.timed("GET", "/policy")
            waits.policy.append(seconds)
            waits.wrong += status != 200
            try:
                waits.memory = [
                    max(most, resident_mb(pid))
                    for most, pid in zip(waits.memory, pids, strict=True)
                ]
            except (OSError, StopIteration):  # the recorder died
                waits.wrong += 1
                return


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process, and of the children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, children = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
    ticks = os.sysconf("SC_CLK_TCK")
    return own / ticks, children / ticks


def load(folder: Path, model: Path, at_once: int, rounds: int, turns: int) -> dict[str, Any]:
    """Run `rounds` times as many sessions as run at once, which make `turns` calls each."""
    script = "; ".join(["set -e", *(_ASK % turn for turn in range(turns))])
    (folder / "harness.toml").write_text(
        f'name = "curl"\nprogram = "sh"\nheadless = {json.dumps(["-c", script])}\n'
    )
    groups = rounds * at_once // GROUP
    waits, ready, over = Waits(), threading.Event(), threading.Event()
    with ExitStack() as stack:
        settings = {"tokenizer": model, "lengths": LENGTHS, "burst": 0, "pace": PACE}
        engine = stack.enter_context(Engine("model", folder, settings))
        service = Served(
            folder / "run",
            engine.url,
            model,
            folder / "harness.toml",
            *("--concurrency", str(at_once), "--queue", str(rounds * at_once + 1)),
            tasks=[{"id": "words", "instruction": "go", "evaluate": ["test", "-s", "answer.txt"]}],
        )
        stack.callback(service.stop)
        following = threading.Thread(target=follow, args=(service, waits, groups, ready))
        following.start()
        service.submit(sessions=1)
        ready.wait()  # the recorder has started, and everything has been used once
        client = stack.enter_context(closing(Client(service)))
        recorder = next(
            pid for pid, name in processes(str(service.run)).items() if "mitmdump" in name
        )
        pids = [service.process.pid, recorder]
        idle, before, began = (
            list(map(resident_mb, pids)),
            list(map(cpu_seconds, pids)),
            time.monotonic(),
        )
        probing = threading.Thread(target=probe, args=(service, pids, waits, over))
        probing.start()
        for _ in range(groups):
            seconds, status = client.timed("POST", "/groups", {"task": "words", "sessions": GROUP})
            waits.submit.append(seconds)
            waits.wrong += status != 201
        following.join()
        taken, after = time.monotonic() - began, list(map(cpu_seconds, pids))
        over.set()
        probing.join()
    sessions = groups * GROUP
    costs = 1e3 * (np.array(after) - np.array(before)) / sessions
    row: dict[str, Any] = {
        "sessions": sessions,
        "at once": at_once,
        "calls": sessions * turns,
        "seconds": taken,
    }
    for name, own, quiet, most in zip(
        ("service", "recorder"), costs[:, 0], idle, waits.memory, strict=True
    ):
        row |= {
            f"{name} CPU ms a session": float(own),
            f"{name} MB idle": quiet,
            f"{name} MB most": most,
        }
    row["programs CPU ms a session"] = float(costs[0, 1])
    for name, seconds in (
        ("GET /policy", waits.policy),
        ("POST /groups", waits.submit),
        ("event", waits.events),
    ):
        p50, p99 = 1e3 * np.percentile(seconds, [50, 99])
        row |= {
            f"{name} ms": float(p50),
            f"{name} p99": float(p99),
            f"{name} worst": 1e3 * max(seconds),
        }
    return row | {
        "load average": os.getloadavg()[0],
        "wrong": waits.wrong + ("Traceback" in service.said),
    }


@command
@click.option("--sessions", default=256, show_default=True, help="Sessions that run at once.")
@click.option(
    "--rounds", default=2, show_default=True, help="All sessions, as a multiple of these."
)
@click.option("--turns", default=3, show_default=True, help="Calls of a session.")
@model_option
def main(sessions: int, rounds: int, turns: int, model: Path) -> dict[str, Rows]:
    """Load a service with many sessions at once, and measure what it costs and how late it is."""
    with tempfile.TemporaryDirectory() as folder:
        return {"service": [load(Path(folder), model, sessions, rounds, turns)]}


if __name__ == "__main__":
    main()
