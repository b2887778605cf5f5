"""Checking a task's judge before its first session: what can only be `unjudged` later is an error now."""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.judges.checkout import apply_patch
from rolltap.trainer.rollouts.judges.command import CALL, modules
from rolltap.trainer.rollouts.judges.log import require_parser
from rolltap.trainer.rollouts.judges.model import find_key, require_other_model
from rolltap.trainer.rollouts.judges.verdict import UnjudgedError
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.tasks.content import Start
from rolltap.trainer.tasks.task import CommandJudge, Judge, LLMJudge, PytestJudge, PythonJudge, SeveralJudges, Task

_IMPORT_SECONDS = 120.0


def check_judge(task: Task, start: Start | None = None, engine_urls: Sequence[str] = ()) -> None:
    """Check that a task's judge can judge here. `engine_urls` are the policy's engines.

    Without a `start` it is not checked that the `test_patch` fits it. A function is imported, in a process of its own,
    once per process.

    Raises `InputError` that names the task and the key of its judge, and `MissingPackageError` for a package that the
    judge needs.
    """
    _check(task.id, "judge", task.effective_judge, start, engine_urls)


def _check(task: str, key: str, spec: Judge, start: Start | None, engine_urls: Sequence[str]) -> None:
    if isinstance(spec, SeveralJudges):
        for number, one in enumerate(spec.judges):
            _check(task, f"{key}.judges[{number}].judge", one.judge, start, engine_urls)
        return
    if not isinstance(spec, LLMJudge) and spec.tests is not None and not spec.tests.exists():
        raise InputError(f"task {task}, {key}.tests: {spec.tests} does not exist")
    try:
        if isinstance(spec, LLMJudge):
            name = "key_env"
            find_key(spec)
            name = "url"
            require_other_model(spec, engine_urls)
        elif isinstance(spec, PythonJudge):
            name = "function"
            if why := _import_fault(spec.function):
                raise UnjudgedError(f"{spec.function} cannot be imported: {why}")
        elif isinstance(spec, CommandJudge):
            name = "mounts"
            _check_mounts(spec)
        else:
            name = "log_parser"
            if spec.log_parser is not None:
                require_parser(spec.log_parser)
            name = "test_patch"
            _check_patch(spec, start)
    except UnjudgedError as error:
        raise InputError(f"task {task}, {key}.{name}: {error}") from error


def _check_mounts(spec: CommandJudge) -> None:
    if spec.where == "session" and (spec.mounts or spec.writable):
        raise UnjudgedError("'where' is 'session', and the session's box has no mounts of the judge's: use 'fresh'")
    for source in spec.mounts.values():
        if not source.exists():
            raise UnjudgedError(f"{source} does not exist")


def _check_patch(spec: PytestJudge, start: Start | None) -> None:
    if spec.test_patch and start is not None:
        apply_patch(spec.test_patch, start.folder, only_check=True)


@lru_cache(maxsize=1024)
def _import_fault(function: str) -> str | None:
    """Return why a function cannot be imported, None if it can."""
    command = [sys.executable, "-P", str(CALL), function]
    env = {**clean_environment(Path(os.devnull)), "PYTHONPATH": modules()}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=_IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes more than {_IMPORT_SECONDS:g} s"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return None if done.returncode == 0 else (said or [f"status {done.returncode}"])[-1][:300]
