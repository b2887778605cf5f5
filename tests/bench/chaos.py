"""Faults of the soak: a recorder is killed, the engine is killed, the disk fills up. Each passes."""

import itertools
import os
import shutil
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.bench.processes import Engine, Mitmdump

PAUSE_SECONDS = 7.0
"""Time between the end of a fault and the next one."""
ENGINE_DOWN_SECONDS = 2.0
DISK_FULL_SECONDS = 4.0
DISK = "512m"
"""Size of the disk that is filled up."""


class Chaos:
    """Makes faults, one after the other. `disk` is a folder on a small disk, or None to leave the disk out."""

    def __init__(self, recorders: list[Mitmdump], engine: Engine, disk: Path | None) -> None:
        self._recorders, self._engine, self._disk = itertools.cycle(recorders), engine, disk
        self.faults: Counter[str] = Counter()

    def run(self, end: float) -> None:
        """Make faults until `end`, by `time.time`, at least one. All processes run when it returns."""
        faults = [self._kill_recorder, self._fill_disk, self._restart_engine]
        for fault in itertools.cycle(faults):
            fault()
            if time.time() + PAUSE_SECONDS >= end:
                return
            time.sleep(PAUSE_SECONDS)

    def _kill_recorder(self) -> None:
        self.faults["kill -9 of a recorder"] += 1
        recorder = next(self._recorders)
        recorder.kill()
        recorder.start()

    def _restart_engine(self) -> None:
        self.faults["engine restart"] += 1
        self._engine.kill()
        time.sleep(ENGINE_DOWN_SECONDS)
        self._engine.start()

    def _fill_disk(self) -> None:
        if self._disk is None:
            return
        self.faults["full disk"] += 1
        ballast = self._disk / "ballast"
        with ballast.open("wb") as file:
            _take_all(file.fileno())
        time.sleep(DISK_FULL_SECONDS)
        ballast.unlink()


def _take_all(descriptor: int) -> None:
    """Make a file so large that its disk is full, while others write to that disk."""
    size = 0
    for step in (1 << 24, 1 << 20, 1 << 12):
        with suppress(OSError):
            while True:
                os.posix_fallocate(descriptor, size, step)
                size += step


def on_a_small_disk(folder: Path, command: list[str]) -> list[str] | None:
    """Return a command that sees a small disk at `folder`, or None when this machine lets nobody mount one."""
    mount = 'mount -t tmpfs -o "size=$0" none "$1" && shift && exec "$@"'
    for options in ("-rm", "-m"):
        prefix = ["unshare", options, "sh", "-c", mount, DISK, str(folder)]
        if shutil.which("unshare") and not subprocess.run([*prefix, "true"], capture_output=True).returncode:
            return [*prefix, *command]
    return None
