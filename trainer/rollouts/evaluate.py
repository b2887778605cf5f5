"""The reward of a session: what the task's own command says about the workspace."""

import math
from pathlib import Path

from rolltap.trainer.rollouts.runtime import run
from rolltap.trainer.rollouts.task import Task

EVALUATE_SECONDS = 600.0


async def evaluate(task: Task, workspace: Path, env: dict[str, str], log: Path) -> tuple[float | None, str | None]:
    """The reward, or None and why there is none.

    The last line of the evaluator's output when it is a finite number, else 1.0 for exit status 0 and 0.0 for any
    other. An evaluator that cannot be run (126 and 127 are the shell's statuses for that), is killed or takes too long
    gives no reward: that says nothing about the session.
    """
    try:
        status = await run(task.evaluate, cwd=workspace, env=env, timeout=EVALUATE_SECONDS, log=log)
    except OSError as error:
        return None, f"the evaluator {task.evaluate[0]!r} could not be started: {error.strerror}"
    if status is None:
        return None, f"the evaluator took more than {EVALUATE_SECONDS:g} s"
    if status in (126, 127) or status < 0:
        return None, f"the evaluator ended with status {status}; its output is in {log}"
    return _number(log.read_text(errors="replace"), default=1.0 if status == 0 else 0.0), None


def _number(output: str, *, default: float) -> float:
    lines = output.strip().splitlines()
    try:
        number = float(lines[-1])
    except (IndexError, ValueError):
        return default
    return number if math.isfinite(number) else default
