"""The recorder as a child process: mitmdump with the addons."""

import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, get_args

from rolltap.addons.errors import InputError, MissingPackageError, RecorderError
from rolltap.addons.store.records import Session, SessionStatus, utc_now
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

    Entering raises `RecorderError` when the recorder does not start, for instance for a wrong `model` or option;
    `MissingPackageError` without mitmproxy; `OSError` when the folder cannot be made. Leaving raises `RecorderError`
    when the recorder has died inside the block.
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
        self._process: subprocess.Popen[bytes] | None = None
        self._proxy: Proxy | None = None
        """None outside of the `with` block."""
        self._aborted = False
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
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rolltap-"))
            # a line when the recorder is ready; nothing when it exits before
            line = self._start(mitmdump, stack).readline()
            if not line:
                self._copier.join()
                raise RecorderError(f"the recorder did not start:\n{self._tail()}")
            address = json.loads(line)
            proxy = Proxy(
                f"http://{address['host']}:{address['port']}",
                ca=Path(self._options.get("confdir", ["~/.mitmproxy"])[-1], "mitmproxy-ca-cert.pem"),
                secret=self._secret,
                bundle=Path(folder, "ca-bundle.pem"),
            )
            self._writer = stack.enter_context(RunWriter(self.path))
            self._proxy, self._cleanup = proxy, stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._proxy = None
        died = self._process is not None and self._process.poll() is not None
        self._cleanup.close()
        if died and kind is None:
            self.check()

    def abort_start(self) -> None:
        """Stop the recorder while another thread enters it. Entering raises `RecorderError` then."""
        self._aborted = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def environment(self, session_id: str) -> dict[str, str]:
        """Return the variables with which a program is recorded as the session `session_id`.

        Raises `RecorderError` outside of the `with` block.
        """
        return self._running().environment(session_id)

    def end(self, session: Session) -> None:
        """Record how a session ended and end it. Its running calls are recorded, and its commits are synced to the disk
        unless `rolltap_fsync` is `never`. `finished_at` is set if it is None.

        Raises `InputError` for an empty id, a status that a session cannot end with, and a reward that is not finite;
        `RecorderError` outside of the `with` block and when the recorder has died or cannot do that; `OSError` when the
        run folder cannot be written.
        """
        proxy = self._running()
        if not session.session_id:
            raise InputError("the session has an empty session_id")
        statuses = [status for status in get_args(SessionStatus) if status != "unknown"]
        if session.status not in statuses:
            raise InputError(f"session {session.session_id}: status={session.status!r}: choose {', '.join(statuses)}")
        if session.reward is not None and not math.isfinite(session.reward):
            raise InputError(f"session {session.session_id}: the reward {session.reward} is not finite")
        session.finished_at = session.finished_at or utc_now()
        self._writer.add_session(session)
        try:
            proxy.end_session(session.session_id)
        except RecorderError:
            self.check()
            raise

    def check(self) -> None:
        """Raise `RecorderError` if the recorder has died."""
        if self._process is not None and self._process.poll() is not None:
            raise RecorderError(f"the recorder died with status {self._process.returncode}:\n{self._tail()}")

    def _running(self) -> Proxy:
        if self._proxy is None:
            raise RecorderError("the recorder is not running: use it inside `with Recorder(...) as recorder:`")
        return self._proxy

    def _start(self, mitmdump: str, stack: ExitStack) -> TextIO:
        """Start the process, which `stack` stops. Return the pipe on which it says that it is ready."""
        ready, told = os.pipe()
        pipe = stack.enter_context(os.fdopen(ready))
        try:
            command = [mitmdump, "-s", str(self.script()), "--listen-host", "127.0.0.1", "--listen-port", "0"]
            for name, values in {**self._options, "rolltap_ready": [f"/dev/fd/{told}"]}.items():
                for value in values:
                    command += ["--set", f"{name}={value}"]
            self._process = subprocess.Popen(
                command,
                # the secret by environment: every process of the machine can read a command line
                env={**os.environ, "ROLLTAP_SECRET": self._secret, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[told],
                start_new_session=True,  # Ctrl-C is for this process, which ends the sessions before the recorder
            )
        finally:
            os.close(told)
        self._copier = threading.Thread(target=self._copy_log, args=(self._process,), daemon=True)
        self._copier.start()
        stack.callback(self._stop, self._process)
        if self._aborted:
            self._process.send_signal(signal.SIGTERM)
        return pipe

    def _copy_log(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output, (self.path / "recorder.log").open("ab", buffering=0) as log:
            for line in output:
                # mitmdump exits when it cannot print; a full disk must not stop it
                with suppress(OSError):
                    log.write(line)

    def _tail(self) -> str:
        return "\n".join((self.path / "recorder.log").read_text(errors="replace").splitlines()[-8:])

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._copier.join()
