"""One session of a real program, and its records."""

import json
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

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


class Played:
    """A run with the one session of a program that has ended, none without a call; and the output
    of the program."""

    def __init__(self, run: Path, log: str) -> None:
        self.run, self.log = run, log
        sessions = list(iter_sessions(run))
        assert len(sessions) <= 1
        self.session = sessions[0].session if sessions else None
        self.calls = sessions[0].calls if sessions else []
        self.main = [call for call in self.calls if call.role == "agent"]
        self.events = list(read_rows(run, "events"))
        self.kinds = {event["kind"] for event in self.events}
        self.summary = summarize(run)

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["kind"] == kind]


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
    (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(
        f"{what} is not installed: tests/run.sh installs it"
    )


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
    config = RolloutConfig(timeout=1200, retries=0, budget=budget or Budget(), recorder=recorder)
    async with Worker(config, harness=harness, engine=engine.url, model=model, out=run) as worker:
        await worker.run([Group(task, task.id, [f"{task.id}-0"])])
    return Played(run, next((run / "logs").glob("*[0-9].log")).read_text())


def shell(harness: Harness, command: str) -> str:
    """Return a turn that runs `command` with the program's own shell tool."""
    return tool_call(*PROGRAMS[harness.name].call(0, {"COMMAND": command}))


def tool_call(name: str, arguments: dict) -> str:
    """Return a turn with unusual JSON: a harness that parses and serialises it again sends other
    text back."""
    pairs = ",".join(f'  "{key}" :  {_odd(value)}' for key, value in arguments.items())
    call = f'{{"arguments":{{{pairs} }}, "name": "{name}"}}'
    return f"<think>\nI call {name}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def _odd(value: object) -> str:
    """Return JSON of a value. In a string every letter e is an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("e", "\\u0065") if isinstance(value, str) else text
