"""The limits of a box that no kernel holds: its processes and folders are polled.

A program in a container has control groups as well, where its engine can use them. Elsewhere a
process has limits of its own (`rlimits`), and polling alone sees what all processes of a box use
together.
"""

import asyncio
import math
import os
import random
import re
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rolltap.trainer.boxes.runtime import StopReason
from rolltap.trainer.tasks.task import Limits

_PAUSE_SECONDS = 0.25
_BUSY_SHARE = 0.05
"""Share of a core's time that looks at one thing may take, unless their pauses would get longer
than these:"""
_LONGEST_SECONDS = 2.0
_LONGEST_DISK_SECONDS = 10.0
_SLICE_SECONDS = 0.25
"""Time for open files in one look."""
_DISK_SECONDS = 60.0
_DISK_THREADS = 4
_STDERR_BYTES = 1 << 20
_GIB = 1 << 30
_DESCRIPTORS = 4096
"""Soft limit of open files of a process."""
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_UPPER = re.compile(r"\bupperdir=([^,\s]+)")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

Find = Callable[["ProcessTable"], list[psutil.Process]]
"""Returns the processes of a box."""
FindNow = Callable[[], list[psutil.Process]]
"""Returns them as they are now."""
Look = Callable[[], StopReason | None]
"""Returns the limit that a box exceeds; None if it exceeds none."""


async def exceeded(limits: Limits, find: Find, folders: Sequence[Path]) -> StopReason:
    """Return the first limit that the processes which `find` returns exceed together.

    Memory is that of the processes, with shared pages divided among them, and of files that they
    hold open in memory (memfd). Disk is the space of `folders`, and of deleted files that are open.
    All are polled four times a second. Where that takes long, or with many boxes, processes and
    memory are polled every two seconds at least, and disk every ten seconds, beside the time for
    counting it. Between two polls a program may exceed a limit. System V shared memory and memory
    files on their way through a socket are not seen.
    """
    nameless = Nameless()
    find_now = partial(_find_now, find)
    looks: list[Coroutine[Any, Any, StopReason]] = []
    if limits.memory_gib is not None or limits.processes is not None:
        look = partial(_processes_over, limits, find_now, nameless)
        looks.append(_PROCESSES.repeat(look))
    if limits.memory_gib is not None or limits.disk_gib is not None:
        looks.append(_OPEN_FILES.repeat(partial(nameless.look, find_now)))
    if limits.disk_gib is not None:
        look = partial(_disk_over, limits.disk_gib * _GIB, folders, nameless)
        looks.append(_DISK.repeat(look))
    if not looks:
        await asyncio.Event().wait()
    tasks = [asyncio.create_task(look) for look in looks]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def rlimits(limits: Limits) -> dict[str, int]:
    """Return limits of the module `resource` for each process: open files, and the size of one
    file."""
    found = {"RLIMIT_NOFILE": _DESCRIPTORS}
    if limits.disk_gib is not None:
        found["RLIMIT_FSIZE"] = int(limits.disk_gib * _GIB)
    return found


def choose_cores(limits: Limits) -> list[int]:
    """Return the processor cores of a box, chosen at random; none for all.

    Programs that count cores see so many. A program that wants more can take them.
    """
    available = sorted(os.sched_getaffinity(0))
    if limits.cpus is None or limits.cpus >= len(available):
        return []
    return sorted(random.sample(available, math.ceil(limits.cpus)))


def end_program(pid: int, grace: float = 5.0) -> None:
    """End the program of process `pid` and its descendants: SIGTERM, then SIGKILL after `grace`
    seconds."""
    with suppress(psutil.NoSuchProcess):
        program = psutil.Process(pid)
        running = [program, *program.children(recursive=True)]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in running:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            psutil.wait_procs(running, timeout=grace)


