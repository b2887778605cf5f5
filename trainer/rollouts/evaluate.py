"""The reward of a session, from the task's own evaluator."""

import math
from pathlib import Path

from rolltap.trainer.rollouts.runtime import run
from rolltap.trainer.rollouts.task import Task

EVALUATE_SECONDS = 600.0


async def evaluate(task: Task, workspace: Path, env: dict[str, str], log: Path) -> tuple[float | None, str | None]:
    """Run the evaluator in the workspace. Return the reward and None, or None and why there is no reward.

    The reward is the last line of the evaluator's output if that is a finite number. Otherwise it is 1.0 for exit
    status 0 and 0.0 for other statuses. There is no reward when the evaluator cannot be run (the shell's statuses for
    that are 126 and 127), is killed by a signal, or runs longer than `EVALUATE_SECONDS`: the reward would not be the
    agent's.
    """
    try:
        status = await run(task.evaluate, cwd=workspace, env=env, timeout=EVALUATE_SECONDS, log=log)
        output = log.read_text(errors="replace")
    except OSError as error:
        return None, f"the evaluator {task.evaluate[0]!r} could not be started or read: {error.strerror}"
    if status is None:
        return None, f"the evaluator took more than {EVALUATE_SECONDS:g} s: give it a time limit of its own"
    if status in (126, 127) or status < 0:
        return None, f"the evaluator ended with status {status}; its output is in {log}"
    return _number(output, default=1.0 if status == 0 else 0.0), None


def _number(output: str, *, default: float) -> float:
    lines = output.strip().splitlines()
    try:
        number = float(lines[-1])
    except (IndexError, ValueError):
        return default
    return number if math.isfinite(number) else default
