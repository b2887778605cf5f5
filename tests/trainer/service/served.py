"""A service as a process, as a user starts it."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx

from tests.scripted_engine import Say
from tests.trainer.cli.program import ROLLTAP
from tests.trainer.rollouts.soak import processes

HARNESS = """
import json, os, urllib.request
ask = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
request = urllib.request.Request(
    "https://api.openai.com/v1/chat/completions", json.dumps(ask).encode(), {"content-type": "application/json"}
)
with urllib.request.urlopen(request, timeout=600) as reply:
    answer = json.load(reply)["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
"""
"""A program that makes one model call, and writes the reply to answer.txt."""
TWO_CALLS = f"""{HARNESS}
said = dict(role="assistant", content=answer)
ask["messages"] += [said, dict(role="user", content="And?")]
request.data = json.dumps(ask).encode()
with urllib.request.urlopen(request, timeout=600) as reply:
    json.load(reply)
"""
"""A program that makes two model calls, the second one with the reply of the first."""
GOOD = ["grep", "-q", "good", "answer.txt"]
"""The judge's command: the reward is 1 for a reply with the word `good`."""


def program(folder: Path, text: str = HARNESS) -> Path:
    """Write the preset of a harness that is a Python program, and return its path."""
    file = folder / "harness.toml"
    arguments = json.dumps(["-c", text])
    file.write_text(f'name = "small"\nprogram = "{sys.executable}"\nheadless = {arguments}\n')
    return file


def heed_interrupts():
    """Undo what a background job inherits: it ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def say_good(request):
    return Say("good.")


def is_end(kind, data):
    return kind == "ended"


def require_refused(answer, status: int, words: str) -> None:
    """Assert the status of an answer, and words of its error."""
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]


class Served:
    """A service that runs. `url` and `token` are for its clients."""

    def __init__(
        self, run: Path, engine: str, model: Path, harness: Path, *arguments: str, tasks=None
    ) -> None:
        run.parent.mkdir(parents=True, exist_ok=True)
        tasks = tasks or [{"id": "words", "instruction": "go", "evaluate": GOOD}]
        (run.parent / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
        self.run = run
        self._command = [
            ROLLTAP,
            "service",
            run,
            "--tasks",
            run.parent / "tasks.jsonl",
            "--harness",
            harness,
        ]
        self._command += ["--engine", engine, "--model", model, "--port", "0", *arguments]
        self.start()

    def start(self) -> None:
        """Start it, once more after a kill. Returns when it serves."""
        temporary = self.run.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        env = {**os.environ, "TMPDIR": str(temporary)}
        self.process = subprocess.Popen(
            list(map(str, self._command)),
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
        self.said = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if found := re.search(r"listens at (http://\S+),", line):
                self.url = found[1]
                break
        else:
            self.process.stderr.close()
            raise RuntimeError(f"it ended with {self.process.wait()}: {self.said}")
        self.token = (self.run / "service.token").read_text().strip()
        self.client = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.token}"},
            timeout=600,
            trust_env=False,
        )

    def kill(self) -> None:
        """Kill it with what it started: nobody has time for an end."""
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> int:
        """Wait for its end, and return its status."""
        assert self.process.stderr is not None
        with self.process.stderr as log:
            self.said += log.read()
        self.client.close()
        return self.process.wait()

    def stop(self) -> int:
        """Stop it as Ctrl-C does, and return its status."""
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def submit(self, **request):
        """Send a group, and return the answer."""
        return self.client.post("/groups", json={"task": "words", "sessions": 2, **request})

    def complete(self, name: str, **request):
        """Send a group, and return its events when it has ended."""
        assert self.submit(id=name, **request).status_code == 201
        return self.events_of(name)

    def submit_before(self, name: str, seconds: float, **request) -> bool:
        """Send a group with a deadline in so many seconds. Return False if it came too late."""
        deadline = datetime.now(UTC) + timedelta(seconds=seconds)
        answer = self.submit(id=name, deadline=deadline.isoformat(), **request)
        if answer.status_code == 422:
            require_refused(answer, 422, "which is past")
        return answer.status_code == 201

    def view(self, name: str):
        """Return a group."""
        return self.client.get(f"/groups/{name}").json()

    def recorders(self) -> list[int]:
        """Return the process ids of its recorders."""
        return [pid for pid, name in processes(str(self.run)).items() if "mitmdump" in name]

    def events(self, after: str | None = None, *, until=is_end):
        """Return the events after a cursor, to the first one that is asked for, as (cursor, kind,
        data)."""
        found = []
        lines = {}
        params = {"after": after} if after else {}
        with self.client.stream("GET", "/events", params=params) as stream:
            for line in stream.iter_lines():
                name, _, value = line.partition(": ")
                lines[name] = value
                if not line and "id" in lines:
                    event = (lines["id"], lines["event"], json.loads(lines["data"]))
                    found.append(event)
                    if until(*event[1:]):
                        return found
                    lines = {}
        raise AssertionError(f"the stream ended: {found}")

    def events_of(self, name: str):
        """Return the events of a group, to its end."""
        events = self.events(until=lambda kind, data: (kind, data.get("id")) == ("ended", name))
        return [event for event in events if event[2].get("id") == name]


def shut(engine):
    """Let replies with `hold_after` wait again for `engine.release()`."""
    engine.loop.call_soon_threadsafe(engine._released.clear)
    engine.holding.clear()  # of a call whose client has gone a moment ago


def hold(engine, *before):
    """Let the next call wait for `engine.release()`, or the one after those with the replies
    `before`."""
    shut(engine)
    engine.replies.extend([*before, Say("good.", hold_after=1)])


@contextmanager
def serving(*arguments, **how):
    """Serve inside of the block."""
    served = Served(*arguments, **how)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()
