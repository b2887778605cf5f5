"""The command lines that boxes need of a container engine, and how a command of an engine is called."""

import csv
import io
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rolltap.trainer.rollouts.runtimes.runtime import BoxSpec, Mount

KEEPER = ("/bin/sh", "-c", "while :; do sleep 86400; done")
"""First process of a box. It collects the processes that end; no signal from inside ends it (pid_namespaces(7))."""

_SECONDS = 300.0
"""Time for one command of an engine: its storage may be slow."""


class Engine(Protocol):
    """The command lines of a container engine. Nothing here runs them."""

    def create(self, name: str, spec: BoxSpec, mounts: Sequence[Mount], folder: Path) -> list[list[str]]:
        """Return the commands that make and start the box `name` with the process `KEEPER`, without network.

        The files that they read are written into `folder`.
        """

    def restart(self, name: str, spec: BoxSpec, mounts: Sequence[Mount]) -> list[str]:
        """Return the command that starts a stopped box again."""

    def stop(self, name: str) -> list[str]:
        """Return the command that kills all processes of a box and waits for their end."""

    def remove(self, name: str) -> list[str]:
        """Return the command that kills and removes a box. It may not exist."""

    def execute(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs a program in a box, with the program's output and exit status."""

    def state(self, name: str) -> list[str]:
        """Return the command that prints the state of a box."""

    def pid(self, state: str) -> int:
        """Return the id that the first process of a box has on this machine; 0 when it does not run."""


def call(command: Sequence[str], *, timeout: float = _SECONDS) -> str:
    """Run a short command and return its stdout. Raises `OSError` with its message when it fails."""
    shown = shlex.join(command[:4])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"`{shown} ...` does not end within {timeout:g} s") from error
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip()
        raise OSError(f"`{shown} ...` fails with status {done.returncode}: {message}")
    return done.stdout


def mount_option(mount: Mount, readonly: str) -> str:
    """Return the value of an engine's option `--mount`, a row of CSV: paths may have commas and colons."""
    row = ["type=bind", f"source={mount.source}", f"destination={mount.target}"]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(row if mount.writable else [*row, readonly])
    return text.getvalue()
