"""A rollout on a bad day: starts and judges fail, the recorder and rolltap are killed, the engine
is restarted.

`endure` leads the rollout, which is this module as a program, and kills by the engine's requests:
at some of them it kills rolltap, its recorder, or replaces the engine. A rollout that was stopped
is started again by the same command. Which starts and judges fail depends on the task, the
session's index and its attempt.
"""

import contextvars
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import rolltap
from rolltap.trainer.boxes.process import ProcessBox, ProcessRuntime
from rolltap.trainer.boxes.runtime import BoxSpec
from rolltap.trainer.rollouts import runner, session
from tests.boxes import wait_until_dead
from tests.conftest import free_port
from tests.scripted_engine import Reply, Say, ScriptedEngine

FAILING_STARTS = 0.25
FAILING_JUDGES = 0.3
TASKS = 4
SESSIONS = 16
SEED = 1

HARNESS = """
import json, os, subprocess, urllib.request
subprocess.Popen(["sleep", "86400"], start_new_session=True)
for text in ("Hello", "More"):
    ask = {"model": "m", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        "https://api.openai.com/v1/chat/completions", json.dumps(ask).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer = json.load(reply)["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
"""

_current: contextvars.ContextVar[str] = contextvars.ContextVar("current", default="")


class BadDay(ProcessRuntime):
    """Processes whose boxes cannot be made now and then."""

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[ProcessBox]:
        """Yield a box, or raise `OSError`: more often for a judge, which has no proxy."""
        what = "start"
        rate = FAILING_STARTS
        if spec.proxy is None:
            what = "judge"
            rate = FAILING_JUDGES
        place = re.sub("-[0-9a-f]{8}[.]", "-", _current.get())
        if place and random.Random(f"{SEED}/{what}/{place}").random() < rate:
            raise OSError(f"no box for the {what}")
        async with super().box(spec) as box:
            yield box


def roll_out(engine: str, model: str, out: str) -> None:
    run_session = session.run_session

    async def named(context: Any, attempt: Any, enter: Any) -> Any:
        _current.set(attempt.session_id)
        return await run_session(context, attempt, enter)

    session.run_session = named
    runner.PAUSE_SECONDS = 0.0
    rolltap.rollout(
        [
            rolltap.Task(
                id=f"t{number}", instruction="go", evaluate=["sh", "-c", "test -s answer.txt"]
            )
            for number in range(TASKS)
        ],
        harness=rolltap.Harness(name="x", program=sys.executable, headless=["-I", "-c", HARNESS]),
        engine=engine,
        model=model,
        out=out,
        sessions=SESSIONS // TASKS,
        concurrency=4,
        runtime=BadDay(),
        retries=4,
        give_up_after=16,
        recorder={"confdir": f"{out}-mitmproxy"},
    )


def processes(marker: str) -> dict[int, str]:
    """Return the processes with `marker` on their command line or in their environment: id ->
    command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            known = command + (folder / "environ").read_bytes()
            if int(folder.name) != os.getpid() and marker.encode() in known:
                found[int(folder.name)] = command.decode(errors="replace")
        except (OSError, ValueError):
            continue
    return found


def left(marker: str) -> dict[int, str]:
    """Return the `processes` that do not end. The recorder of a killed rollout takes its time."""
    return {pid: line for pid, line in processes(marker).items() if not wait_until_dead(pid)}


class BadLuck:
    """An engine that acts at its requests, in place of others and of itself. `at` is number of the
    request -> act."""

    def __init__(self, tokenizer: Any, run: Path, at: Mapping[int, str]) -> None:
        self.rollout: subprocess.Popen[bytes]
        self.done: list[str] = []
        self._tokenizer = tokenizer
        self._run = run
        self._at = at
        self._requests = 0
        self._restarting = threading.Thread()
        self.engine = self._engine(free_port())  # it stays free while the engine is restarted

    def _engine(self, port: int) -> ScriptedEngine:
        engine = ScriptedEngine(self._tokenizer, port=port)
        engine.otherwise = self._reply
        return engine.__enter__()

    def _reply(self, request: dict[str, Any]) -> Reply:
        self._requests += 1
        act = self._at.get(self._requests)
        if act is not None:
            self.done.append(act)
        if act == "kill rolltap":
            self.rollout.kill()
        elif act == "kill the recorder":
            for process, command in processes(f"rolltap_out={self._run}").items():
                if "mitmdump" in command:
                    with suppress(ProcessLookupError):  # it has ended by itself
                        os.kill(process, signal.SIGKILL)
        elif act == "restart the engine":
            self._restarting = threading.Thread(target=self._restart)
            self._restarting.start()
        return Say("Done.")

    def _restart(self) -> None:
        self.engine.__exit__()
        self.engine = self._engine(self.engine.port)

    def end(self) -> None:
        """End the engine."""
        if self._restarting.ident is not None:
            self._restarting.join()
        self.engine.__exit__()


def endure(tokenizer: Any, folder: Path, at: Mapping[int, str]) -> tuple[list[int], list[str]]:
    """Roll out until a rollout ends with status 0. Return the status of each start, and the acts
    that were done.

    The run is `folder / "run"`. All processes have the folder on their command line or in their
    environment.
    """
    run = folder / "run"
    temporary = folder / "tmp"
    temporary.mkdir()
    luck = BadLuck(tokenizer, run, at)
    statuses: list[int] = []
    arguments = [luck.engine.url, luck.engine.root, str(run)]
    try:
        with (folder / "rollout.log").open("ab") as log:
            while len(statuses) < len(at) + 4 and 0 not in statuses:
                luck.rollout = subprocess.Popen(
                    [sys.executable, "-m", __name__, *arguments],
                    env={**os.environ, "TMPDIR": str(temporary)},
                    stdout=log,
                    stderr=log,
                )
                statuses.append(luck.rollout.wait())
    finally:
        luck.end()
    return statuses, luck.done


if __name__ == "__main__":
    roll_out(*sys.argv[1:])
