"""A command as the judge: its exit status, a number or JSON.

A command that runs the agent's code in its own process can be told anything by it: it can print the reward, write the
reward's file and end with status 0. Such a command has to run the agent's code as a child, and decide outside of it.
"""

import os
from pathlib import Path
from typing import Any

from rolltap.trainer.rollouts.judges.judged import UnjudgedError
from rolltap.trainer.rollouts.judges.place import Place
from rolltap.trainer.rollouts.judges.reward import Reward, parse_output, parse_text
from rolltap.trainer.rollouts.judges.spec import CommandJudge

_MAX_REWARD_BYTES = 64 << 10
_NOT_RUN = {126: "cannot be run", 127: "is not there"}


async def judge_by_command(spec: CommandJudge, place: Place) -> tuple[Reward, dict[str, Any]]:
    """Return the reward and the evidence. Raises `UnjudgedError`."""
    file = spec.reward_file or f"{place.out_inside}/reward"
    status = await place.run(spec.command, {**spec.env, "ROLLTAP_REWARD": file}, spec.timeout)
    evidence = {"exit_status": status}
    written = None if spec.result == "status" and spec.reward_file is None else place.read(file, _MAX_REWARD_BYTES)
    if written is not None:
        if len(written) > _MAX_REWARD_BYTES:
            raise UnjudgedError(f"the judge wrote more than {_MAX_REWARD_BYTES >> 10} KiB to {file}")
        return parse_text(written.decode(errors="replace")), evidence
    if spec.reward_file is not None:
        raise UnjudgedError(f"the judge ended with status {status} and did not write {file}", broke=True)
    return read_verdict(spec, status, place.case.log), evidence


def read_verdict(spec: CommandJudge, status: int, log: Path) -> Reward:
    """Return the reward by the output, which is in `log`, and the exit status. Raises `UnjudgedError`."""
    if status not in (0, 1):
        what = f": {spec.command[0]!r}, or a program in it, {_NOT_RUN[status]}" if status in _NOT_RUN else ""
        raise UnjudgedError(
            f"the judge ended with status {status}, and only 0 and 1 are a verdict{what}; its output is in {log.name}",
            broke=True,
        )
    if spec.result == "status":
        return Reward(float(status == 0), {})
    reward = parse_output(read_end(log), spec.result)
    return reward if reward is not None else Reward(float(status == 0), {})


def read_end(log: Path, limit: int = _MAX_REWARD_BYTES) -> str:
    """Return the last `limit` bytes of a file as text."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
        return file.read().decode(errors="replace")