class ProcessTable:
    """The processes of this machine at one moment, which the looks at all boxes share."""

    def __init__(self) -> None:
        self._processes = list(psutil.process_iter(["ppid"]))
        self._children: dict[int, list[psutil.Process]] = {}
        self._namespaces: dict[int, str | None] = {}
        for process in self._processes:
            self._children.setdefault(process.info["ppid"], []).append(process)

    def descendants(self, pid: int) -> list[psutil.Process]:
        """Return the descendants of process `pid`."""
        found: dict[int, psutil.Process] = {}
        parents = [pid]
        while parents:
            for child in self._children.get(parents.pop(), []):
                if child.pid not in found:
                    found[child.pid] = child
                    parents.append(child.pid)
        return list(found.values())

    def in_namespace_of(self, pid: int) -> list[psutil.Process]:
        """Return the processes in the PID namespace of process `pid`, with those in namespaces that
        they have made.

        Programs that an engine runs in a container are no children of its first process.
        """
        if not self._namespaces:
            pids = [process.pid for process in self._processes]
            # at once: two threads may ask
            self._namespaces = dict(zip(pids, map(_pid_namespace, pids), strict=True))
        namespace = _pid_namespace(pid)
        if namespace is None:
            return []
        found: dict[int, psutil.Process] = {}
        for process in self._processes:
            if self._namespaces[process.pid] == namespace:
                for member in [process, *self.descendants(process.pid)]:
                    found[member.pid] = member
        return list(found.values())


_table_lock = threading.Lock()
_table: tuple[float, ProcessTable] | None = None
"""The newest table, and when it was read."""


def _find_now(find: Find) -> list[psutil.Process]:
    """Return what `find` finds in a table that is no older than a pause between two looks."""
    global _table
    with _table_lock:
        now = time.monotonic()
        if _table is None or now - _table[0] > _PAUSE_SECONDS:
            _table = now, ProcessTable()
        table = _table[1]
    return find(table)


def _pid_namespace(pid: int) -> str | None:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return None


