import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from rolltap.trainer.boxes import supervised
from rolltap.trainer.boxes.runtime import Ended
from rolltap.trainer.boxes.supervised import LOG_BYTES, Output, run_supervised, written_to
from tests.boxes import wait_until_dead


def say(output, *texts):
    for text in texts:
        os.write(output.descriptor, text)


def test_a_file_has_all_that_was_written_when_it_is_closed(tmp_path):
    output = Output(tmp_path / "log")
    say(output, b"a", b"b" * 60_000)
    output.close()
    assert (tmp_path / "log").read_bytes() == b"a" + b"b" * 60_000


def test_output_is_cut_at_the_limit_with_a_line_that_says_so_and_the_program_goes_on(tmp_path):
    output = Output(tmp_path / "log", limit=100)
    say(output, *[b"x" * 60] * 3000)
    output.close()
    said = (tmp_path / "log").read_bytes()
    assert said == b"x" * 100 + b"\n[rolltap: the output is cut here, at 100 bytes]\n"
    assert LOG_BYTES == 64 << 20


@pytest.mark.parametrize(
    ("said", "marked", "before", "after"),
    [
        (
            [b"a warning\nno", b"w\nthe ", b"program now\n"],
            True,
            b"a warning\n",
            b"the program now\n",
        ),
        ([b"error: no such container\n"], False, b"error: no such container\n", b""),
    ],
)
def test_what_comes_before_the_marker_is_kept_apart(tmp_path, said, marked, before, after):
    output = Output(tmp_path / "log", marker=b"now\n")
    say(output, *said)
    output.close()
    assert (output.marked, output.before) == (marked, before)
    assert (tmp_path / "log").read_bytes() == after


def test_a_process_that_holds_the_pipe_does_not_keep_it_open(tmp_path):
    output = Output(tmp_path / "log")
    held = os.dup(output.descriptor)
    say(output, b"said")
    output.close()
    os.close(held)
    assert (tmp_path / "log").read_bytes() == b"said"


async def test_a_file_that_cannot_be_written_is_an_error_and_the_program_goes_on(tmp_path):
    (tmp_path / "log").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        async with written_to(tmp_path / "log") as output:
            say(output, *[b"x" * 60] * 3000)


def test_no_thread_and_no_descriptor_is_left(tmp_path):
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())
    Output(tmp_path / "log").close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # those of other tests may end meanwhile
    assert set(threading.enumerate()) <= threads


ESCAPES = {
    "a child": "sleep 600 & echo $! > fifo",
    "a session of its own": "setsid sh -c 'echo $$ > fifo; exec sleep 600' &",
    "a double fork": "(setsid sh -c '(setsid sh -c \"echo \\$\\$ > fifo; exec sleep 600\" &) ' &)",
    "a process that ignores signals": (
        "(trap '' TERM HUP INT; setsid sh -c 'echo $$ > fifo; sleep 600; sleep 600' &)"
    ),
    "one whose name has a parenthesis": (
        "cp $(which sleep) './a) R 1 (b'; ./a*b 600 & echo $! > fifo"
    ),
}


async def sh(script, tmp_path, *, timeout=60.0, **how):
    log, env = tmp_path / "log", dict(os.environ)
    return await run_supervised(
        ["sh", "-c", script], cwd=tmp_path, env=env, timeout=timeout, log=log, **how
    )


@pytest.mark.parametrize(
    ("end", "status"), [("exit 3", 3), ("kill -9 $$", -9), ("kill -15 $$", -15)]
)
async def test_output_and_the_status_or_the_number_of_the_signal_are_kept(tmp_path, end, status):
    assert await sh(f"echo out; echo err >&2; {end}", tmp_path) == Ended(status)
    assert (tmp_path / "log").read_text() == "out\nerr\n"


async def test_what_it_has_said_it_cannot_take_back(tmp_path):
    await sh("echo said; : > /proc/self/fd/1; echo on > /dev/stdout", tmp_path)
    assert (tmp_path / "log").read_text() == "said\non\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a pipe to another user")
async def test_nobody_else_can_read_what_it_says(tmp_path):
    drop = "setpriv --bounding-set=-all --inh-caps=-all"
    await sh(f"echo said; {drop} chmod 666 /proc/self/fd/1; {drop} cat /proc/self/fd/1", tmp_path)
    said = (tmp_path / "log").read_text()
    assert said.startswith("said\n")
    assert said.count("not permitted") + said.count("Permission denied") == 2


async def test_it_has_no_standard_input_and_no_descriptor_of_the_supervisor(tmp_path):
    script = f"cat; exec {sys.executable} -c 'import os; print(os.listdir(\"/proc/self/fd\"))'"
    assert await sh(script, tmp_path) == Ended(0)
    assert (tmp_path / "log").read_text() == "['0', '1', '2', '3']\n"  # 3 reads the folder


