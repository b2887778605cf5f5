"""The recorder as a child process: mitmdump with the addons."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rolltap.addons.errors import MissingPackageError, RecorderError
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.rollouts.environment import Proxy

_STOP_SECONDS = 20.0


class Recorder:
    """A recorder of one run, as a child process: mitmdump on a free loopback port, with a secret. A context manager.

    `out` is the run folder. It is created if it does not exist; otherwise new sessions are added to it. `engine` is the
    URL of the vLLM server, or several separated by commas. `model` is the served model's folder or name, for its
    tokenizer. `options` are further mitmproxy options, as the README lists them; a repeatable one has a list of values.
    The recorder's log is `recorder.log`
    in the run folder.

    Entering raises `RecorderError` when the recorder does not start, and `MissingPackageError` without mitmproxy.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        engine: str,
        model: str | Path,
        options: Mapping[str, str | Sequence[str]] | None = None,
    ) -> None:
        self.path = Path(out)
        """The run folder."""
        self.engine = engine
        self._secret = secrets.token_urlsafe(32)
        known = {"rolltap_out": str(out), "rolltap_engine": engine, "rolltap_model": str(model), **(options or {})}
        self._options = {name: [value] if isinstance(value, str) else [*value] for name, value in known.items()}

    @staticmethod
    def script() -> Path:
        """Return the path of the script that `mitmdump -s` loads."""
        import rolltap.addons

        return Path(next(iter(rolltap.addons.__path__))) / "record.py"

    def __enter__(self) -> Self:
        program = Path(sys.executable).with_name("mitmdump")
        mitmdump = str(program) if program.exists() else shutil.which("mitmdump")
        if mitmdump is None:
            raise MissingPackageError("mitmdump is not installed: pip install 'rolltap[record]'")
        self.path.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="rolltap-")
        ready, told = os.pipe()  # end of file when the recorder exits, ready or not
        command = [mitmdump, "-s", str(self.script()), "--listen-host", "127.0.0.1", "--listen-port", "0"]
        for name, values in {**self._options, "rolltap_ready": [f"/dev/fd/{told}"]}.items():
            for value in values:
                command += ["--set", f"{name}={value}"]
        # by environment: every process of the machine can read a command line
        env = {**os.environ, "ROLLTAP_SECRET": self._secret, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[told],
            start_new_session=True,  # Ctrl-C is for this process, which ends the sessions before the recorder
        )
        os.close(told)
        self._copier = threading.Thread(target=self._copy_log, daemon=True)
        self._copier.start()
        try:
            with open(ready) as pipe:
                line = pipe.readline()
            if not line:
                self._copier.join()
                raise RecorderError(f"the recorder did not start:\n{self._tail()}")
            address = json.loads(line)
            self._proxy = Proxy(
                f"http://{address['host']}:{address['port']}",
                ca=Path(self._options.get("confdir", ["~/.mitmproxy"])[-1], "mitmproxy-ca-cert.pem"),
                secret=self._secret,
                bundle=Path(self._folder.name, "ca-bundle.pem"),
            )
            self._writer = RunWriter(self.path)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._writer.close()
        finally:
            self._stop()

    def environment(self, session_id: str) -> dict[str, str]:
        """Return the variables with which a program is recorded as the session `session_id`."""
        return self._proxy.environment(session_id)

    def end(self, session: Session) -> None:
        """Record how a session ended and end it: its running calls are recorded, and it is synced to the disk.

        Raises `RecorderError` when the recorder has died or cannot do that, and `OSError` when the run folder cannot
        be written.
        """
        self._writer.add_session(session)
        try:
            self._proxy.end(session.session_id)
        except RecorderError:
            self.check()
            raise

    def check(self) -> None:
        """Raise `RecorderError` if the recorder has died."""
        if self._process.poll() is not None:
            raise RecorderError(f"the recorder died with status {self._process.returncode}:\n{self._tail()}")

    def _copy_log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, (self.path / "recorder.log").open("ab", buffering=0) as log:
            for line in output:
                # mitmdump exits when it cannot print; a full disk must not stop it
                with suppress(OSError):
                    log.write(line)

    def _tail(self) -> str:
        return "\n".join((self.path / "recorder.log").read_text(errors="replace").splitlines()[-8:])

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._copier.join()
        self._folder.cleanup()
