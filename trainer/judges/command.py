"""Programs as the judge: a command, by its exit status or a value, and a Python function of the
user's.

A command that runs the agent's code in its own process can be told anything by it: it can write the
reward, and end with status 0. Such a command has to run the agent's code as a child, and decide
outside of it. In the runtime `process` that is no protection: the child has all rights of its
parent's user there.

`judge_here` judges by a command in the current directory: for a session that rolltap did not give a
workspace.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError
from rolltap.addons.store.rows import printable
from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.boxes.supervised import run_supervised
from rolltap.trainer.judges.checkout import LAUNCH, Checkout
from rolltap.trainer.judges.verdict import (
    Judged,
    Reward,
    UnjudgedError,
    best_reward,
    parse_text,
    worst_reward,
)
from rolltap.trainer.tasks.task import CommandJudge, PythonJudge

_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_PYTHON_OPTION = re.compile(r"-[bBdEIOPqsSuv]+")
_MAX_REWARD_BYTES = 64 << 10
_FIRST_WORD = re.compile(r"\s*([\w.+-]+)(?=[\s;|&]|$)")
_NOT_FOUND = re.compile(r"(?:^|\s)([\w.+-]+): (?:command )?not found\s*$")
_NO_MODULE = re.compile(r"No module named ['\"]?([\w.]+)[^\n]*\s*$")


async def judge_by_command(spec: CommandJudge, checkout: Checkout) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence. Raises `UnjudgedError`."""
    command, env = spec.command, spec.env
    if not spec.by_status and not spec.reward_files:
        command, env = (
            _with_launcher(command, checkout),
            {**env, "ROLLTAP_REWARD_FILE": checkout.pipe},
        )
    status = await checkout.run(command, env, spec.timeout)
    ended = f"the judge ended with status {status}"
    evidence: dict[str, Any] = {"exit_status": status}
    if not spec.reward_files:
        by_status = read_status(spec, status, checkout.job.log, asked=checkout.job.task.instruction)
        if spec.by_status:
            return by_status, evidence
    if not (written := checkout.verdict(ended, _MAX_REWARD_BYTES)):
        raise UnjudgedError(
            f"{ended} and wrote no reward to"
            f" {' or '.join(spec.reward_files) or 'ROLLTAP_REWARD_FILE'}"
        )
    reward, _, limits = written.decode(errors="replace").partition("\0")
    evidence["limits"] = limits.split()
    return parse_text(reward), evidence


def _with_launcher(command: Sequence[str], checkout: Checkout) -> list[str]:
    """Return a command with the launcher, if it is a Python script, which has the channel to itself
    then."""
    options = list(takewhile(_PYTHON_OPTION.fullmatch, command[1:]))
    program = command[1 + len(options) :]
    if (
        not _PYTHON.fullmatch(command[0])
        or not program
        or (program[0].startswith("-") and program[0] != "-m")
    ):
        return [*command]
    return [command[0], *options, f"{checkout.tools}/rolltap_launch.py", checkout.pipe, *program]


def read_status(spec: CommandJudge, status: int, log: Path, *, asked: str = "") -> Reward:
    """Return the reward by the exit status of a program whose output is in `log`. Raises
    `UnjudgedError`.

    A status of 1 is no verdict when the last line says that a module is missing, unless the task,
    `asked`, names it.
    """
    if status not in (0, 1):
        what = f": {spec.command[0]!r}, or a program in it, is not there" if status == 127 else ""
        raise UnjudgedError(
            f"the judge ended with status {status}, and only 0 and 1 are a verdict{what}; its"
            f" output is in {log.name}"
        )
    if status == 1 and (module := missing_module(read_end(log), asked)):
        raise UnjudgedError(
            f"the judge ended with status 1 and without the module {module}: install it for the"
            " judge"
        )
    return Reward(best_reward(spec) if status == 0 else worst_reward(spec), {})


def missing_module(output: str, asked: str) -> str:
    """Return the Python module that the last line of an output misses, unless the task, `asked`,
    names it."""
    return _missing(_NO_MODULE, output, asked)


