"""Programs as the judge: a command, by its exit status, a number or JSON, and a Python function of the user's.

A command that runs the agent's code in its own process can be told anything by it: it can print the reward, write the
reward's file and end with status 0. Such a command has to run the agent's code as a child, and decide outside of it. In
the runtime `process` that is no protection: the child has all rights of its parent's user there.

`judge_here` judges by a command in the current directory: for a session that rolltap did not give a workspace.
"""

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from rolltap.trainer.rollouts.judges.checkout import Checkout
from rolltap.trainer.rollouts.judges.folders import read_file
from rolltap.trainer.rollouts.judges.verdict import Judged, Reward, UnjudgedError, parse_output, parse_text
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.rollouts.runtimes.supervised import run_supervised
from rolltap.trainer.tasks.task import CommandJudge, PythonJudge

CALL = Path(__file__).with_name("call.py")
"""The program that calls a function."""
_MAX_REWARD_BYTES = 64 << 10
_MAX_RESULT_BYTES = 1 << 20
_NOT_RUN = {126: "cannot be run", 127: "is not there"}
_PYTHON_ERROR = re.compile(r"(?:^|\n)Traceback \(most recent call last\):\n(?:[ \t].*\n)+([\w.]+)(?:: .*)?$")
_NO_IMPORT = re.compile(r"(?:No module named|ModuleNotFoundError\b|ImportError\b)[^\n]*$")
_NAMED = re.compile(r"(?:No module named|cannot import name) ['\"]?([\w.]+)")


async def judge_by_command(spec: CommandJudge, checkout: Checkout) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence. Raises `UnjudgedError`."""
    file = spec.reward_file or f"{checkout.out_inside}/reward"
    is_read = spec.reward_file is not None or spec.result in ("number", "json")
    env = {**spec.env, "ROLLTAP_REWARD": file} if is_read else spec.env
    status = await checkout.run(spec.command, env, spec.timeout)
    evidence = {"exit_status": status}
    written = checkout.read(file, _MAX_REWARD_BYTES) if is_read else None
    if written is not None and (spec.reward_file is not None or status in (0, 1)):
        if len(written) > _MAX_REWARD_BYTES:
            raise UnjudgedError(f"the judge wrote more than {_MAX_REWARD_BYTES >> 10} KiB to {file}")
        return parse_text(written.decode(errors="replace")), evidence
    if spec.reward_file is not None:
        raise UnjudgedError(f"the judge ended with status {status} and did not write {file}")
    return read_verdict(spec, status, checkout.job.log, asked=checkout.job.task.instruction), evidence


def read_verdict(spec: CommandJudge, status: int, log: Path, *, asked: str = "") -> Reward:
    """Return the reward by the output, which is in `log`, and the exit status. Raises `UnjudgedError`.

    Python ends with status 1 when a judge itself breaks: that is no verdict, unless an assertion failed, or a module or
    name is missing that the task, `asked`, names.
    """
    if status not in (0, 1):
        what = f": {spec.command[0]!r}, or a program in it, {_NOT_RUN[status]}" if status in _NOT_RUN else ""
        raise UnjudgedError(
            f"the judge ended with status {status}, and only 0 and 1 are a verdict{what}; its output is in {log.name}",
            broke=True,
        )
    if status == 1 and (broken := _broken(read_end(log), asked)):
        raise UnjudgedError(
            f"the judge ended with status 1 and the error {broken!r}, which is no verdict; its output is in {log.name}",
            broke=True,
        )
    if spec.result == "status":
        return Reward(float(status == 0), {})
    reward = parse_output(read_end(log), spec.result)
    return reward if reward is not None else Reward(float(status == 0), {})


def _broken(output: str, asked: str) -> str | None:
    """Return the last line of an output that ends as a Python program that broke; None for others."""
    output = output.replace("\r\n", "\n").rstrip()
    error = _PYTHON_ERROR.search(output)
    if not (error or _NO_IMPORT.search(output)) or (error and error[1] == "AssertionError"):
        return None
    last = output.rpartition("\n")[2]
    named = _NAMED.search(last)
    return None if named and re.search(rf"\b{re.escape(named[1])}\b", asked) else last[:300]


def read_end(log: Path, limit: int = _MAX_REWARD_BYTES) -> str:
    """Return the last `limit` bytes of a file as text."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
        return file.read().decode(errors="replace")


async def judge_by_function(spec: PythonJudge, checkout: Checkout) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence. Raises `UnjudgedError`.

    The function runs in a supervised process outside of the box, with the user's rights and modules: it must not run
    the agent's code. It is found as this process finds modules. Its environment has no keys of the user's.
    """
    result = "result.json"
    command = [sys.executable, "-P", str(CALL), spec.function, str(checkout.workspace), str(checkout.out / result)]
    env = {**clean_environment(checkout.out), **checkout.job.task.env, "PYTHONPATH": modules()}
    log = checkout.job.log
    ended = await run_supervised(command, cwd=checkout.out, env=env, timeout=spec.timeout, log=log)
    if ended.status is None:
        raise UnjudgedError(f"the function {spec.function} took more than {spec.timeout:g} s")
    content = read_file(checkout.out, result, _MAX_RESULT_BYTES)
    if ended.status != 0 or content is None:
        last = (read_end(log).strip().splitlines() or ["no output"])[-1][:300]
        how = f"ended by signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
        raise UnjudgedError(f"the function {spec.function} gave no result ({how}): {last}")
    return parse_text(content.decode(errors="replace")), {}


def modules() -> str:
    """Return the folders in which this process finds modules, as PYTHONPATH."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def judge_here(command: str, log: Path) -> Judged:
    """Run a command, as a shell would split it, in the current folder, with its output in the file `log`.

    Nothing protects it from what the agent did there. Its verdict is read as that of a `CommandJudge`, and it has as
    much time. What it started ends with it.
    """
    try:
        words = shlex.split(command)
        spec = CommandJudge(command=words)
    except ValueError as error:
        return Judged(unjudged=f"the evaluator {command!r} is no command: {error}")
    evidence = {"judge": "command", "log": log.name}
    log.parent.mkdir(exist_ok=True)
    try:
        run = run_supervised(words, cwd=Path.cwd(), env=os.environ, timeout=spec.timeout, log=log)
        ended = asyncio.run(run)
        if ended.status is None:
            raise UnjudgedError(f"the evaluator took more than {spec.timeout:g} s")
        verdict = read_verdict(spec, ended.status, log)
    except (UnjudgedError, OSError) as error:
        return Judged(unjudged=str(error), evidence=evidence)
    return Judged(reward=verdict.reward, parts=verdict.parts, evidence={**evidence, "exit_status": ended.status})
