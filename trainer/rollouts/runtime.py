"""Runs a command on this machine so that nothing of it is left behind."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

_GRACE_SECONDS = 5.0
"""Between the request to end and the kill."""


async def run(command: list[str], *, cwd: Path, env: dict[str, str], timeout: float, log: Path) -> int | None:
    """Run a command without a terminal, its output going to `log`; its exit status, None when it took too long.

    It leads a process group of its own: at the time limit (seconds), when it has ended, and when the caller is
    cancelled, all that is left of the group is killed. Raises `OSError` when it cannot be started.
    """
    with log.open("wb") as output:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *command,
                cwd=cwd,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        )
        try:
            await asyncio.wait([starting])
            return await asyncio.wait_for(starting.result().wait(), timeout)
        except TimeoutError:
            _signal(starting.result().pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(starting.result().wait(), _GRACE_SECONDS)
            return None
        finally:
            process = await starting  # which goes on when the caller is cancelled meanwhile
            _signal(process.pid, signal.SIGKILL)
            await process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
