"""Running a command on this machine in a process group of its own."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

_GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""


async def run(command: list[str], *, cwd: Path, env: dict[str, str], timeout: float, log: Path) -> int | None:
    """Run a command with its output in `log` and an empty stdin. Return its exit status, None after `timeout` seconds.

    The command leads a process group. The rest of the group is killed when the command exits, at the timeout, and when
    the caller is cancelled. A child that starts a session of its own (`setsid`) leaves the group and is not killed.
    Raises `OSError` when the command cannot be started.
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
            process = await starting  # it goes on when the caller is cancelled meanwhile
            _signal(process.pid, signal.SIGKILL)
            await process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
