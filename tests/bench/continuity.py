"""Measure how many calls of the real harnesses are continued token for token, and why the others
are not.

    python -m tests.bench.continuity

Each session runs the unmodified program under the recorder. The engine's replies are those of
`tests/bench/awkward.py` and the same in every run. A program that is not installed is left out.
`with context` counts the continued calls with assistant messages among the new ones.
"""

import asyncio
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from transformers import AutoTokenizer

from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from tests.bench.awkward import replies
from tests.bench.frame import Rows, command, model_option
from tests.bench.verdict import first_words
from tests.harness.programs import PROGRAMS
from tests.scripted_engine import Reply, Say, ScriptedEngine

CONCURRENCY = 2
TIMEOUT = 180.0
_CASE = re.compile(r"case-\d{4}")
_CWD = re.compile(r"/\S+/rolltap-\w+/workspace")


def lead(harness: str, tokenizer: Any) -> Callable[[dict[str, Any]], Reply]:
    """Return a model that gives the replies of each session in order. The instruction names the
    session."""
    program = PROGRAMS[harness]
    left: dict[str, list[str]] = {}

    def reply(request: dict[str, Any]) -> Reply:
        prompt = tokenizer.decode(request["token_ids"])
        case = _CASE.search(prompt)
        if case is None or program.agent not in prompt:
            return Say(program.aside)
        if case[0] not in left:
            cwd = _CWD.search(prompt)
            left[case[0]] = replies(program, random.Random(case[0]), cwd[0] if cwd else ".")
        session = left[case[0]]
        return Say(session.pop(0) if len(session) > 1 else session[0])

    return reply


def play(harness: Harness, sessions: int, run: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    groups = []
    for number in range(sessions):
        case = f"case-{number:04}"
        instruction = f"Try the tools in this folder; it is for {case}."
        task = Task(id=case, instruction=instruction, evaluate=["true"])
        groups.append(Group(task, f"g{number}", [f"g{number}-0"]))
    with ScriptedEngine(tokenizer, max_model_len=200_000) as engine:
        engine.otherwise = lead(harness.name, tokenizer)
        options = {"confdir": str(run.parent / "mitmproxy")}
        config = RolloutConfig(concurrency=CONCURRENCY, timeout=TIMEOUT, recorder=options)
        with Worker(config, harness=harness, engine=engine.url, model=model, out=run) as worker:
            asyncio.run(worker.run(groups))


def count(harness: str, run: Path) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    roles: Counter[str] = Counter()
    why: Counter[str] = Counter()
    with_context = 0
    for calls in RecordedCalls(run).values():
        for call in calls:
            kinds[call.kind] += 1
            roles[call.role] += 1
            if call.kind == "rendered":
                why[first_words(call)] += 1
            if call.kind == "bridged":
                # it may continue an older call's reply
                said = [message["role"] for message in call.parsed_messages]
                with_context += "assistant" in said
    sessions = load_sessions(run).values()
    return {
        "harness": harness,
        "sessions": len(sessions),
        "completed": sum(session.status == "completed" for session in sessions),
        "calls": kinds.total(),
        "root": kinds["root"],
        "bridged": kinds["bridged"],
        "rendered": kinds["rendered"],
        "with context": with_context,
        "roles": roles,
        "why": why,
    }


@command
@click.option("--sessions", default=20, help="Sessions of each harness.")
@click.option(
    "--harness", "names", multiple=True, type=click.Choice(Harness.names()), help="Only these."
)
@model_option
def main(sessions: int, names: tuple[str, ...], model: Path) -> dict[str, Rows]:
    """Count the calls of every installed harness that are continued token for token."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or Harness.names():
            harness = Harness.load(name)
            if shutil.which(harness.program) is None:
                click.echo(f"{name} is not installed: {harness.install}", err=True)
                continue
            play(harness, sessions, Path(scratch, name), model)
            rows.append(count(name, Path(scratch, name)))
    if not rows:
        raise click.ClickException("no harness is installed")
    return {"awkward replies": rows}


if __name__ == "__main__":
    main()
