"""Runs a program once under a recorder and the scripted engine, without vLLM, and says what came of
it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from rolltap.addons.engine.key import make_key
from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Event, Session
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.supervised import run_supervised
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.doctor.diagnosis import Diagnosis
from rolltap.trainer.doctor.findings import Observed
from rolltap.trainer.doctor.scripted_engine import Say, ScriptedEngine
from rolltap.trainer.doctor.scripted_model import (
    FINAL,
    INSTRUCTION,
    RENDERER,
    ByteTokenizer,
    next_reply,
)
from rolltap.trainer.judges.command import read_end
from rolltap.trainer.locks import workplace
from rolltap.trainer.rollouts.harness import Harness, reported_version
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.traces.facts import model_places
from rolltap.trainer.traces.reader import RecordedCalls

CONTEXT = 1_000_000
"""Context window of the engine in tokens, which are bytes. The first prompts of some programs have
150,000."""
OPTIONS = {
    "rolltap_renderer": RENDERER,
    "rolltap_max_calls": "40",  # a program that goes on after the final answer ends there
    "rolltap_patience": "5",  # seconds: the engine is in this process, and does not come back
}
"""Options of the recorder."""
_SESSION = "doctor"
_OUTPUT = 8192
"""Bytes of the end of the program's output that are kept."""


def examine(
    command: Sequence[str] = (),
    *,
    harness: str | None = None,
    timeout: float = 120.0,
    options: Mapping[str, Sequence[str]] | None = None,
    tool: str | None = None,
) -> Diagnosis:
    """Run a program once, led by scripted replies, and return what was seen and what it means.

    `command` is a command line that runs here, with this process's environment. `harness` is the
    name of a preset or a `.toml` file: its program works on an instruction in an empty folder, with
    a home of its own. Give one of them. All that the program starts ends with it, after `timeout`
    seconds at the latest. `options` are further options of the recorder, each with its values.
    `tool` is the name of the tool that the scripted model calls, by default one whose name says
    that it does no harm. No model, engine, GPU or network is needed, and nothing is kept.

    Raises `InputError` for a program that is not there; `MissingPackageError` without mitmproxy;
    `RecorderError` when the recorder does not start or dies.
    """
    if bool(command) == (harness is not None):
        raise InputError("give a command or a harness")
    if harness is None:
        preset = None
        program = Harness(name=command[0], program=command[0], headless=[])
    else:
        program = preset = Harness.load(harness)
    program.require_program()
    with workplace() as work:
        tokenizer = ByteTokenizer(work / "model")
        key = work / "engine.key"  # not that of the user's engines
        make_key(key)
        log = work / "output.log"
        settings = {**OPTIONS, "rolltap_engine_key_file": str(key), **(options or {})}
        with ScriptedEngine(tokenizer, max_model_len=CONTEXT) as engine:
            engine.otherwise = partial(_say, tokenizer, tool)
            if preset is None:
                folder = Path.cwd()
                environment = dict(os.environ)
                environment.pop("ROLLTAP_ENGINE_KEY_FILE", None)
                about: dict[str, Any] = {}
            else:
                folder = work / "workspace"
                home = work / "home"
                folder.mkdir()
                home.mkdir()
                command = preset.command_for(INSTRUCTION)
                environment = {**clean_environment(home), **preset.environment(engine.url)}
                about = {
                    "version": run_blocking(reported_version(preset, ProcessRuntime(), work)),
                    "tested_version": preset.version,
                    "install": preset.install,
                    "quirks": preset.quirks,
                }
            run = work / "run"
            model = work / "model"
            with Recorder(run, engine=engine.url, model=model, options=settings) as recorder:
                proxied = {**environment, **recorder.environment(_SESSION)}
                running = run_supervised(
                    command,
                    cwd=folder,
                    env=proxied,
                    timeout=timeout,
                    log=log,
                )
                ended = run_blocking(running)
                recorder.end(Session(session_id=_SESSION, status="completed"))
        seen = Observed(
            program=program.name,
            exit_status=ended.status,
            stopped=ended.stopped,
            timeout=timeout,
            output=read_end(log, _OUTPUT),
            calls=RecordedCalls(run).get(_SESSION, []),
            events=_events(run),
            tool=tool,
            places=model_places(command, environment),
            **about,
        )
    return Diagnosis(seen)


def _say(tokenizer: ByteTokenizer, tool: str | None, request: Mapping[str, Any]) -> Say:
    """Return the model's turn.

    An error of ours must not be taken for one of the program: it gets the final answer.
    """
    try:
        prompt = tokenizer.decode(request["token_ids"])
        return Say(next_reply(prompt, _schema(request), tool))
    except Exception:  # whatever a program put into its prompt
        return Say(FINAL)


def _schema(request: Mapping[str, Any]) -> Any:
    """Return the JSON schema that the reply to a request of the engine must match, or None."""
    parameters = request.get("sampling_params") or {}
    wanted = parameters.get("structured_outputs") or {}
    if wanted.get("json"):
        return wanted["json"]
    return {"type": "object"} if wanted.get("json_object") else None


def _events(run: Path) -> list[Event]:
    """Return the events of a run that are not about the way of a recorded call."""
    names = [field.name for field in fields(Event)]
    events = []
    for row in read_rows(run, "events"):
        if row["kind"] not in ("call_started", "ended"):
            events.append(Event(**{name: row[name] for name in names}))
    return events
