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

from tests.bench.at_once import GROUP, JUDGE, ask_in_turns, cpu_seconds
from tests.bench.frame import Rows, command, milliseconds, model_option
from tests.bench.processes import resident_mb
from tests.bench.soak import paced_engine
from tests.trainer.rollouts.soak import processes
from tests.trainer.service.served import Served

PROBE_SECONDS = 0.02
"""Pause between two questions of the probe."""


@dataclass
class Client:
    """Questions to a service on connections that stay open, and the seconds that they took."""

    service: Served
    policy: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)
    most: dict[str, float] = field(default_factory=dict)
    """Name of a process -> the most memory that it had, in MB."""
    wrong: int = 0
    ready: threading.Event = field(default_factory=threading.Event)
    """Set when the first group has ended. From then on events count."""
    over: threading.Event = field(default_factory=threading.Event)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.service.url).netloc, timeout=600)

    def ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
    ) -> http.client.HTTPResponse:
        headers = {
            "authorization": f"Bearer {self.service.token}",
            "content-type": "application/json",
        }
        connection.request(method, path, body and json.dumps(body), headers)
        return connection.getresponse()

    def timed(self, times: list[float], expected: int, *request: Any) -> None:
        """Add the seconds until the whole answer is there. Another status than expected is
        wrong."""
        began = time.monotonic()
        answer = self.ask(*request)
        answer.read()
        times.append(time.monotonic() - began)
        self.wrong += answer.status != expected

    def follow(self, groups: int) -> None:
        """Read events until so many groups have ended, after the one that makes it ready."""
        with closing(self.connect()) as connection:
            kind = ""
            for line in self.ask(connection, "GET", "/events"):
                now = time.time()
                name, _, value = line.decode().strip().partition(": ")
                if name == "event":
                    kind = value
                if name != "data":
                    continue
                event = json.loads(value)
                if self.ready.is_set():
                    self.events.append(now - datetime.fromisoformat(event["at"]).timestamp())
                    self.wrong += kind == "session" and event["status"] != "completed"
                    groups -= kind == "ended"
                if kind == "ended":
                    self.ready.set()
                if not groups:
                    return

    def probe(self, pids: dict[str, int]) -> None:
        """Ask for the policy, and look at the memory, until it is over."""
        with closing(self.connect()) as connection:
            while not self.over.wait(PROBE_SECONDS):
                self.timed(self.policy, 200, connection, "GET", "/policy")
                for name, pid in pids.items():
                    self.most[name] = max(self.most.get(name, 0.0), resident_mb(pid))


def load(folder: Path, model: Path, at_once: int, rounds: int, turns: int) -> dict[str, Any]:
    """Run `rounds` times as many sessions as run at once, which make `turns` calls each."""
    headless = json.dumps(["-c", ask_in_turns(turns, stream=False)])
    harness = folder / "harness.toml"
    harness.write_text(f'name = "curl"\nprogram = "sh"\nheadless = {headless}\n')
    groups = rounds * at_once // GROUP
    sessions = groups * GROUP
    task = {"id": "words", "instruction": "go", "evaluate": JUDGE}
    limits = ["--concurrency", str(at_once), "--queue", str(rounds * at_once + 1)]
    with ExitStack() as stack:
        engine = stack.enter_context(paced_engine(folder, model))
        service = Served(folder / "run", engine.url, model, harness, *limits, tasks=[task])
        stack.callback(service.stop)
        client = Client(service)
        following = threading.Thread(target=client.follow, args=[groups])
        following.start()
        service.submit(sessions=1)
        client.ready.wait()  # the recorder has started, and everything has been used once
        pids = {"service": service.process.pid}
        for pid, name in processes(str(service.run)).items():
            if "mitmdump" in name:
                pids["recorder"] = pid
        idle = {name: resident_mb(pid) for name, pid in pids.items()}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        began = time.monotonic()
        probing = threading.Thread(target=client.probe, args=[pids])
        probing.start()
        connection = stack.enter_context(closing(client.connect()))
        for _ in range(groups):
            body = {"task": "words", "sessions": GROUP}
            client.timed(client.submit, 201, connection, "POST", "/groups", body)
        following.join()
        taken = time.monotonic() - began
        after = {name: cpu_seconds(pid) for name, pid in pids.items()}
        client.over.set()
        probing.join()
    row: dict[str, Any] = {
        "sessions": sessions,
        "at once": at_once,
        "calls": sessions * turns,
        "seconds": taken,
    }
    for name in pids:
        row[f"{name} CPU ms a session"] = 1e3 * (after[name][0] - before[name][0]) / sessions
        row[f"{name} MB idle"] = idle[name]
        row[f"{name} MB most"] = client.most[name]
    programs = after["service"][1] - before["service"][1]
    return row | {
        "programs CPU ms a session": 1e3 * programs / sessions,
        **milliseconds("GET /policy", client.policy),
        **milliseconds("POST /groups", client.submit),
        **milliseconds("event", client.events),
        "load average": os.getloadavg()[0],
        "wrong": client.wrong + ("Traceback" in service.said),
    }


@command
@click.option("--sessions", default=256, help="Sessions that run at once.")
@click.option("--rounds", default=2, help="All sessions, as a multiple of these.")
@click.option("--turns", default=3, help="Calls of a session.")
@model_option
def main(sessions: int, rounds: int, turns: int, model: Path) -> dict[str, Rows]:
    """Load a service with many sessions at once, and measure what it costs and how late it is."""
    with tempfile.TemporaryDirectory() as folder:
        return {"service": [load(Path(folder), model, sessions, rounds, turns)]}


if __name__ == "__main__":
    main()
