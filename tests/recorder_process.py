"""The recorder as users start it: a mitmdump process with the addon."""

import json
import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx

from rolltap.addons.store.tables import read_rows

MITMDUMP = Path(sys.executable).with_name("mitmdump")
ADDON = Path(__file__).resolve().parents[1] / "addons" / "record.py"
CHAT = "https://api.openai.com/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def start_mitmdump(*options, settings, log, env, command=()):
    """Start mitmdump, one of whose scripts announces its address. Return the process and the
    address, or None."""
    ready, told = os.pipe()
    command = [*command, MITMDUMP, *options]
    for name, value in {**settings, "rolltap_ready": f"/dev/fd/{told}"}.items():
        command += ["--set", f"{name}={value}"]
    with log.open("a") as output:
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, env=env, pass_fds=[told]
        )
    os.close(told)
    with open(ready) as pipe:
        line = pipe.readline()
    return process, json.loads(line) if line else None


class Recorder:
    def __init__(self, tmp_path, engine_url, model, *extra, env=None, command=(), scripts=()):
        self.run = tmp_path / "run"
        self.confdir = tmp_path / "conf"
        settings = {"confdir": self.confdir, "rolltap_out": self.run}
        settings |= {"rolltap_engine": engine_url, "rolltap_model": model}
        settings |= dict(setting.split("=", 1) for setting in extra)
        self._log = tmp_path / "mitmdump.log"
        options = ["-s", ADDON, "--listen-port", "0", *scripts]
        env = {**os.environ, **(env or {})}
        how = {"settings": settings, "log": self._log, "env": env, "command": command}
        self.process, address = start_mitmdump(*options, **how)
        self.address = "{host}:{port}".format(**address) if address else None

    def client(self, user="s1", password="x"):
        context = ssl.create_default_context(cafile=self.confdir / "mitmproxy-ca-cert.pem")
        proxy = f"http://{user}:{password}@{self.address}" if user else f"http://{self.address}"
        return httpx.Client(proxy=proxy, verify=context, trust_env=False, timeout=60)

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait()

    def log(self):
        return self._log.read_text()

    def rows(self, table):
        return list(read_rows(self.run, table))