def missing_program(output: str, asked: str) -> str:
    """Return the program that a shell did not find on its PATH, by the last line of its output.

    A program with a slash in its name, or one that the task names, may be for the agent to make.
    """
    return _missing(_NOT_FOUND, output, asked)


def _missing(pattern: re.Pattern[str], output: str, asked: str) -> str:
    found = pattern.search(output)
    if found is None or re.search(rf"\b{re.escape(found[1])}\b", asked):
        return ""
    return found[1]


def read_end(log: Path, limit: int = _MAX_REWARD_BYTES) -> str:
    """Return the last `limit` bytes of a file as text."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
        return file.read().decode(errors="replace")


def last_line(log: Path) -> str:
    """Return the last line of a program's output, for a message; empty without output."""
    last = read_end(log, 4096).strip().rpartition("\n")[2].strip() if log.exists() else ""
    return printable(last, 300)


def quote_last_line(why: str, log: Path) -> str:
    """Return a reason with the last line of a judge's output, if there is any."""
    last = last_line(log)
    return f"{why}; its last line: {last}" if last else why


async def judge_by_function(spec: PythonJudge, checkout: Checkout) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence. Raises `UnjudgedError`.

    The function runs in a supervised process outside of the box, with the user's rights and
    modules: it must not run the agent's code. Its environment has no keys of the user's.
    """
    pipe, folder = str(checkout.channel.path), str(checkout.workspace)
    command = [sys.executable, "-BP", str(LAUNCH), pipe, "--function", spec.function, folder]
    env = {**clean_environment(checkout.out), **checkout.job.task.env, "PYTHONPATH": modules(spec)}
    log = checkout.job.log
    ended = await run_supervised(command, cwd=checkout.out, env=env, timeout=spec.timeout, log=log)
    if ended.status is None:
        raise UnjudgedError(f"the function {spec.function} took more than {spec.timeout:g} s")
    checkout.channel.read()
    if ended.status != 0 or not checkout.channel.content:
        how = f"ended by signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
        last = last_line(log) or "no output"
        raise UnjudgedError(f"the function {spec.function} gave no result ({how}): {last}")
    return parse_text(checkout.channel.content.decode(errors="replace")), {}


def modules(spec: PythonJudge) -> str:
    """Return the folders in which a function is looked for, as PYTHONPATH."""
    own = [] if spec.folder is None else [str(spec.folder)]
    return os.pathsep.join(os.path.abspath(entry) for entry in [*own, *sys.path])


def require_evaluator(command: str) -> None:
    """Raise `InputError` for a command that no shell reads, or whose program is not there. A path
    may be made later."""
    read = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True)
    if read.returncode or not command.strip():
        raise InputError(
            f"the evaluator {command!r} is no command of a shell:"
            f" {read.stderr.strip() or 'it is empty'}"
        )
    first = _FIRST_WORD.match(command)
    if (
        first
        and subprocess.run(
            ["sh", "-c", 'command -v "$0"', first[1]], stdout=subprocess.DEVNULL
        ).returncode
    ):
        raise InputError(
            f"the evaluator {command!r} needs {first[1]!r}, which is not on the PATH: install it"
        )


def judge_here(command: str, log: Path) -> Judged:
    """Run a command in a shell, in the current folder, with its output in the file `log`.

    Nothing protects it from what the agent did there. Its verdict is read as that of a
    `CommandJudge`, and it has as much time. What it started ends with it.
    """
    spec = CommandJudge(command=[command])
    evidence: dict[str, Any] = {"judge": "command", "log": log.name}
    log.parent.mkdir(exist_ok=True)
    try:
        run = run_supervised(
            ["sh", "-c", command], cwd=Path.cwd(), env=os.environ, timeout=spec.timeout, log=log
        )
        ended = asyncio.run(run)
        if ended.status is None:
            raise UnjudgedError(f"the evaluator took more than {spec.timeout:g} s")
        evidence["exit_status"] = ended.status
        verdict = read_status(spec, ended.status, log)
    except (UnjudgedError, OSError) as error:
        return Judged(unjudged=str(error), evidence=evidence)
    return Judged(reward=verdict.reward, parts=verdict.parts, evidence=evidence)
