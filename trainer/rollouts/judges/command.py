"""A command as the judge: its exit status, a number or JSON.

A command that runs the agent's code in its own process can be told anything by it: it can print the reward, write the
reward's file and end with status 0. Such a command has to run the agent's code as a child, and decide outside of it. In
the runtime `process` that is no protection: the child has all rights of its parent's user there.

A command as the judge, where the user is: for a session that rolltap did not give a workspace.
"""

import asyncio
import os
import re
import shlex
from pathlib import Path
from typing import Any

from rolltap.trainer.rollouts.judges.checkout import Place
from rolltap.trainer.rollouts.judges.verdict import Judged, Reward, UnjudgedError, parse_output, parse_text
from rolltap.trainer.rollouts.runtimes.supervised import run_supervised
from rolltap.trainer.tasks.task import CommandJudge

_MAX_REWARD_BYTES = 64 << 10
_NOT_RUN = {126: "cannot be run", 127: "is not there"}
_PYTHON_ERROR = re.compile(r"(?:^|\n)Traceback \(most recent call last\):\n(?:[ \t].*\n)+([\w.]+)(?:: .*)?$")
_NO_IMPORT = re.compile(r"(?:No module named|ModuleNotFoundError\b|ImportError\b)[^\n]*$")
_NAMED = re.compile(r"(?:No module named|cannot import name) ['\"]?([\w.]+)")


async def judge_by_command(spec: CommandJudge, place: Place) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence. Raises `UnjudgedError`."""
    file = spec.reward_file or f"{place.out_inside}/reward"
    is_read = spec.reward_file is not None or spec.result in ("number", "json")
    env = {**spec.env, "ROLLTAP_REWARD": file} if is_read else spec.env
    status = await place.run(spec.command, env, spec.timeout)
    evidence = {"exit_status": status}
    written = place.read(file, _MAX_REWARD_BYTES) if is_read else None
    if written is not None and (spec.reward_file is not None or status in (0, 1)):
        if len(written) > _MAX_REWARD_BYTES:
            raise UnjudgedError(f"the judge wrote more than {_MAX_REWARD_BYTES >> 10} KiB to {file}")
        return parse_text(written.decode(errors="replace")), evidence
    if spec.reward_file is not None:
        raise UnjudgedError(f"the judge ended with status {status} and did not write {file}", broke=True)
    return read_verdict(spec, status, place.case.log, asked=place.case.task.instruction), evidence


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
