"""One mitmdump process with the addons."""

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rolltap.addons.errors import MissingPackageError, RecorderError, install_command
from rolltap.trainer.boxes.supervised import Supervised
from rolltap.trainer.locks import STOP_SECONDS

logger = logging.getLogger(__name__)

_LAST = 8
"""Most lines of a log that an error shows."""
_ERROR = re.compile(r"^\[[\d:.]+\](?:\[.*?\])? error: (.*)|^error: (.*)", re.MULTILINE)
"""A line of an error as `addons/log.py` writes it: the first after its time and client."""


def script() -> Path:
    """Return the path of the script that `mitmdump -s` loads."""
    import rolltap.addons

    return Path(next(iter(rolltap.addons.__path__))) / "record.py"


def reasons(log: str) -> str:
    """Return why a recorder did not start, from what it wrote: its errors, or without any its last
    lines."""
    errors = [first or other for first, other in _ERROR.findall(log)]
    return "\n".join(dict.fromkeys(errors)) or last_lines(log)


def last_lines(log: str) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.splitlines()[-_LAST:])


class Mitmdump:
    """A mitmdump process, by default on a free loopback port. Creating it starts it; `stop` and the
    end of this process end it.

    `name` is its name in errors. `options` are mitmproxy options, each with the list of its values.
    The process gets the `secret` through a socket. Its output is appended to the file `log`. It
    keeps the descriptors `kept` open.

    Raises `MissingPackageError` without mitmproxy, and `OSError` when it cannot be started.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Sequence[str]],
        *,
        secret: str,
        log: Path,
        kept: Sequence[int] = (),
    ) -> None:
        self._name = name
        self._log = log
        self._earlier = log.stat().st_size if log.exists() else 0
        command = [program(), "-s", str(script())]
        ready, told = os.pipe()
        self._ready = os.fdopen(ready)
        # not the environment, which every process of the user can read, and not a pipe, which it
        # can open in /proc
        ours, theirs = socket.socketpair()
        self._boxes, boxes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, boxes, os.fdopen(told, "w"):
            ours.sendall(secret.encode())
            channels = {
                "rolltap_ready": f"/dev/fd/{told}",
                "rolltap_secret_file": f"/dev/fd/{theirs.fileno()}",
                "rolltap_boxes": f"/dev/fd/{boxes.fileno()}",
            }
            own = {option: [value] for option, value in channels.items()}
            place = {"listen_host": ["127.0.0.1"], "listen_port": ["0"]}
            for option, values in {**place, **options, **own}.items():
                for value in values:
                    command += ["--set", f"{option}={value}"]
            self._program = Supervised(
                command,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                output=subprocess.PIPE,
                grace=STOP_SECONDS,
                descriptors=[told, theirs.fileno(), boxes.fileno(), *kept],
            )
        self._process = self._program.process
        try:
            self.pid = self._program.started()
            """Process id of mitmdump."""
        except OSError:
            self._program.close()
            self._process.communicate()
            self._ready.close()
            self._boxes.close()
            raise
        self._copier = threading.Thread(target=self._copy_log, daemon=True)
        self._copier.start()

    @property
    def ended(self) -> bool:
        """True when the process has ended."""
        return self._process.poll() is not None

    def address(self) -> str:
        """Return `HOST:PORT` when it accepts calls, and log its warnings. Raises `RecorderError`
        when it ends."""
        with self._ready:
            # a line when the recorder is ready; nothing when it exits before
            line = self._ready.readline()
        if not line:
            self._copier.join()
            raise RecorderError(
                f"{self._name} did not start: {reasons(self._said())}\nIts log is {self._log}"
            )
        announced = json.loads(line)
        for warning in announced["warnings"]:
            logger.warning("%s: %s", self._name, warning)
        return f"{announced['host']}:{announced['port']}"

    @contextmanager
    def accept(self, listener: socket.socket) -> Iterator[None]:
        """Have the process accept connections at a socket that listens, until the block is left.

        Raises `OSError` when the process has ended.
        """
        ended, alive = os.pipe()
        with os.fdopen(alive, "wb"), os.fdopen(ended, "rb") as theirs:
            socket.send_fds(self._boxes, [b"\0"], [listener.fileno(), theirs.fileno()])
            theirs.close()
            yield

    def check(self) -> None:
        """Raise `RecorderError` if the process has ended."""
        if self.ended:
            raise RecorderError(
                f"{self._name} died with status"
                f" {self._process.returncode}:\n{last_lines(self._said())}"
            )

    def terminate(self) -> None:
        """Tell the process to end. Does not wait."""
        self._program.terminate()

    def stop(self) -> None:
        """End the process, and wait for its end."""
        self._program.close()
        self._process.wait()
        self._copier.join()
        self._ready.close()
        self._boxes.close()

    def _copy_log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, self._log.open("ab", buffering=0) as log:
            for line in output:
                # mitmdump exits when it cannot print; a full disk must not stop it
                with suppress(OSError):
                    log.write(line)

    def _said(self) -> str:
        """Return what this process wrote: the log has the lines of earlier recorders of the run
        before."""
        with self._log.open("rb") as log:
            log.seek(self._earlier)
            return log.read().decode(errors="replace")


def program() -> str:
    """Return mitmdump's path. Raises `MissingPackageError`."""
    beside = Path(sys.executable).with_name("mitmdump")
    found = str(beside) if beside.exists() else shutil.which("mitmdump")
    if found is None:
        raise MissingPackageError(f"mitmdump is not installed: {install_command('record')}")
    return found
