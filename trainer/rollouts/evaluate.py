"""The reward of a session, from the task's own evaluator."""

import math
from pathlib import Path

from rolltap.trainer.rollouts.runtimes.supervised import run_supervised
from rolltap.trainer.rollouts.tasks.task import Task

EVALUATE_SECONDS = 600.0


async def evaluate(task: Task, workspace: Path, env: dict[str, str], log: Path) -> tuple[float | None, str | None]:
    """Run the evaluator in the workspace. Return the reward and None, or None and why there is no reward.

    The reward is the last line of the evaluator's output if that is a finite number. Otherwise it is 1.0 for exit
    status 0 and 0.0 for other statuses, and 0.0 when the agent has removed or closed its workspace. There is no reward
    when the evaluator's program cannot be started, is ended by a signal, or runs longer than `EVALUATE_SECONDS`: then
    nothing was judged. The cause of the latter two may still be what the agent left in its workspace: an evaluator that
    runs it must bound its time and turn its end into an exit status.
    """
    try:
        ended = await run_supervised(task.evaluate, cwd=workspace, env=env, timeout=EVALUATE_SECONDS, log=log)
        status = ended.status
        output = log.read_text(errors="replace")
    except OSError as error:
        if error.filename == workspace:
            return 0.0, None
        return None, f"the evaluator {task.evaluate[0]!r} could not be started or read: {error.strerror}"
    if status is None:
        return None, f"the evaluator took more than {EVALUATE_SECONDS:g} s: give it a time limit of its own"
    if status < 0:
        return None, f"the evaluator was ended by signal {-status}; its output is in {log}"
    return _number(output, default=1.0 if status == 0 else 0.0), None


def _number(output: str, *, default: float) -> float:
    lines = output.strip().splitlines()
    try:
        number = float(lines[-1])
    except (IndexError, ValueError):
        return default
    return number if math.isfinite(number) else default
