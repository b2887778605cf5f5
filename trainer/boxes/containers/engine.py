"""The command lines of container engines, and how they are run."""

import csv
import io
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from rolltap.trainer.boxes.runtime import BoxSpec, Mount

KEEPER = ("/bin/sh", "-c", "while :; do sleep 86400; done")
"""First process of a box. It collects the processes that end; no signal from inside ends it
(pid_namespaces(7))."""
_SECONDS = 300.0
"""Time for one command of an engine: its storage may be slow."""


class Engine(ABC):
    """The command lines of a container engine: those of Podman, which the others have as far as
    they say nothing else.

    `command` is the program and its arguments before a command.
    """

    command: tuple[str, ...]

    @abstractmethod
    def create(
        self,
        name: str,
        spec: BoxSpec,
        mounts: Sequence[Mount],
        folder: Path,
    ) -> list[list[str]]:
        """Return the commands that make and start the box `name` with the process `KEEPER`, without
        network.

        The files that they read are written into `folder`.
        """

    def restart(self, name: str, spec: BoxSpec, mounts: Sequence[Mount]) -> list[str]:
        """Return the command that starts a stopped box again."""
        return [*self.command, "start", name]

    def stop(self, name: str) -> list[str]:
        """Return the command that kills all processes of a box and waits for their end."""
        return [*self.command, "stop", "-t", "0", name]

    def remove(self, name: str) -> list[str]:
        """Return the command that kills and removes a box. It may not exist."""
        return [*self.command, "rm", "--force", "--volumes", name]

    def execute(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs a program in a box, with the program's output and exit
        status."""
        return [*self.command, "exec", name, *command]

    def close(self, pid: int) -> list[list[str]]:
        """Return the commands that close the box of the first process `pid` before a program runs
        in it."""
        return []

    def first_process(self, name: str) -> int:
        """Return the id that the first process of a box has on this machine; 0 when it does not
        run. Raises `OSError`."""
        state = ["inspect", "--type", "container", "--format", "{{.State.Pid}}", name]
        return int(call([*self.command, *state]))


def call(command: Sequence[str], *, timeout: float = _SECONDS) -> str:
    """Run a short command and return its stdout. Raises `OSError` with its message when it
    fails."""
    shown = shlex.join(command[:4])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"`{shown} ...` does not end within {timeout:g} s") from error
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip()
        raise OSError(f"`{shown} ...` fails with status {done.returncode}: {message}")
    return done.stdout


def mount_options(mounts: Iterable[Mount], readonly: str) -> list[str]:
    """Return an engine's options `--mount`. The value is a row of CSV: paths may have commas and
    colons."""
    options = []
    for mount in mounts:
        row = ["type=bind", f"source={mount.source}", f"destination={mount.target}"]
        if not mount.writable:
            row.append(readonly)
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(row)
        options += ["--mount", text.getvalue()]
    return options
