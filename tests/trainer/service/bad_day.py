"""A service on a bad day: at chosen requests to its engine, something of it is killed, and its
clients with it.

To a service, a client that closes its connection is one that was killed.
"""

import json
import os
import random
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from socket import SHUT_RDWR
from urllib.parse import urlsplit

from tests.conftest import free_port
from tests.scripted_engine import Say, ScriptedEngine
from tests.trainer.rollouts.soak import processes
from tests.trainer.service.served import HARNESS, Served, program

TWICE = f"""import os, signal
for _ in range(2):
    exec({HARNESS!r})
    "ENDLESS" in os.environ and signal.pause()
"""
JUDGE = (
    'mv "$0/kill" "$0/killed-$$" 2>/dev/null && kill -9 $$; test -f answer.txt && grep -q good'
    " answer.txt"
)
"""The judge's script. A file `kill` in the day's folder is an order that it takes once."""

Step = tuple[str, str, dict]
"""Method, path and body of a client's request. A `deadline` is in seconds from there."""


class BadDay:
    """A service into `folder / "run"` whose clients take a step each time that the engine has got
    `every` requests.

    `acts` are done at the requests to the engine with these numbers, or later, when there is
    something to kill. The clients of every third step are killed before the answer, and new ones
    send it again.
    """

    def __init__(
        self,
        tokenizer,
        model: Path,
        folder: Path,
        steps: Sequence[Step],
        acts: Mapping[int, str],
        every=1,
    ):
        self.folder = folder
        self.steps = steps
        self.acts = acts
        self.groups = {body["id"]: body for _, _, body in steps if body}
        self.done: list[str] = []
        self.seen: list[tuple[str, str, dict]] = []
        """Cursor, kind and data of the events that the follower got, over all its connections."""
        self.statuses: list[int] = []
        """Status of each process of the service that has ended."""
        self.said = ""
        self._every = every
        self._due: list[str] = []
        self._requests = 0
        self._tokenizer = tokenizer
        self._random = random.Random(0)
        self._came = threading.Condition()
        self._up = threading.Event()
        self._over = False
        self._follower: HTTPConnection | None = None
        self._replacing = threading.Thread(target=self._replace)
        self._engine = self._start_engine(free_port())  # it stays free while the engine is replaced
        task = {"instruction": "go", "evaluate": ["sh", "-c", JUDGE, str(folder)]}
        tasks = [{"id": f"t{number}", **task} for number in range(4)]
        tasks.append({"id": "endless", "env": {"ENDLESS": "1"}, **task})
        harness = program(folder, TWICE)
        self.service = Served(folder / "run", self._engine.url, model, harness, tasks=tasks)
        self._up.set()

    def endure(self) -> None:
        """Take the steps, until all groups have ended; then stop the service, as Ctrl-C does."""
        follower = threading.Thread(target=self._follow)
        others = [threading.Thread(target=part) for part in (self._restart, self._take_steps)]
        for thread in (follower, *others):
            thread.start()
        follower.join(3600)
        stuck = follower.is_alive()
        self._over = True
        self.service.process.send_signal(signal.SIGINT)
        if self._replacing.ident:
            others.append(self._replacing)
        for thread in (follower, *others):
            thread.join()
        self._engine.__exit__()
        assert not stuck, f"{self.done}, {self._requests} requests\n{self.said}\n{self.seen[-20:]}"

    def _start_engine(self, port: int) -> ScriptedEngine:
        engine = ScriptedEngine(self._tokenizer, port=port)
        engine.otherwise = self._reply
        return engine.__enter__()

    def _replace(self) -> None:
        self._engine.__exit__()
        self._engine = self._start_engine(self._engine.port)

    def _reply(self, _) -> Say:
        with self._came:
            self._requests += 1
            if self._requests in self.acts:
                self._due.append(self.acts[self._requests])
            if self._due and self._act(self._due[0]):
                self.done.append(self._due.pop(0))
            self._came.notify_all()
            return Say(self._random.choice(["good.", "bad."]))

    def _act(self, act: str) -> bool:
        """Do it. Return False when there is nothing to kill."""
        if act == "replace the engine":
            self._replacing.start()
        elif act == "kill a judge":
            (self.folder / "kill").touch()
        elif act == "kill the follower":
            if self._follower is None or self._follower.sock is None:
                return False
            self._follower.sock.shutdown(SHUT_RDWR)
        elif act == "kill the service":
            if not self._up.is_set():
                return False
            self._up.clear()
            self.service.process.kill()
        else:
            name = "mitmdump" if act == "kill the recorder" else " -c import os, signal"
            killed = False
            for process, command in processes(str(self.folder)).items():
                if name in command:
                    with suppress(ProcessLookupError):  # it has ended by itself
                        os.kill(process, signal.SIGKILL)
                        killed = True
            return killed
        return True

    def _restart(self) -> None:
        """Start the service again whenever it was killed."""
        while True:
            self.statuses.append(self.service.end())
            self.said += self.service.said
            if self._over or self.statuses[-1] != -signal.SIGKILL:
                return
            self.service.start()
            self._up.set()

    def _ask(self, method: str, path: str, body: dict | None = None) -> HTTPConnection:
        self._up.wait()
        client = HTTPConnection(urlsplit(self.service.url).netloc, timeout=600)
        headers = {
            "authorization": f"Bearer {self.service.token}",
            "content-type": "application/json",
        }
        client.request(method, path, json.dumps(body) if body else None, headers)
        return client

    def _follow(self) -> None:
        while not self._over:
            after = f"?after={self.seen[-1][0]}" if self.seen else ""
            lines: dict[str, str] = {}
            with (
                suppress(OSError, HTTPException),
                closing(self._ask("GET", f"/events{after}")) as self._follower,
            ):
                for line in self._follower.getresponse():
                    name, _, value = line.decode().rstrip("\n").partition(": ")
                    lines[name] = value
                    if not name and "id" in lines:
                        self.seen.append((lines["id"], lines["event"], json.loads(lines["data"])))
                        lines = {}
                        ended = {data["id"] for _, kind, data in self.seen if kind == "ended"}
                        if ended == {*self.groups}:
                            return

    def _take_steps(self) -> None:
        for number, (method, path, body) in enumerate(self.steps):
            with self._came:
                self._came.wait_for(
                    lambda least=number * self._every: self._requests >= least or self._over
                )
            if isinstance(seconds := body.get("deadline"), int):
                body["deadline"] = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
            answered = False
            dies = number % 3 == 1
            while not answered and not self._over:
                with (
                    suppress(OSError, HTTPException),
                    closing(self._ask(method, path, body)) as client,
                ):
                    answered = not dies and client.getresponse().status < 300
                    dies = False
