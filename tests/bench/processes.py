"""The processes of a bench: mitmdump with its scripts, and engines. They can be killed and started
again."""

import json
import os
import re
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import aiohttp
import click

from tests.recorder_process import ADDON, start_mitmdump

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


class Child:
    """A process that announces its port. A context manager. It keeps the port when it is started
    again."""

    process: subprocess.Popen[str]
    port = 0

    def start(self) -> None:
        """Start the process. Returns when it serves. Raises `ClickException` when it ends
        before."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Kill the process as `kill -9` does."""
        self.process.kill()
        self._wait()

    def _wait(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process.wait()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the process has used, summed over its threads."""
        # the id of another process's CPU clock on Linux: `man clock_getcpuclockid`
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def megabytes(self) -> float:
        return resident_mb(self.process.pid)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self._wait()


class Engine(Child):
    """An engine of a kind in `tests/bench/engines.py`."""

    def __init__(self, kind: str, folder: Path, settings: dict[str, Any]) -> None:
        path = folder / f"{kind}.json"
        path.write_text(json.dumps(settings, default=str))
        self._command = [sys.executable, "-m", "tests.bench.engines", kind, path]

    def start(self) -> None:
        command = [*self._command, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException(f"the engine ended: {self.process.wait()}")
        self.port = int(line)


class Mitmdump(Child):
    """mitmdump with `scripts`, one of which announces its address as the recorder does. Logs to
    `folder/NAME.log`."""

    def __init__(
        self, name: str, folder: Path, scripts: list[Path], settings: dict[str, object]
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._confdir = folder / "conf"
        self._scripts = scripts
        self._settings = {"confdir": self._confdir, **settings}

    @classmethod
    def recorder(cls, folder: Path, run: Path, engine: Child, model: Path) -> Self:
        settings = {"rolltap_out": run, "rolltap_engine": engine.url, "rolltap_model": model}
        return cls("recorder", folder, [ADDON], settings)

    @classmethod
    def bare(cls, folder: Path, engine: Child) -> Self:
        """Return a minimal redirecting proxy."""
        return cls("bare redirect", folder, [FOLDER / "redirect.py"], {"bench_engine": engine.url})

    def script(self, script: str, **settings: object) -> Self:
        """Load a script of this folder before the others. Returns itself."""
        self._scripts.insert(0, FOLDER / script)
        self._settings |= settings
        return self

    def start(self) -> None:
        options = ["--listen-host", "127.0.0.1", "--listen-port", self.port]
        for script in self._scripts:
            options += ["-s", script]
        env = {"PYTHONUNBUFFERED": "1", "PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        self.process, address = start_mitmdump(
            *options, settings=self._settings, log=self.log, env=env
        )
        if address is None:
            raise click.ClickException(f"mitmdump ended:\n{self.log.read_text()}")
        self.port = address["port"]

    def context(self) -> ssl.SSLContext:
        """Return TLS that trusts the proxy."""
        return ssl.create_default_context(cafile=self._confdir / "mitmproxy-ca-cert.pem")

    def options(self, session_id: str, context: ssl.SSLContext) -> dict[str, Any]:
        """Return the options with which aiohttp sends requests of a session."""
        auth = aiohttp.BasicAuth(session_id, "x")
        return {"proxy": self.url, "proxy_auth": auth, "ssl": context}


def resident_mb(pid: int) -> float:
    """Return the memory of a process in MB, without mapped files; 0 when it has ended."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0
