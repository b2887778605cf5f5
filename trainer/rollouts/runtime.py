"""Runs a command on this machine so that nothing of it is left behind."""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_GRACE_SECONDS = 5.0
"""Between the request to end and the kill."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended. `exit_status` is None when it was stopped for its time limit."""

    exit_status: int | None
    output: str


async def run(command: list[str], *, cwd: Path, env: dict[str, str], timeout: float, log: Path) -> Finished:
    """Run a command without a terminal, its output going to `log`.

    It leads a process group of its own: at the time limit (seconds), when it has ended, and when the caller is
    cancelled, all that is left of the group is killed. Raises `OSError` when it cannot be started.
    """
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = await asyncio.wait_for(process.wait(), timeout)
        except TimeoutError:
            status = None
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
        finally:
            _signal(process.pid, signal.SIGKILL)
            await process.wait()
    return Finished(status, log.read_text(errors="replace"))


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
