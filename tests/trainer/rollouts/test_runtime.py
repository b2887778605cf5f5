import asyncio
import os
import select

import pytest

from rolltap.trainer.rollouts.runtime import run


async def sh(script, tmp_path, *, timeout=60.0):
    return await run(["sh", "-c", script], cwd=tmp_path, env=dict(os.environ), timeout=timeout, log=tmp_path / "log")


def wait_until_dead(pid: int) -> bool:
    """Return True when a process has ended or ends soon. A killed process takes a moment to end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([descriptor], [], [], 30)
    os.close(descriptor)
    return bool(ended)


async def test_status_and_output_are_kept(tmp_path):
    assert await sh("echo out; echo err >&2; exit 3", tmp_path) == 3
    assert (tmp_path / "log").read_text() == "out\nerr\n"


async def test_it_has_no_standard_input(tmp_path):
    assert await sh("cat; echo end", tmp_path) == 0
    assert (tmp_path / "log").read_text() == "end\n"


async def test_a_command_that_takes_too_long_is_stopped(tmp_path):
    assert await sh("sleep 600", tmp_path, timeout=0.1) is None


async def test_processes_that_a_command_leaves_running_are_killed(tmp_path):
    await sh("sleep 600 & echo $!", tmp_path)
    assert wait_until_dead(int((tmp_path / "log").read_text()))


@pytest.mark.parametrize("turns", [2, 3, 4, 1000])
async def test_cancelling_kills_the_whole_group_even_of_a_command_that_has_just_started(tmp_path, turns):
    os.mkfifo(tmp_path / "fifo")
    task = asyncio.create_task(sh("sleep 600 & echo $! > fifo; wait", tmp_path))
    for _ in range(turns):
        await asyncio.sleep(0)
    pid = int((tmp_path / "fifo").read_text())  # blocks the event loop while the command runs
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wait_until_dead(pid)


async def test_a_program_that_does_not_exist_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        await run(["no-such-program"], cwd=tmp_path, env={}, timeout=1, log=tmp_path / "log")
