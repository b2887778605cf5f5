"""One session of a real program, and what is left of it."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from rolltap.addons.store.records import Call, Session
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.scheduler import Plan, run_groups
from rolltap.trainer.rollouts.task import Task
from rolltap.trainer.traces.reader import RecordedCalls
from rolltap.trainer.views.report import Summary, summarize


@dataclass(frozen=True)
class Played:
    """A session that has ended."""

    session: Session
    calls: list[Call]
    events: list[dict]
    summary: Summary
    log: str
    """What the program printed."""
    recorder_log: str

    @property
    def main(self) -> list[Call]:
        """The calls of the program's main line."""
        return [call for call in self.calls if call.role == "agent"]

    def of(self, kind: str) -> list[dict]:
        """The events of one kind."""
        return [event for event in self.events if event["kind"] == kind]


def installed(name: str) -> Harness:
    """The preset of a program, or a skipped test."""
    harness = Harness.load(name)
    if shutil.which(harness.program) is None:
        pytest.skip(f"{name} is not installed: tests/run.sh installs it")
    return harness


async def play(
    harness: Harness, task: Task, engine, model: Path, folder: Path, options: Mapping[str, str] | None = None
) -> Played:
    """Run one session in a run of its own within `folder`, under a recorder with `options`."""
    run = folder / "run"
    options = {"confdir": str(folder / "mitmproxy"), **(options or {})}
    with Recorder(run, engine=engine.url, model=str(model), options=options) as recorder:
        plan = Plan(harness, 1, 1, 120.0)
        (session,) = await run_groups([task], plan, recorder, policy_version="default", advance=lambda *_: None)
    return Played(
        session=session,
        calls=RecordedCalls(run)[session.session_id],
        events=list(read_rows(run, "events")),
        summary=summarize(run),
        log=next((run / "logs").glob("*[0-9].log")).read_text(),
        recorder_log=(run / "recorder.log").read_text(),
    )


def shell(harness: Harness, command: str) -> str:
    """A turn that runs `command` with the program's own shell tool."""
    name, arguments = {
        "claude-code": ("Bash", {"command": command, "description": "Work"}),
        "codex": ("exec_command", {"cmd": command}),
        "qwen-code": ("run_shell_command", {"command": command, "is_background": False}),
    }[harness.name]
    return tool_call(name, arguments)


def tool_call(name: str, arguments: dict) -> str:
    """A turn with JSON that no serialiser would write: a harness that echoes it in its own words changes it."""
    pairs = ",".join(f'  "{key}" :  {_odd(value)}' for key, value in arguments.items())
    call = f'{{"arguments":{{{pairs} }}, "name": "{name}"}}'
    return f"<think>\nI call {name}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def _odd(value: object) -> str:
    """JSON with the letter e as an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("e", "\\u0065") if isinstance(value, str) else text
