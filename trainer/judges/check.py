"""Checking the judges of tasks before the first session: what can only be `unjudged` later is an
error now."""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.judges.command import modules, require_parser
from rolltap.trainer.judges.layout import LAUNCH
from rolltap.trainer.judges.model import find_key, require_other_model
from rolltap.trainer.judges.verdict import UnjudgedError
from rolltap.trainer.tasks.task import (
    Judge,
    LLMJudge,
    PytestJudge,
    PythonJudge,
    SeveralJudges,
    Task,
)

_IMPORT_SECONDS = 120.0


def check_judges(tasks: Sequence[Task], engine: str) -> None:
    """Check that the judges of tasks can judge here. `engine` is a URL of the policy's, or several
    with commas.

    A function is imported, in a process of its own, once per process. Raises `InputError` that
    names the task and the key of its judge, and `MissingPackageError` for a package that the judge
    needs.
    """
    urls = [url.strip() for url in engine.split(",")]
    for task in tasks:
        _check(f"task {task.id}, judge", task.effective_judge, urls)


def _check(where: str, spec: Judge, engine_urls: Sequence[str]) -> None:
    key = ""
    try:
        match spec:
            case SeveralJudges():
                for number, one in enumerate(spec.judges):
                    _check(f"{where}.judges[{number}].judge", one.judge, engine_urls)
            case LLMJudge():
                key = "key_env"
                find_key(spec)
                key = "url"
                require_other_model(spec, engine_urls)
            case PythonJudge():
                key = "function"
                if why := _import_fault(spec.function, modules(spec)):
                    raise UnjudgedError(f"{spec.function} cannot be imported: {why}")
            case PytestJudge(log_parser=str(parser)):
                key = "log_parser"
                require_parser(parser)
    except UnjudgedError as error:
        raise InputError(f"{where}.{key}: {error}") from error


@lru_cache(maxsize=1024)
def _import_fault(function: str, path: str) -> str | None:
    """Return why a function cannot be imported with a PYTHONPATH, None if it can."""
    command = [sys.executable, "-BP", str(LAUNCH), "", "--function", function]
    env = {**clean_environment(Path(os.devnull)), "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {_IMPORT_SECONDS:g} s"
    if done.returncode == 0:
        return None
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return said[:300] or f"status {done.returncode}"
