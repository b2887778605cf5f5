"""The processes of a bench: mitmdump with its scripts, and engines. They can be killed and started
again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import click

from tests.recorder_process import ADDON, start_mitmdump

ROOT = Path(__file__).resolve().parents[2]
REDIRECT = Path(__file__).with_name("redirect.py")
LAG = Path(__file__).with_name("lag.py")
_STOP_SECONDS = 30


class Child:
    """A process that announces its port. A context manager. It keeps the port when it is started
    again."""

    process: subprocess.Popen[str]

    def __init__(self) -> None:
        self.port = 0

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

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._wait()


class Engine(Child):
    """An engine of a kind in `tests/bench/engines.py`."""

    def __init__(self, kind: str, folder: Path, settings: dict[str, Any]) -> None:
        super().__init__()
        path = folder / f"{kind}.json"
        path.write_text(json.dumps(settings, default=str))
        self._command = [sys.executable, "-m", "tests.bench.engines", kind, path]

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self._command, str(self.port)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
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
        super().__init__()
        self.name = name
        self.log = folder / f"{name}.log"
        self._confdir = folder / "conf"
        self._scripts, self._settings = scripts, {"confdir": self._confdir, **settings}

    @classmethod
    def recorder(cls, folder: Path, run: Path, engine: Engine, model: Path) -> Self:
        settings = {"rolltap_out": run, "rolltap_engine": engine.url, "rolltap_model": model}
        return cls("recorder", folder, [ADDON], settings)

    @classmethod
    def bare(cls, folder: Path, engine: Engine) -> Self:
        """Return a minimal redirecting proxy."""
        return cls("bare redirect", folder, [REDIRECT], {"bench_engine": engine.url})

    def measuring(self, samples: Path) -> Self:
        """Append samples of the event loop's lateness to a file, from its start on. Returns
        itself."""
        self._scripts.append(LAG)
        self._settings["bench_lag"] = samples
        return self

    @property
    def ca(self) -> Path:
        return self._confdir / "mitmproxy-ca-cert.pem"

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


def resident_mb(pid: int) -> float:
    """Return the memory of a process in MB, without mapped files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(
        int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("RssAnon")
    )
