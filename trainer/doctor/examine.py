"""Runs a program once under a recorder and the scripted engine, without vLLM, and says what came of it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Event, Session
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.doctor.conversation import FINAL, INSTRUCTION, next_reply
from rolltap.trainer.doctor.diagnosis import Diagnosis
from rolltap.trainer.doctor.node import node_version
from rolltap.trainer.doctor.observed import Observed, loopback_urls
from rolltap.trainer.doctor.scripted_engine import Say, ScriptedEngine
from rolltap.trainer.doctor.tokenizer import RENDERER, MadeTokenizer
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.judges.command import read_end
from rolltap.trainer.rollouts.mitmdump import workplace
from rolltap.trainer.rollouts.provenance import reported_version
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.rollouts.runtimes.process import ProcessRuntime
from rolltap.trainer.rollouts.runtimes.supervised import run_supervised
from rolltap.trainer.traces.reader import RecordedCalls

CONTEXT = 1_000_000
"""Context window of the engine in tokens. The first prompts of some programs have 30,000."""
MOST_CALLS = 40
"""Model calls that a program may make. One that goes on after the final answer ends there."""
_PATIENCE = 5
"""Seconds during which a call is tried again after a failure of the engine, which is in this process."""
_SESSION = "doctor"
_OUTPUT = 8192
"""Bytes of the end of the program's output that are kept."""


@dataclass(frozen=True, slots=True)
class _Program:
    """How a program is started: its command, whole environment and folder, without the recorder's variables."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path


def examine(
    command: Sequence[str] = (),
    *,
    harness: str | None = None,
    timeout: float = 120.0,
    options: Mapping[str, Sequence[str]] | None = None,
) -> Diagnosis:
    """Run a program once, led by scripted replies, and return what was seen and what it means.

    `command` is a command line that runs here, with this process's environment. `harness` is the name of a preset or a
    `.toml` file: its program works on an instruction in an empty folder, with a home of its own. Give one of them. All
    that the program starts ends with it, after `timeout` seconds at the latest. `options` are further options of the
    recorder, each with its values. No model, engine, GPU or network is needed, and nothing is kept.

    Raises `InputError` for a program that is not there; `MissingPackageError` without mitmproxy; `RecorderError` when
    the recorder does not start or dies.
    """
    if bool(command) == (harness is not None):
        raise InputError("give a command or a harness")
    preset = Harness.load(harness) if harness is not None else None
    (preset or Harness(name=command[0], program=command[0], headless=[])).require_program()
    with workplace() as work:
        tokenizer = MadeTokenizer(work / "model")
        with ScriptedEngine(tokenizer, max_model_len=CONTEXT) as engine:
            engine.otherwise = lambda request: Say(_reply(tokenizer.decode(request["token_ids"]), _schema(request)))
            program = _given(command) if preset is None else _of_preset(preset, engine.url, work)
            settings = {
                "rolltap_renderer": RENDERER,
                "rolltap_engine_key_file": "",
                "rolltap_max_calls": str(MOST_CALLS),
                "rolltap_patience": str(_PATIENCE),
                **(options or {}),
            }
            with Recorder(work / "run", engine=engine.url, model=work / "model", options=settings) as recorder:
                log = work / "output.log"
                environment = {**program.environment, **recorder.environment(_SESSION)}
                ended = run_blocking(
                    run_supervised(program.command, cwd=program.folder, env=environment, timeout=timeout, log=log)
                )
                recorder.end(Session(session_id=_SESSION, status="completed"))
        seen = Observed(
            program=program.name,
            exit_status=ended.status,
            stopped=ended.stopped,
            timeout=timeout,
            output=read_end(log, _OUTPUT),
            calls=RecordedCalls(work / "run").get(_SESSION, []),
            events=_events(work / "run"),
            node=node_version(program.command[0], environment),
            loopback=loopback_urls(program.environment, program.command),
            **({} if preset is None else _about(preset, work)),
        )
    return Diagnosis.of(seen)


def _given(command: Sequence[str]) -> _Program:
    environment = {name: value for name, value in os.environ.items() if name != "ROLLTAP_ENGINE_KEY_FILE"}
    return _Program(command[0], command, environment, Path.cwd())


def _of_preset(preset: Harness, engine: str, work: Path) -> _Program:
    home, workspace = work / "home", work / "workspace"
    home.mkdir()
    workspace.mkdir()
    environment = {**clean_environment(home), **preset.environment(engine)}
    return _Program(preset.name, preset.command_for(INSTRUCTION), environment, workspace)


def _about(preset: Harness, work: Path) -> dict[str, Any]:
    """Return the fields of `Observed` that a preset has."""
    return {
        "version": run_blocking(reported_version(preset, ProcessRuntime(), work)),
        "tested_version": preset.version,
        "install": preset.install,
        "quirks": preset.quirks,
    }


def _reply(prompt: str, schema: Any) -> str:
    """Return the model's turn. An error of ours must not be taken for one of the program: it gets the final answer."""
    try:
        return next_reply(prompt, schema)
    except Exception:  # whatever a program put into its prompt
        return FINAL


def _schema(request: Mapping[str, Any]) -> Any:
    """Return the JSON schema that the reply to a request of the engine must match, or None."""
    wanted = (request.get("sampling_params") or {}).get("structured_outputs") or {}
    return wanted.get("json") or ({"type": "object"} if wanted.get("json_object") else None)


def _events(run: Path) -> list[Event]:
    """Return the events of a run that are not about the way of a recorded call."""
    rows = read_rows(run, "events")
    events = (Event(**{field.name: row[field.name] for field in fields(Event)}) for row in rows)
    return [event for event in events if event.kind not in ("call_started", "ended")]
