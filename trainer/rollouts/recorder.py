"""The recorder as a child process: mitmdump with the addons, from start-up to shutdown."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from rolltap.addons.errors import MissingPackageError, RecorderError
from rolltap.trainer.rollouts.environment import proxy_environment, proxy_url, write_bundle

_STOP_SECONDS = 20.0
_END_SECONDS = 300.0
"""The disk may be slow, and a large file be compacted."""

SESSION_END = "http://session.rolltap/end"
"""Where a session is ended, through the proxy and with its credentials; see `rolltap.addons.capture`."""


def addon_path() -> Path:
    """The script that `mitmdump -s` loads, wherever rolltap is installed."""
    import rolltap.addons

    return Path(next(iter(rolltap.addons.__path__))) / "record.py"


class Recorder:
    """mitmdump recording into `run`, on a free loopback port, with a secret of its own. A context manager.

    `options` are further mitmproxy options. Its log is `recorder.log` in the run folder. Raises `RecorderError` when it
    does not start.
    """

    def __init__(self, run: Path, *, engine: str, model: str, options: Mapping[str, str] | None = None) -> None:
        self.run = run
        self.engine = engine
        self._secret = secrets.token_urlsafe(32)
        self._options = {"rolltap_out": str(run), "rolltap_engine": engine, "rolltap_model": model, **(options or {})}

    def __enter__(self) -> Self:
        program = Path(sys.executable).with_name("mitmdump")
        mitmdump = str(program) if program.exists() else shutil.which("mitmdump")
        if mitmdump is None:
            raise MissingPackageError("mitmdump is not installed: pip install 'rolltap[record]'")
        self.run.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="rolltap-")
        ready, told = os.pipe()  # ends when the recorder does, be it ready or not
        command = [mitmdump, "-s", str(addon_path()), "--listen-host", "127.0.0.1", "--listen-port", "0"]
        for name, value in {**self._options, "rolltap_ready": f"/dev/fd/{told}"}.items():
            command += ["--set", f"{name}={value}"]
        # the secret travels by environment: a command line can be read by every process of the machine
        env = {**os.environ, "ROLLTAP_SECRET": self._secret, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[told],
            start_new_session=True,  # Ctrl-C is for us; the recorder ends when its sessions have
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
            self._address = f"{address['host']}:{address['port']}"
            confdir = Path(self._options.get("confdir", "~/.mitmproxy")).expanduser()
            self._ca = confdir / "mitmproxy-ca-cert.pem"
            self._bundle = Path(self._folder.name, "ca-bundle.pem")
            write_bundle(self._ca, self._bundle)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def environment(self, session_id: str) -> dict[str, str]:
        """The variables of a harness that is recorded as `session_id`."""
        url = proxy_url(self._address, session_id, self._secret)
        return proxy_environment(url, self._ca, self._bundle)

    def end(self, session_id: str) -> None:
        """Tell the recorder that a session is over: what still runs of it is recorded, and all is on the disk then.

        Raises `RecorderError` when the recorder cannot do that.
        """
        url = proxy_url(self._address, session_id, self._secret)
        try:
            answer = httpx.post(SESSION_END, proxy=url, trust_env=False, timeout=_END_SECONDS)
        except httpx.HTTPError as error:
            self.check()
            raise RecorderError(f"the recorder does not end session {session_id}: {error!r}") from error
        if answer.status_code != 200:
            raise RecorderError(f"the recorder cannot end session {session_id}: {answer.text}")

    def check(self) -> None:
        """Raise `RecorderError` when the recorder has died."""
        if self._process.poll() is not None:
            raise RecorderError(f"the recorder died with status {self._process.returncode}:\n{self._tail()}")

    def _copy_log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, (self.run / "recorder.log").open("ab", buffering=0) as log:
            for line in output:
                # mitmdump ends when it cannot print, and a full disk must not end it
                with suppress(OSError):
                    log.write(line)

    def _tail(self) -> str:
        return "\n".join((self.run / "recorder.log").read_text(errors="replace").splitlines()[-8:])

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._copier.join()
        self._folder.cleanup()
