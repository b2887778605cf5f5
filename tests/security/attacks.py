"""A machine with secrets, and boxes in which the attacks on them run.

`tests/security/attack_scripts.py` has the attacks. As a program it runs them in boxes of one
runtime, as a user of this machine: see `run_as`.
"""

import asyncio
import importlib
import json
import os
import pwd
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from rolltap.trainer.boxes.runtime import BoxSpec
from rolltap.trainer.folders import remove_folder
from tests.security.attack_scripts import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]


class World:
    """Secrets of this machine that no box may see: each holds a canary, a text that nobody can
    guess. `visits` are servers of this machine that were reached, by any attack."""

    def __init__(self, folder, stack):
        self.canary = f"canary-{secrets.token_hex(16)}"
        self.visits = []
        self._stack = stack
        files = []
        for name in ("other/workspace", "other/home", "run/logs", "run", "judge/tests", "secret"):
            file = folder / name / "canary.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.canary)
            file.chmod(0o644)
            files.append(str(file))
        opened = os.open(files[-1], os.O_RDONLY)
        stack.callback(os.close, opened)
        self.victim = subprocess.Popen(
            ["sh", "-c", "read line", self.canary],
            env={"SECRET": self.canary, "PATH": os.environ["PATH"]},
            cwd=folder / "secret",
            stdin=subprocess.PIPE,
            pass_fds=[opened],
        )
        stack.callback(self.victim.communicate)
        stack.callback(self.victim.kill)
        abstract = self.canary[:20]
        path = str(folder / "socket")
        loopback = self._serve(socket.AF_INET, ("127.0.0.1", 0))
        host = self._serve(socket.AF_INET, (own_address(), 0))
        self._serve(socket.AF_INET, host, socket.SOCK_DGRAM)
        self._serve(socket.AF_UNIX, f"\0{abstract}")
        self._serve(socket.AF_UNIX, path)
        os.chmod(path, 0o777)
        self.env = {
            "FILES": " ".join(files),
            "PID": str(self.victim.pid),
            "LOOPBACK_PORT": str(loopback[1]),
            "HOST_ADDRESS": host[0],
            "HOST_PORT": str(host[1]),
            "ABSTRACT": abstract,
            "SOCKET": path,
            "SYSTEM": "/ /usr /usr/bin /etc",
            "MARKER": f"3600.{secrets.randbelow(10**9)}",
        }

    def escaped(self, output):
        """Return what an attack got."""
        found = [line for line in output.splitlines() if line.startswith("ESCAPED")]
        if self.canary in output:
            found.append("the canary")
        for process in psutil.process_iter(["cmdline"]):
            if self.env["MARKER"] in (process.info["cmdline"] or ()):
                found.append("a process that lives")
        if self.victim.poll() is not None:
            found.append("the death of another process")
        return found

    def _serve(self, family, address, kind=socket.SOCK_STREAM):
        """Serve the canary at an address. Return the address."""
        server = self._stack.enter_context(socket.socket(family, kind))
        server.bind(address)
        if kind == socket.SOCK_STREAM:
            server.listen()
            answer = self._answer
            self._stack.callback(server.shutdown, socket.SHUT_RDWR)
        else:
            answer = self._receive
            self._stack.callback(server.sendto, b"", server.getsockname())
        threading.Thread(target=answer, args=[server], daemon=True).start()
        return server.getsockname()

    def _receive(self, server):
        while server.recv(100):
            self.visits.append(f"a datagram at {server.getsockname()}")

    def _answer(self, server):
        while True:
            try:
                client, _ = server.accept()
            except OSError:  # it was shut down
                return
            self.visits.append(f"a connection to {server.getsockname()}")
            with client:
                client.sendall(self.canary.encode())


@contextmanager
def world(folder):
    """Make secrets in a folder, servers and a process."""
    with ExitStack() as stack:
        yield World(folder, stack)


def own_address():
    """Return an address of this machine that is not loopback's, where it has one."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.2"


async def play(runtime, script, folder, env, limits):
    """Run a script in a box of its own. Return how it ended and what it said."""
    for name in ("workspace", "home"):
        (folder / name).mkdir(parents=True)
    log = folder / "log"
    spec = BoxSpec(
        name=f"attack-{secrets.token_hex(4)}",
        workspace=folder / "workspace",
        workdir="/workspace",
        home=folder / "home",
        limits=limits,
    )
    try:
        async with runtime.box(spec) as box:
            env = {"PATH": os.environ["PATH"], "HOME": box.home, **env}
            ended = await box.run(["sh", "-c", script], env=env, timeout=600, log=log)
        output = log.read_bytes()[:1_000_000].decode(errors="replace")
        return {"status": ended.status, "stopped": ended.stopped, "output": output}
    finally:
        remove_folder(folder)


async def play_all(runtime, folder, env, names):
    """Run scripts by their names, several at a time. Return how each ended."""
    slots = asyncio.Semaphore(3)

    async def one(name):
        script, limits = SCRIPTS[name]
        async with slots:
            return await play(runtime, script, folder / secrets.token_hex(4), env, limits)

    return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))


def run_as(user, folder, make, env, names):
    """Run scripts in a process of its own as a user of this machine, and return how each ended.

    `make` is the `module:function` that makes the runtime.
    """
    folder.mkdir()
    os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    request = {"user": user, "folder": str(folder), "make": make, "env": env, "names": names}
    command = [sys.executable, "-m", "tests.security.attacks"]
    done = subprocess.run(
        command, input=json.dumps(request), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def become(user, folder):
    # a Python below the home of root is closed to others: what asyncio imports late is imported
    # here
    importlib.import_module("concurrent.futures.thread")
    sys.executable = "/usr/bin/python3"
    os.environ["PATH"] = "/usr/local/bin:/usr/bin:/bin"
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    os.environ["HOME"] = folder
    tempfile.tempdir = folder


def main():
    request = json.load(sys.stdin)
    module, _, function = request["make"].partition(":")
    runtime = getattr(importlib.import_module(module), function)()
    folder = request["folder"]
    user = pwd.getpwnam(request["user"])
    if user.pw_uid != os.getuid():
        become(user, folder)
    playing = play_all(runtime, Path(folder), request["env"], request["names"])
    print(json.dumps(asyncio.run(playing)))


if __name__ == "__main__":
    main()
