"""Limits of a box, held by looking at its processes and folders again and again.

Processes and written files of a container, as this machine sees them, and kills for lack of memory.
"""

import asyncio
import contextlib
import math
import os
import random
import re
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil

from rolltap.trainer.rollouts.runtimes.runtime import StopReason
from rolltap.trainer.tasks.task import Limits

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def processes_in(pid: int) -> list[psutil.Process]:
    """Return the processes in the PID namespace of process `pid`, with those in namespaces that they have made.

    Programs that an engine runs in a container are no children of its first process.
    """
    namespace = _pid_namespace(pid)
    found: dict[int, psutil.Process] = {}
    waiting = {process.pid: process for process in psutil.process_iter(["ppid"])}
    while True:
        inside = [
            process
            for process in waiting.values()
            if process.info["ppid"] in found or (not found and _pid_namespace(process.pid) == namespace)
        ]
        if not inside:
            return list(found.values())
        for process in inside:
            found[process.pid] = waiting.pop(process.pid)


def _pid_namespace(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return None


def written_folders(pid: int) -> list[Path]:
    """Return the folder of this machine that holds what is written to the root of process `pid`: of an overlay only."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
            fields, _, source = line.partition(" - ")
            if fields.split()[4] == "/":
                options = source.split()[-1].split(",")
                return [Path(option.removeprefix("upperdir=")) for option in options if option.startswith("upperdir=")]
    return []


def out_of_memory_kills(pid: int) -> int:
    """Return how many processes the kernel has killed at the memory limit of the control group of process `pid`.

    See `memory.oom_control` of control groups of version 1, `memory.events` of version 2.
    """
    for file in _memory_files(pid):
        with contextlib.suppress(OSError):
            if kills := _KILLS.search(file.read_text()):
                return int(kills[1])
    return 0


def _memory_files(pid: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield _CONTROL_GROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
            elif not controllers:
                yield _CONTROL_GROUPS / path.lstrip("/") / "memory.events"


_PAUSE_SECONDS = 0.25
_BUSY_SHARE = 0.05
"""Most of a core's time that looking takes, unless pauses would get longer than these:"""
_LONGEST_SECONDS = 2.0
_LONGEST_DISK_SECONDS = 10.0
_SLICE_SECONDS = 0.25
"""Time for open files in one look."""
_DISK_SECONDS = 60.0
_DISK_THREADS = 4
_SAID_BYTES = 1 << 20
_GIB = 1 << 30
_DESCRIPTORS = 4096
"""Soft limit of open files of a process."""

_Find = Callable[[int], list[psutil.Process]]


def descendants(pid: int) -> list[psutil.Process]:
    """Return the descendants of process `pid`."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


async def exceeded(
    limits: Limits,
    pid: int,
    folders: Sequence[Path],
    memory_folders: Sequence[Path] = (),
    *,
    find: _Find = descendants,
) -> StopReason:
    """Return the first limit that the descendants of process `pid` exceed, or other processes that `find` returns.

    Memory is what the processes have, shared pages divided among them, the files in `memory_folders` (tmpfs), and the
    files without a folder that they hold open in memory (memfd). Disk is the space of `folders`, and of files that were
    deleted and are open. Processes and memory are looked at four times a second, or every two seconds where a look
    takes long; open files as often, but a part of them at a time when there are many; space on disk at least every ten
    seconds, and the time for counting it. Between two looks a program may exceed a limit. Not seen are System V shared
    memory and files in memory that are on their way through a socket.
    """
    nameless = Nameless()
    looks: list[Coroutine[Any, Any, StopReason]] = []
    if limits.memory_gib is not None or limits.processes is not None:
        look = partial(_look_at_processes, limits, pid, find, memory_folders, nameless)
        looks.append(_again(look, _LONGEST_SECONDS))
    if limits.memory_gib is not None or limits.disk_gib is not None:
        looks.append(_again(partial(nameless.look, pid, find), _LONGEST_SECONDS))
    if limits.disk_gib is not None:
        look = partial(_look_at_disk, limits.disk_gib * _GIB, folders, nameless)
        looks.append(_again(look, _LONGEST_DISK_SECONDS, _disk_threads()))
    tasks = [asyncio.create_task(look) for look in looks]
    try:
        if not tasks:
            await asyncio.Event().wait()
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _again(look: Callable[[], StopReason | None], longest: float, threads: Executor | None = None) -> StopReason:
    """Call `look` in a thread again and again until it returns a reason, with pauses of up to `longest` seconds."""
    while True:
        begin = time.monotonic()
        reason = await asyncio.get_running_loop().run_in_executor(threads, look)
        if reason is not None:
            return reason
        await asyncio.sleep(pause_after(time.monotonic() - begin, longest))


def pause_after(seconds: float, longest: float) -> float:
    """Return the pause after a look that took `seconds`."""
    return min(max(_PAUSE_SECONDS, seconds / _BUSY_SHARE), longest)


@cache
def _disk_threads() -> Executor:
    """Return threads of their own: counting the files of one box keeps no other look waiting."""
    return ThreadPoolExecutor(_DISK_THREADS, "rolltap-disk")


def rlimits(limits: Limits) -> dict[str, int]:
    """Return limits of the module `resource` for each process: open files, and the size of one file."""
    size = {} if limits.disk_gib is None else {"RLIMIT_FSIZE": int(limits.disk_gib * _GIB)}
    return {"RLIMIT_NOFILE": _DESCRIPTORS, **size}


def choose_cores(limits: Limits) -> list[int]:
    """Return the processor cores of a box, chosen at random; none for all.

    Programs that count cores see so many. A program that wants more can take them.
    """
    available = sorted(os.sched_getaffinity(0))
    if limits.cpus is None or limits.cpus >= len(available):
        return []
    return sorted(random.sample(available, math.ceil(limits.cpus)))


def _look_at_processes(
    limits: Limits, pid: int, find: _Find, memory_folders: Sequence[Path], nameless: "Nameless"
) -> StopReason | None:
    processes = find(pid)
    if limits.processes is not None:
        threads = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                threads += process.num_threads()
        if threads > limits.processes:
            return "processes"
    if limits.memory_gib is not None:
        most = limits.memory_gib * _GIB
        files = nameless.in_memory + sum(tmpfs_bytes(folder) for folder in memory_folders)
        # resident sizes are quick to read, and count shared pages for each process
        if files + _memory(processes, "rss") > most and files + _memory(processes, "pss") > most:
            return "memory"
    return None


def _look_at_disk(most: float, folders: Sequence[Path], nameless: "Nameless") -> StopReason | None:
    return "disk" if nameless.on_disk + disk_bytes(folders) > most else None


def _memory(processes: Sequence[psutil.Process], kind: str) -> int:
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            memory = process.memory_info() if kind == "rss" else process.memory_full_info()
            total += getattr(memory, kind)
    return total


class Nameless:
    """Open files that no folder has, counted process by process, so that many of them keep nothing waiting.

    Attributes:
        in_memory: Bytes of those in memory.
        on_disk: Bytes of the others.
    """

    def __init__(self) -> None:
        self.in_memory = self.on_disk = 0
        self._rest: list[psutil.Process] = []
        self._found: tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]] = ({}, {})

    def look(self, pid: int, find: _Find) -> None:
        """Look at further processes, for a moment. A round over all begins with what `find(pid)` returns."""
        end = time.monotonic() + _SLICE_SECONDS
        if not self._rest:
            self._rest, self._found = find(pid), ({}, {})
        while self._rest:
            self._count(self._rest.pop())
            if time.monotonic() >= end:
                break
        in_memory, on_disk = (sum(found.values()) for found in self._found)
        if self._rest:  # what a round has found so far can only add to the last one
            in_memory, on_disk = max(in_memory, self.in_memory), max(on_disk, self.on_disk)
        self.in_memory, self.on_disk = in_memory, on_disk

    def _count(self, process: psutil.Process) -> None:
        in_memory, on_disk = self._found
        with contextlib.suppress(OSError), os.scandir(f"/proc/{process.pid}/fd") as descriptors:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    status = os.stat(descriptor.path)
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        where = in_memory if os.readlink(descriptor.path).startswith("/memfd:") else on_disk
                        where[status.st_dev, status.st_ino] = status.st_blocks * 512


def tmpfs_bytes(folder: Path) -> int:
    """Return the bytes in the file system of a box's folder: 0 while the box is being made and sees this machine's."""
    with contextlib.suppress(OSError):
        if os.stat(folder).st_dev in {os.stat(own).st_dev for own in ("/", "/tmp", "/dev/shm")}:
            return 0
        status = os.statvfs(folder)
        return (status.f_blocks - status.f_bfree) * status.f_frsize
    return 0


def disk_bytes(folders: Sequence[Path]) -> float:
    """Return the space on disk of files and folders, as du(1) counts it: it follows no link and any depth.

    Folders that a program has closed to this user are counted by root of a user namespace. Infinity when they cannot be
    counted, or not within a minute.
    """
    size, closed = _disk_usage([], folders)
    if closed:
        size, closed = _disk_usage(["unshare", "--user", "--map-root-user", "--"], folders)
    return math.inf if closed else size


def _disk_usage(prefix: Sequence[str], folders: Sequence[Path]) -> tuple[float, bool]:
    """Return the space of folders, and whether one was closed."""
    command = ["du", "--summarize", "--total", "--one-file-system", "--block-size=1", "--", *map(str, folders)]
    env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                env=env,
                timeout=_DISK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return math.inf, False
        said.seek(0)
        closed = b"Permission denied" in said.read(_SAID_BYTES)
    total = done.stdout.split(b"\n")[-2:-1]
    return (float(total[0].split()[0]), closed) if total else (math.inf, False)
