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


class Recorder:
    """A mitmdump process with the addon."""

    def __init__(self, tmp_path, engine_url, model, *extra, env=None, command=(), scripts=()):
        ready, told = os.pipe()
        self.run = tmp_path / "run"
        self.confdir = tmp_path / "conf"
        settings = {
            "confdir": self.confdir,
            "rolltap_out": self.run,
            "rolltap_engine": engine_url,
            "rolltap_model": model,
            **dict(setting.split("=", 1) for setting in extra),
            "rolltap_ready": f"/dev/fd/{told}",
        }
        command = [*command, MITMDUMP, "-s", ADDON, "--listen-port", "0", *scripts]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        self._log = tmp_path / "mitmdump.log"
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **(env or {})}, pass_fds=[told]
            )
        os.close(told)
        with open(ready) as pipe:
            line = pipe.readline()
        self.address = "{host}:{port}".format(**json.loads(line)) if line else None

    def client(self, user="s1", password="x"):
        context = ssl.create_default_context(cafile=self.confdir / "mitmproxy-ca-cert.pem")
        proxy = f"http://{user}:{password}@{self.address}" if user else f"http://{self.address}"
        return httpx.Client(proxy=proxy, verify=context, trust_env=False, timeout=30)

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait()

    def log(self):
        return self._log.read_text()

    def rows(self, table):
        return list(read_rows(self.run, table))
