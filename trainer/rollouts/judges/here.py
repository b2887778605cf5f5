"""A command as the judge, where the user is: for a session that rolltap did not give a workspace."""

import asyncio
import os
import shlex
from pathlib import Path

from rolltap.trainer.rollouts.judges.command import read_verdict
from rolltap.trainer.rollouts.judges.judged import Judged, UnjudgedError
from rolltap.trainer.rollouts.judges.spec import CommandJudge
from rolltap.trainer.rollouts.runtimes.supervised import run_supervised


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
