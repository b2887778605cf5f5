"""Limits of a box, held by looking at its processes and folders again and again."""

import asyncio
import contextlib
import math
import os
import random
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from rolltap.trainer.rollouts.runtimes.runtime import StopReason
from rolltap.trainer.rollouts.tasks.limits import Limits

_PAUSE_SECONDS = 0.25
_BUSY_SHARE = 0.05
"""Most of a core's time that looking takes."""
_GIB = 1 << 30
_DESCRIPTORS = 4096
"""Soft limit of open files of a process."""


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
    find: Callable[[int], list[psutil.Process]] = descendants,
) -> StopReason:
    """Return the first limit that the descendants of process `pid` exceed, or other processes that `find` returns.

    Memory is what the processes have, shared pages divided among them, the files in `memory_folders` (tmpfs), and the
    files without a folder that they hold open in memory (memfd). Disk is the space of `folders`, and of files that were
    deleted and are open. Looked at four times a second, or less often where a look takes long: between two looks a
    program may exceed a limit. Not seen are System V shared memory and files in memory that are on their way through a
    socket.
    """
    while True:
        begin = time.monotonic()
        reason = await asyncio.to_thread(_look, limits, find, pid, folders, memory_folders)
        if reason is not None:
            return reason
        await asyncio.sleep(max(_PAUSE_SECONDS, (time.monotonic() - begin) / _BUSY_SHARE))


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


def _look(
    limits: Limits,
    find: Callable[[int], list[psutil.Process]],
    pid: int,
    folders: Sequence[Path],
    memory_folders: Sequence[Path],
) -> StopReason | None:
    if limits.memory_gib is None and limits.processes is None and limits.disk_gib is None:
        return None
    processes = find(pid)
    if limits.processes is not None:
        threads = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                threads += process.num_threads()
        if threads > limits.processes:
            return "processes"
    in_memory, on_disk = _nameless_bytes(processes)
    if limits.memory_gib is not None:
        most = limits.memory_gib * _GIB
        files = in_memory + sum(tmpfs_bytes(folder) for folder in memory_folders)
        # resident sizes are quick to read, and count shared pages for each process
        if files + _memory(processes, "rss") > most and files + _memory(processes, "pss") > most:
            return "memory"
    if limits.disk_gib is not None:
        most = limits.disk_gib * _GIB
        if on_disk + disk_bytes(folders) > most:
            return "disk"
    return None


def _memory(processes: Sequence[psutil.Process], kind: str) -> int:
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            memory = process.memory_info() if kind == "rss" else process.memory_full_info()
            total += getattr(memory, kind)
    return total


def _nameless_bytes(processes: Sequence[psutil.Process]) -> tuple[int, int]:
    """Return the bytes in memory and on disk of open files that no folder has."""
    in_memory: dict[tuple[int, int], int] = {}
    on_disk: dict[tuple[int, int], int] = {}
    for process in processes:
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(descriptor.path)
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        where = in_memory if os.readlink(descriptor.path).startswith("/memfd:") else on_disk
                        where[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(in_memory.values()), sum(on_disk.values())


def tmpfs_bytes(folder: Path) -> int:
    """Return the bytes in the file system of a box's folder: 0 while the box is being made and sees this machine's."""
    with contextlib.suppress(OSError):
        if os.stat(folder).st_dev in {os.stat(own).st_dev for own in ("/", "/tmp", "/dev/shm")}:
            return 0
        status = os.statvfs(folder)
        return (status.f_blocks - status.f_bfree) * status.f_frsize
    return 0


def disk_bytes(folders: Sequence[Path]) -> int:
    """Return the space on disk of files and folders, as du(1) counts it: it follows no link and any depth.

    Folders that are closed to this user are not counted.
    """
    command = ["du", "--summarize", "--total", "--one-file-system", "--block-size=1", "--", *map(str, folders)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return int(done.stdout.splitlines()[-1].split()[0])
