"""The process of Harbor's Python that has environments, as rolltap talks to it: see
`inside/harbor_environments.py`."""

import json
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError

logger = logging.getLogger(__name__)

VERSION = "0.25"
"""Harbor's version whose interface is known: the first two numbers."""
_SCRIPT = Path(__file__).parents[1] / "inside" / "harbor_environments.py"
_STOP_SECONDS = 120.0
_SAID_BYTES = 2000


class Harbor:
    """A process of Harbor's Python, which has environments. `python` is its program.

    Raises `InputError` when there is no such program.
    """

    def __init__(self, python: Path) -> None:
        self._python = python
        self._numbers = count()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="rolltap-harbor-"))
        """For what Harbor keeps of its trials."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        # as if its environment were activated: podman-compose may be there too
        path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
        try:
            self.process = subprocess.Popen(
                [str(python), "-P", str(_SCRIPT), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env={**os.environ, "PATH": path},
                start_new_session=True,  # Ctrl-C must not end it before its environments
            )
        except OSError as error:
            self._said.close()
            self.folder.rmdir()
            raise InputError(
                f"Harbor's Python {python} cannot be started: {error.strerror}. Install Harbor in"
                " an environment of its own (python3.12 -m venv harbor && harbor/bin/pip install"
                f" harbor=={VERSION}.0), and name its bin/python with --harbor-python"
            ) from error
        self._reader = threading.Thread(target=self._read, name="rolltap-harbor", daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        """True when the process has ended."""
        return self.process.poll() is not None

    def send(self, operation: str, **fields: Any) -> Future[dict[str, Any]]:
        """Send a request.

        The future has its answer; or `InputError` for what would fail again, or `OSError`.
        """
        future: Future[dict[str, Any]] = Future()
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        line = json.dumps({"id": number, "op": operation, **fields}) + "\n"
        assert self.process.stdin is not None
        with self._lock:
            self._waiting[number] = future
            try:
                self.process.stdin.write(line.encode())
                self.process.stdin.flush()
            except OSError:
                self._waiting.pop(number, None)
                future.set_exception(self._died())
        return future

    def close(self) -> None:
        """Let the process stop what is left of its environments, and wait for its end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self._lock, suppress(OSError):  # it has ended
            self.process.stdin.close()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning(
                "Harbor does not stop its environments in %g s: it is killed", _STOP_SECONDS
            )
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self._said.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # it was killed

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = self._waiting.pop(answer.pop("id"))
            if "error" not in answer:
                future.set_result(answer)
            elif answer["permanent"]:
                future.set_exception(InputError(f"Harbor: {answer['error']}"))
            else:
                future.set_exception(OSError(f"Harbor: {answer['error']}"))
        self.process.wait()
        with self._lock:
            waiting = [*self._waiting.values()]
            self._waiting.clear()
            for future in waiting:
                future.set_exception(self._died())

    def _died(self) -> OSError | InputError:
        """Return the error of a process that ended by itself: before Harbor was there, it would
        do so again."""
        self._said.seek(max(0, os.fstat(self._said.fileno()).st_size - _SAID_BYTES))
        said = self._said.read().decode(errors="replace").strip()
        last = said.rpartition("\n")[2]
        if "ModuleNotFoundError" in last or "ImportError" in last:
            return InputError(
                f"{self._python} has no Harbor {VERSION} ({last}): install it there "
                f"({self._python} -m pip install harbor=={VERSION}.0), or name another Python "
                "with --harbor-python"
            )
        return OSError(f"Harbor's process ended with status {self.process.poll()}: {said}")
