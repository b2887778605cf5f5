import asyncio
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.runtime import Ended, Mount
from tests.boxes import containers, in_box, make_spec, sh, wait_until_dead

pytestmark = pytest.mark.usefixtures("podman")


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return Mount(tmp_path / "fifo", "/fifo", writable=True)


async def test_a_container_has_a_name_of_its_own_and_writes_to_a_copy_of_its_root_folder(tmp_path):
    script = "hostname; echo changed > /etc/file && mkdir /folder && cat /etc/file /etc/hosts"
    ended, output = await in_box(tmp_path, script)
    assert ended == Ended(0)
    assert socket.gethostname() not in output.split("\n")
    assert "changed\n127.0.0.1 localhost\n::1 localhost\n" in output
    assert not list((tmp_path / "root" / "etc").iterdir())
    assert not (tmp_path / "root" / "folder").exists()


async def test_what_a_program_leaves_is_killed_by_settle_and_its_files_stay(tmp_path):
    async with ContainerRuntime().box(make_spec(tmp_path)) as box:
        script = "(setsid setsid sleep 4242 &); echo kept > /var/kept; echo kept > kept"
        await sh(box, script, tmp_path / "log")
        assert await sh(box, "pgrep -x sleep | wc -l", tmp_path / "log") == (Ended(0), "2\n")
        await box.settle()
        await box.settle()
        # one is that of the box's first process
        script = "pgrep -x sleep | wc -l; cat kept /var/kept"
        assert await sh(box, script, tmp_path / "log") == (Ended(0), "1\nkept\nkept\n")


async def test_cancelling_stops_the_program_and_removes_the_container(tmp_path, fifo):
    runtime = ContainerRuntime()

    async def session():
        async with runtime.box(make_spec(tmp_path, mounts=[fifo])) as box:
            await sh(box, "echo started > /fifo; sleep 4244", tmp_path / "log")

    task = asyncio.create_task(session())
    await asyncio.to_thread(fifo.source.read_text)
    assert len(containers(runtime)) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert containers(runtime) == []


async def test_a_program_whose_box_ends_has_failed_and_the_next_has_a_box(tmp_path, fifo):
    async with ContainerRuntime().box(make_spec(tmp_path, mounts=[fifo])) as box:
        # not from inside
        await sh(box, "kill -TERM 1; kill -KILL 1; kill -KILL -1", tmp_path / "log")
        assert await sh(box, "echo alive", tmp_path / "log") == (Ended(0), "alive\n")
        running = asyncio.create_task(sh(box, "echo started > /fifo; sleep 4246", tmp_path / "log"))
        await asyncio.to_thread(fifo.source.read_text)
        os.kill(box._pid, signal.SIGKILL)
        ended, _ = await running
        assert ended.stopped is None
        assert ended.status not in (None, 0)
        assert await sh(box, "echo alive", tmp_path / "log") == (Ended(0), "alive\n")


@pytest.mark.parametrize("times", [1, 2])
async def test_a_program_whose_box_ends_before_it_begins_in_another_and_fails_if_that_one_ends_too(
    tmp_path, monkeypatch, times
):
    async with ContainerRuntime().box(make_spec(tmp_path)) as box:
        execute = box._execute
        ends = [box] * times

        async def execute_late(*arguments):
            if ends:
                os.kill(ends.pop()._pid, signal.SIGKILL)
                wait_until_dead(box._pid)
            return await execute(*arguments)

        monkeypatch.setattr(box, "_execute", execute_late)
        if times == 1:
            assert await sh(box, "echo alive", tmp_path / "log") == (Ended(0), "alive\n")
        else:
            with pytest.raises(OSError, match="bash could not be started in the container of"):
                await sh(box, "true", tmp_path / "log")


async def test_nothing_of_a_program_is_on_a_command_line_that_all_users_can_read(tmp_path, fifo):
    async with ContainerRuntime().box(make_spec(tmp_path, mounts=[fifo])) as box:
        run = asyncio.create_task(
            sh(box, "echo started > /fifo; cat /fifo", tmp_path / "log", TOKEN="t0ken")
        )
        await asyncio.to_thread(fifo.source.read_text)
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # a process of anyone may end meanwhile
                lines.append(path.read_bytes())
        assert any(b"podman" in line for line in lines)
        assert not any(b"t0ken" in line for line in lines)
        await asyncio.to_thread(fifo.source.write_text, "end")
        assert (await run)[0] == Ended(0)
