"""One session of a real program, and its records."""

import json
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from rolltap.addons.store.records import Call
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.rollouts.config import Budget, RolloutConfig
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import iter_sessions
from tests.harness.programs import PROGRAMS

REQUIRED = "ROLLTAP_REQUIRE_HARNESSES"
"""Variable that is set where every program is installed: a failed installation must not look like a
success."""
TIMEOUT = 1200.0


class Played:
    """A run with the one session of a program that has ended, none without a call; and the output
    of the program."""

    def __init__(self, run: Path, log: str) -> None:
        self.run = run
        self.log = log
        self.session = None
        self.calls: list[Call] = []
        for recorded in iter_sessions(run):
            assert self.session is None
            self.session = recorded.session
            self.calls = recorded.calls
        self.main = [call for call in self.calls if call.role == "agent"]
        self.events = list(read_rows(run, "events"))
        self.kinds = {event["kind"] for event in self.events}
        self.summary = summarize(run)

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def sampled(self) -> int:
        """Number of tokens that were sampled."""
        return sum(len(call.completion_ids) for call in self.calls)

    def check_won(self) -> None:
        """Assert that the session has its reward."""
        ended = (self.session.status, self.session.reward)
        assert ended == ("completed", 1.0), self.session.error or self.log

    def check_whole(self) -> None:
        """Assert that all calls were captured, completed, and kept every invariant."""
        assert {(call.status, call.violation) for call in self.calls} == {("completed", None)}
        assert self.summary.uncaptured_calls == 0
        assert self.summary.ledger.sampled == self.sampled

    def until(self, call: Call) -> dict[str, str]:
        """Return the option of a recorder that forks the session at a call."""
        place = {"session": call.session_id, "until": call.started_at.isoformat()}
        return {"rolltap_rerun": json.dumps({"run": str(self.run), **place})}


def installed(name: str) -> Harness:
    """Return the preset of a program. Ends the test as `missing` does when the program is not
    installed."""
    harness = Harness.load(name)
    if shutil.which(harness.program) is None:
        if name == "openhands" and not _python_312():
            pytest.skip("OpenHands needs Python 3.12")
        missing(name)
    return harness


def missing(what: str) -> NoReturn:
    """Skip the test because `what` is not installed. Where `REQUIRED` is set, as in CI, the test
    fails instead."""
    end = pytest.fail if os.environ.get(REQUIRED) else pytest.skip
    end(f"{what} is not installed: tests/run.sh installs it")


def _python_312() -> bool:
    """Return True if recipes/environments.sh finds a Python 3.12."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return shutil.which("python3.12") is not None or any(pyenv.glob("versions/3.12*"))


async def play_session(
    harness: Harness,
    task: Task,
    engine,
    model: Path,
    folder: Path,
    *,
    budget: Budget | None = None,
    **options: str,
) -> Played:
    """Record one session into its own run under `folder`, with a budget and further options of the
    recorder."""
    run = folder / "run"
    recorder = {"confdir": str(folder / "mitmproxy"), **options}
    limits = {"timeout": TIMEOUT, "retries": 0, "budget": budget or Budget()}
    config = RolloutConfig(recorder=recorder, **limits)
    async with Worker(config, harness=harness, engine=engine.url, model=model, out=run) as worker:
        await worker.run([Group(task, task.id, [f"{task.id}-0"])])
    return Played(run, next((run / "logs").glob("*[0-9].log")).read_text())


def shell(harness: Harness, command: str) -> str:
    """Return a turn that runs `command` with the program's own shell tool."""
    return tool_call(*PROGRAMS[harness.name].call(0, {"COMMAND": command}))


def tool_call(name: str, arguments: dict) -> str:
    """Return a turn with unusual JSON: a harness that parses and serialises it again sends other
    text back."""
    pairs = []
    for key, value in arguments.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, str):
            text = text.replace("e", "\\u0065")
        pairs.append(f'  "{key}" :  {text}')
    call = f'{{"arguments":{{{",".join(pairs)} }}, "name": "{name}"}}'
    return f"<think>\nI call {name}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
