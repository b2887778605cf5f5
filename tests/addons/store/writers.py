"""Writers that are killed or meet a failing disk: `python -m tests.addons.store.writers DEED RUN
[SEED]`.

DEED is the name of a function below. Its result is printed as JSON. One process imports everything
and has no threads. It forks a process for each writer to kill.
"""

import errno
import fcntl
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from rolltap.addons.store import staging, tables
from rolltap.addons.store.metadata import add_engine, add_recorder, read_metadata, write_metadata
from rolltap.addons.store.records import CALL_SCHEMA, Call, Event, VersionSpan
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.tables import RunWriter, read_rows
from tests.deep import DEEP

KILLS = 200 if DEEP else 30
LONGEST = 50_000
"""Most tokens of a call."""
STRIDE = 1 if DEEP else 4
"""A writer is killed at every step, or at every fourth one."""
STEPPED = 4
"""Number of calls of a writer that is killed at every step. All but the last are compacted."""
BALLAST = 40 if DEEP else 10
"""Number of ballast files, a multiple of five. The disk fills up again after each one is deleted.
"""


def make_call(writer: int, number: int, longest: int = LONGEST) -> Call:
    """Return the call that a writer commits under a number. It has 1 to `longest` tokens,
    log-uniform."""
    some = np.random.default_rng([writer, number])
    tokens = int(longest ** some.random())
    sampled = int(some.integers(tokens + 1))
    return Call(
        session_id=f"s{writer}-{number // 7}",
        call_id=f"{writer}-{number}",
        prompt_ids=some.integers(150_000, size=tokens - sampled).tolist(),
        completion_ids=some.integers(150_000, size=sampled).tolist(),
        logprobs=(-some.random(sampled)).tolist(),
        weight_versions=[VersionSpan(version="1", start=0, end=sampled)],
        messages=json.dumps([{"role": "user", "content": "é" * int(some.integers(2000))}]),
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def fork(work: Callable[[int], None], on_message: Callable[[str], object]) -> tuple[int, int]:
    """Run `work(descriptor)` in another process and return its process id and wait status.

    Lines that it writes to the descriptor go to `on_message`. The process is killed when that
    returns "kill".
    """
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(read)
            work(write)
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        finally:
            os._exit(1)
    os.close(write)
    with open(read) as messages:
        for message in messages:
            if on_message(message.strip()) == "kill":
                os.kill(pid, signal.SIGKILL)
    return pid, os.waitpid(pid, 0)[1]


def tell(descriptor: int, message: str) -> None:
    """Write a line with one system call: a short write to a pipe is atomic."""
    os.write(descriptor, f"{message}\n".encode())


def record(run: Path, writer: int, told: int, numbers: Iterator[int]) -> None:
    """Commit calls and end a session after every seventh call. Sends a message before and after
    each of these steps."""
    with RunWriter(run, ("never", "session", "call")[writer % 3]) as records:
        for number in numbers:
            call = make_call(writer, number)
            tell(told, "begin")
            records.add_call(call)
            tell(told, call.call_id)
            if number % 7 == 6:
                tell(told, "end")
                records.end_session()
                tell(told, "ended")
        tell(told, "close")


def kills(run: Path, seed: str) -> list[list[str]]:
    """Kill each of `KILLS` writers of one run after a random message. Return the committed call ids
    of each writer."""
    tables.SEGMENT_BYTES = 200_000
    write_metadata(run, {})
    some = random.Random(seed)
    committed = []
    for writer in range(KILLS):
        last = some.randrange(1, 50)
        calls = some.randrange(1, 30)
        seen: list[str] = []

        def on_message(message: str, seen: list[str] = seen, last: int = last) -> str:
            seen.append(message)
            return "kill" if len(seen) == last else ""

        fork(
            lambda told, writer=writer, calls=calls: record(run, writer, told, iter(range(calls))),
            on_message,
        )
        committed.append([message for message in seen if "-" in message])
    return committed


_CALLS = [
    *(
        (os, name)
        for name in (
            "open",
            "pwrite",
            "fsync",
            "fdatasync",
            "rename",
            "unlink",
            "ftruncate",
            "close",
        )
    ),
    (fcntl, "flock"),
]
"""System calls that change a file, except the writes of `Steps`."""


class Steps(io.BufferedWriter):
    """A file whose writes count as steps."""

    def write(self, data) -> int:
        _step()
        self.flush()
        return super().write(data)


def _step() -> None:
    global _left
    _left -= 1
    if _left < 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _stepping(call: Callable) -> Callable:
    def stepping(*args, **kwargs):
        _step()
        return call(*args, **kwargs)

    return stepping


def _killed_at(step: int) -> None:
    """Arrange that this process kills itself before a step."""
    global _left
    _left = step
    for module, name in _CALLS:
        setattr(module, name, _stepping(getattr(module, name)))
    staging.open = lambda path, mode: Steps(io.FileIO(path, mode))


def steps(run: Path) -> list[list[str]]:
    """Kill a writer at step 0, the next one `STRIDE` later, until one completes. Returns their
    committed call ids.

    Writer N has the run folder `run/N`.
    """
    tables.SEGMENT_BYTES = 1
    committed: list[list[str]] = []
    status = -1
    while status:
        folder = run / str(len(committed))
        write_metadata(folder, {})
        told: list[str] = []

        def work(descriptor: int, folder: Path = folder) -> None:
            _killed_at(len(committed) * STRIDE)
            with RunWriter(folder) as writer:
                for number in range(STEPPED):
                    writer.add_call(make_call(0, number, longest=2000))
                    tell(descriptor, f"0-{number}")
                    if number == STEPPED - 2:
                        writer.end_session()

        status = fork(work, told.append)[1]
        committed.append(told)
    return committed


def full_disk(run: Path) -> dict:
    """Fill the disk repeatedly. `run` is the mount point of a small disk."""
    tables.SEGMENT_BYTES = 100_000
    write_metadata(run, {})
    ballast = [run / f"ballast-{number}" for number in range(BALLAST)]
    for path in ballast:
        path.write_bytes(bytes(100_000))
    committed: list[str] = []
    problems: list[str] = []
    number = 0
    while ballast:
        writer = RunWriter(run)
        for _ in range(5):
            try:
                while True:
                    writer.add_call(call := make_call(0, number, longest=20_000))
                    committed.append(call.call_id)
                    number += 1
                    writer.end_session()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if sorted(readable(run)) != sorted(committed):
                    problems.append(f"with {len(ballast)} left")
            number += 1
            ballast.pop().unlink()
        writer.close()
    hidden = [path.name for path in run.iterdir() if path.name.startswith(".")]
    return {
        "committed": len(committed),
        "problems": problems,
        "hidden": hidden,
        "files": len(list(run.iterdir())),
    }


def read_only(run: Path) -> dict:
    """Write to a read-only disk, then to the same disk mounted writable. `run` is its mount
    point."""
    write_metadata(run, {})
    tables.ROOM_BYTES = 0
    writer = RunWriter(run)
    errors = []
    subprocess.run(["mount", "-o", "remount,ro", run], check=True)
    for attempt in (writer.require_room, lambda: writer.add_event(Event(kind="refused"))):
        try:
            attempt()
        except OSError as error:
            errors.append(errno.errorcode[error.errno])
    subprocess.run(["mount", "-o", "remount,rw", run], check=True)
    writer.require_room()
    writer.add_event(Event(kind="refused"))
    writer.close()
    return {"errors": errors, "events": len(list(read_rows(run, "events")))}


def metadata(run: Path) -> dict:
    """Add recorders and engines from several processes at once, and return the metadata."""
    write_metadata(run, {})
    for process in range(4):
        if not os.fork():
            for number in range(10):
                add_recorder(run, {"recorder": f"{process}-{number}"})
                add_engine(run, f"http://{process}", {"version": number})
            os._exit(0)
    for _ in range(4):
        os.wait()
    return read_metadata(run)


def readable(run: Path) -> list[str]:
    """Return the call ids of a run. Raises AssertionError when a row whose digest does not
    match."""
    found = []
    for row in read_rows(run, "calls"):
        assert row_digest(row, CALL_SCHEMA) == row["digest"], row["call_id"]
        found.append(row["call_id"])
    return found


if __name__ == "__main__":
    # pyarrow imports pandas when it makes its first array: do it once here, not in every writer
    pa.array([0])
    deed, folder, *more = sys.argv[1:]
    print(json.dumps(globals()[deed](Path(folder), *more)))