def written_folders(pid: int) -> list[Path]:
    """Return the folder of this machine that holds what is written to the root of process `pid`: of
    an overlay only."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
            fields, _, source = line.partition(" - ")
            if fields.split()[4] == "/":
                return [Path(folder) for folder in _UPPER.findall(source)]
    return []


def out_of_memory_kills(pid: int) -> int:
    """Return how many processes the kernel has killed at the memory limit of the control group of
    process `pid`.

    See `memory.oom_control` of control groups of version 1, `memory.events` of version 2.
    """
    kills = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            file = _CONTROL_GROUPS / path.lstrip("/") / "memory.events"
            if "memory" in controllers.split(","):
                file = _CONTROL_GROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
            with suppress(OSError):
                for number in _KILLS.findall(file.read_text()):
                    kills += int(number)
    return kills


class _Poller:
    """Looks at one thing of all boxes, in threads of their own: they keep no other work waiting."""

    def __init__(self, name: str, threads: int, longest: float) -> None:
        self._threads = ThreadPoolExecutor(threads, f"rolltap-{name}")
        self._longest = longest
        self._boxes = 0

    async def repeat(self, look: Look) -> StopReason:
        """Call `look` again and again until it returns a reason, with pauses: see `pause_after`."""
        loop = asyncio.get_running_loop()
        self._boxes += 1
        try:
            while True:
                reason, seconds = await loop.run_in_executor(self._threads, _timed, look)
                if reason is not None:
                    return reason
                await asyncio.sleep(pause_after(seconds, self._boxes, self._longest))
        finally:
            self._boxes -= 1


def _timed(look: Look) -> tuple[StopReason | None, float]:
    begin = time.monotonic()
    reason = look()
    return reason, time.monotonic() - begin


def pause_after(seconds: float, boxes: int, longest: float) -> float:
    """Return the pause after a look that took `seconds`, where so many boxes are looked at.

    The looks at all boxes share `_BUSY_SHARE` of a core, unless the pause would be over `longest`
    seconds.
    """
    return min(max(_PAUSE_SECONDS, seconds * boxes / _BUSY_SHARE), longest)


_PROCESSES = _Poller("processes", 1, _LONGEST_SECONDS)
_OPEN_FILES = _Poller("open-files", 1, _LONGEST_SECONDS)
_DISK = _Poller("disk", _DISK_THREADS, _LONGEST_DISK_SECONDS)


def _processes_over(limits: Limits, find: FindNow, nameless: "Nameless") -> StopReason | None:
    processes = find()
    if limits.processes is not None:
        threads = _sum(processes, psutil.Process.num_threads)
        if threads > limits.processes:
            return "processes"
    if limits.memory_gib is not None:
        left = limits.memory_gib * _GIB - nameless.in_memory
        # resident sizes are quick to read, and count shared pages for each process
        if _sum(processes, _resident_size) > left and _sum(processes, _own_size) > left:
            return "memory"
    return None


def _sum(processes: Sequence[psutil.Process], read: Callable[[psutil.Process], int]) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += read(process)
    return total


def _resident_size(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def _own_size(process: psutil.Process) -> int:
    return int(process.memory_full_info().pss)


def _disk_over(most: float, folders: Sequence[Path], nameless: "Nameless") -> StopReason | None:
    if nameless.on_disk + disk_bytes(folders) > most:
        return "disk"
    return None


class Nameless:
    """Open files that no folder has, counted process by process, so that many of them keep nothing
    waiting.

    Attributes:
        in_memory: Bytes of those in memory.
        on_disk: Bytes of the others.
    """

    def __init__(self) -> None:
        self.in_memory = 0
        self.on_disk = 0
        self._rest: list[psutil.Process] = []
        """Processes that this round has not looked at."""
        self._memory_files: dict[tuple[int, int], int] = {}
        """Sizes of the files of this round, by device and inode."""
        self._disk_files: dict[tuple[int, int], int] = {}

    def look(self, find: FindNow) -> None:
        """Look at further processes, for a moment. A round over all begins with what `find`
        returns."""
        end = time.monotonic() + _SLICE_SECONDS
        if not self._rest:
            self._rest = find()
            self._memory_files.clear()
            self._disk_files.clear()
        while self._rest:
            self._count(self._rest.pop())
            if time.monotonic() >= end:
                break
        in_memory = sum(self._memory_files.values())
        on_disk = sum(self._disk_files.values())
        if self._rest:  # what a round has found so far can only add to the last one
            in_memory = max(in_memory, self.in_memory)
            on_disk = max(on_disk, self.on_disk)
        self.in_memory = in_memory
        self.on_disk = on_disk

    def _count(self, process: psutil.Process) -> None:
        with suppress(OSError), os.scandir(f"/proc/{process.pid}/fd") as descriptors:
            for descriptor in descriptors:
                with suppress(OSError):
                    status = os.stat(descriptor.path)
                    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 0:
                        continue
                    files = self._disk_files
                    if os.readlink(descriptor.path).startswith("/memfd:"):
                        files = self._memory_files
                    files[status.st_dev, status.st_ino] = status.st_blocks * 512


def disk_bytes(folders: Sequence[Path]) -> float:
    """Return the space on disk of files and folders, as du(1) counts it: it follows no link and any
    depth.

    Folders that a program has closed to this user are counted by root of a user namespace. Infinity
    when they cannot be counted, or not within a minute.
    """
    size = _disk_usage([], folders)
    if size is None:
        size = _disk_usage(["unshare", "--user", "--map-root-user", "--"], folders)
    if size is None:
        return math.inf
    return size


def _disk_usage(prefix: Sequence[str], folders: Sequence[Path]) -> float | None:
    """Return the space of folders; None if one was closed."""
    options = ["--summarize", "--total", "--one-file-system", "--block-size=1", "--"]
    command = [*prefix, "du", *options, *map(str, folders)]
    env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                timeout=_DISK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return math.inf
        errors.seek(0)
        if b"Permission denied" in errors.read(_STDERR_BYTES):
            return None
    lines = done.stdout.splitlines()
    if not lines:
        return math.inf
    return float(lines[-1].split()[0])
