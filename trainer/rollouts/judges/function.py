"""A Python function of the user's as the judge, in a supervised process of this machine.

It runs outside of the box, with the user's rights and modules: it must not run the agent's code.
"""

import os
import sys
from pathlib import Path
from typing import Any

from rolltap.trainer.rollouts.judges.checkout import Place
from rolltap.trainer.rollouts.judges.command import read_end
from rolltap.trainer.rollouts.judges.folders import read_file
from rolltap.trainer.rollouts.judges.verdict import Reward, UnjudgedError, parse_json, parse_number
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.rollouts.runtimes.supervised import run_supervised
from rolltap.trainer.tasks.task import PythonJudge

CALL = Path(__file__).with_name("call.py")
"""The program that calls a function."""
_MAX_RESULT_BYTES = 1 << 20


async def judge_by_function(spec: PythonJudge, place: Place) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence. Raises `UnjudgedError`.

    The function is found as this process finds modules. Its environment has no keys of the user's.
    """
    result = "result.json"
    command = [sys.executable, "-P", str(CALL), spec.function, str(place.workspace), str(place.out / result)]
    env = {**clean_environment(place.out), **place.case.task.env, "PYTHONPATH": modules()}
    log = place.case.log
    ended = await run_supervised(command, cwd=place.out, env=env, timeout=spec.timeout, log=log)
    if ended.status is None:
        raise UnjudgedError(f"the function {spec.function} took more than {spec.timeout:g} s", broke=True)
    content = read_file(place.out, result, _MAX_RESULT_BYTES)
    if ended.status != 0 or content is None:
        last = (read_end(log).strip().splitlines() or ["no output"])[-1][:300]
        how = f"ended by signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
        raise UnjudgedError(f"the function {spec.function} gave no result ({how}): {last}", broke=True)
    text = content.decode(errors="replace")
    return parse_json(text) if text.startswith("{") else Reward(parse_number(text), {}), {}


def modules() -> str:
    """Return the folders in which this process finds modules, as PYTHONPATH."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