async def test_a_command_that_takes_too_long_can_write_its_last_words(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    script = "trap 'echo bye; exit' TERM; echo > fifo; while :; do sleep 0.01; done"
    limited = asyncio.Event()

    async def no_limit(*_):
        limited.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(supervised, "exceeded", no_limit)
    running = asyncio.create_task(sh(script, tmp_path, timeout=600))
    await asyncio.to_thread((tmp_path / "fifo").read_text)
    await limited.wait()
    loop = asyncio.get_running_loop()
    now = loop.time
    # not before the trap is set, and the limits, which are watched as long as the time, are watched
    monkeypatch.setattr(loop, "time", lambda: now() + 600)
    assert await running == Ended(None, "timeout")
    assert (tmp_path / "log").read_text().endswith("bye\n")


@pytest.mark.parametrize("escape", ESCAPES.values(), ids=list(ESCAPES))
async def test_processes_that_a_command_leaves_running_are_killed(tmp_path, escape):
    os.mkfifo(tmp_path / "fifo")
    running = asyncio.create_task(sh(f"{escape}\ncat release", tmp_path))
    os.mkfifo(tmp_path / "release")
    pid = int(await asyncio.to_thread((tmp_path / "fifo").read_text))
    (tmp_path / "release").write_text("")
    assert (await running).status == 0
    assert wait_until_dead(pid)


async def test_cancelling_kills_all_of_a_command(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    task = asyncio.create_task(sh("sleep 600 & echo $! > fifo; wait", tmp_path))
    pid = int(await asyncio.to_thread((tmp_path / "fifo").read_text))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wait_until_dead(pid)


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 100, 1000])
async def test_nothing_is_left_of_a_command_that_is_cancelled_while_it_starts(tmp_path, turns):
    before = set(psutil.Process().children(recursive=True))
    descriptors = len(os.listdir("/proc/self/fd"))
    task = asyncio.create_task(sh("sleep 600 & wait", tmp_path))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(psutil.Process().children(recursive=True)) <= before  # others may end meanwhile
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize(
    ("program", "folder"), [("no-such-program", "."), ("true", "no-such-folder")]
)
async def test_a_program_or_a_folder_that_does_not_exist_is_an_os_error(
    tmp_path, monkeypatch, program, folder
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        await run_supervised([program], cwd=Path(folder), env={}, timeout=1, log=tmp_path / "log")
    assert str(raised.value.filename).startswith("no-such-")


async def test_limits_and_cores_reach_the_program(tmp_path):
    core = min(os.sched_getaffinity(0))
    await sh("ulimit -n; nproc; ulimit -c", tmp_path, rlimits={"RLIMIT_NOFILE": 64}, cpus=[core])
    assert (tmp_path / "log").read_text() == "64\n1\n0\n"


async def test_the_cleanup_runs_when_all_is_dead(tmp_path):
    cleanup = ["sh", "-c", f"kill -0 $(cat {tmp_path}/pid) 2> /dev/null || touch {tmp_path}/clean"]
    await sh("setsid sleep 600 & echo $! > pid", tmp_path, cleanup=cleanup)
    assert (tmp_path / "clean").exists()


class TestWhenRolltapDies:
    """rolltap is a process that is killed with SIGKILL."""

    ROLLTAP = """
import asyncio, os, sys
from pathlib import Path
from rolltap.trainer.boxes.supervised import run_supervised
command, how = ["sh", "-c", sys.argv[1]], {"cleanup": ["touch", "clean"], "grace": float(sys.argv[2])}
async def main():
    running = asyncio.create_task(
        run_supervised(command, cwd=Path(), env=dict(os.environ), timeout=600, log=Path("log"), **how)
    )
    while not Path("log").exists() or not Path("log").read_text():
        await asyncio.sleep(0.01)
    if os.fork() == 0:  # as workers of multiprocessing do
        sys.stdin.read()
        os._exit(0)
    await running
asyncio.run(main())
"""

    def rolltap(self, tmp_path, script, grace="0"):
        """Start a process that has a copy of itself, with all its descriptors, while stdin is
        open."""
        command = [sys.executable, "-c", self.ROLLTAP, f"echo; {script}", grace]
        return subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE)

    @pytest.mark.parametrize("escape", ESCAPES.values(), ids=list(ESCAPES))
    def test_all_that_it_started_dies(self, tmp_path, escape):
        os.mkfifo(tmp_path / "fifo")
        with self.rolltap(tmp_path, f"echo $PPID > supervisor; {escape}\nsleep 600") as rolltap:
            pid = int((tmp_path / "fifo").read_text())
            rolltap.kill()
            assert wait_until_dead(pid)
            assert wait_until_dead(int((tmp_path / "supervisor").read_text()))
        assert (tmp_path / "clean").exists()

    def test_a_program_with_grace_may_end_in_order(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        # quiet: nobody reads its output any more
        script = (
            "exec 2> errors; trap 'echo bye > words; exit' TERM; echo $PPID > fifo; while :; do"
            " sleep 0.01; done"
        )
        with self.rolltap(tmp_path, script, grace="60") as rolltap:
            supervisor = int((tmp_path / "fifo").read_text())
            rolltap.kill()
            assert wait_until_dead(supervisor)
        assert (tmp_path / "words").read_text() == "bye\n"

    def test_a_program_whose_supervisor_is_killed_dies(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        with self.rolltap(tmp_path, "echo $PPID $$ > fifo; exec sleep 600") as rolltap:
            supervisor, program = map(int, (tmp_path / "fifo").read_text().split())
            os.kill(supervisor, signal.SIGKILL)
            assert wait_until_dead(program)
        assert rolltap.returncode == 0
