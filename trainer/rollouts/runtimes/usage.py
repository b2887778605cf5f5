"""Processes and written files of a container, as this machine sees them, and kills for lack of memory."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

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
