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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rolltap.trainer.boxes.runtime import BoxSpec, Runtime
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.tasks.task import Limits
from tests.security.attack_scripts import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class World:
    """Secrets of this machine that no box may see: each holds a canary, a text that nobody can
    guess."""

    canary: str
    env: dict[str, str]
    victim: "subprocess.Popen[bytes]"
    visits: list[str] = field(default_factory=list)
    """Servers of this machine that were reached, by any attack."""

    def escaped(self, output: str) -> list[str]:
        """Return what an attack got."""
        found = [line for line in output.splitlines() if line.startswith("ESCAPED")]
        found += ["the canary"] if self.canary in output else []
        found += ["a process that lives"] if self._survivors() else []
        found += ["the death of another process"] if self.victim.poll() is not None else []
        return found

    def _survivors(self) -> list[psutil.Process]:
        return [
            each
            for each in psutil.process_iter(["cmdline"])
            if self.env["MARKER"] in (each.info["cmdline"] or ())
        ]


@contextmanager
def world(folder: Path) -> Iterator[World]:
    """Make secrets in a folder, servers and a process."""
    canary = f"canary-{secrets.token_hex(16)}"
    files = []
    for name in ("other/workspace", "other/home", "run/logs", "run", "judge/tests", "secret"):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        files.append(place / "canary.txt")
        files[-1].write_text(canary)
        files[-1].chmod(0o644)
    with files[-1].open() as opened:
        victim = subprocess.Popen(
            ["sh", "-c", "read line", canary],
            env={"SECRET": canary, "PATH": os.environ["PATH"]},
            cwd=folder / "secret",
            stdin=subprocess.PIPE,
            pass_fds=[opened.fileno()],
        )
    with ExitStack() as stack:
        made = World(canary, {}, victim)
        stack.callback(victim.communicate)
        stack.callback(victim.kill)
        loopback, host = (
            _server(stack, made, socket.AF_INET, (name, 0)) for name in ("127.0.0.1", _address())
        )
        _server(stack, made, socket.AF_INET, host, socket.SOCK_DGRAM)
        for address in (f"\0{canary[:20]}", str(folder / "socket")):
            _server(stack, made, socket.AF_UNIX, address)
        os.chmod(folder / "socket", 0o777)
        made.env |= {
            "FILES": " ".join(map(str, files)),
            "PID": str(victim.pid),
            "LOOPBACK_PORT": str(loopback[1]),
            "HOST_ADDRESS": host[0],
            "HOST_PORT": str(host[1]),
            "ABSTRACT": canary[:20],
            "SOCKET": str(folder / "socket"),
            "SYSTEM": "/ /usr /usr/bin /etc",
            "MARKER": f"3600.{secrets.randbelow(10**9)}",
        }
        yield made


def _server(
    stack: ExitStack, made: World, family: int, address: Any, kind: int = socket.SOCK_STREAM
) -> Any:
    """Serve the canary at an address until the stack is closed. Return the address."""
    server = stack.enter_context(socket.socket(family, kind))
    server.bind(address)
    if kind == socket.SOCK_STREAM:
        server.listen()
        stack.callback(server.shutdown, socket.SHUT_RDWR)
    else:
        stack.callback(lambda: server.sendto(b"", server.getsockname()))
    threading.Thread(target=_serve, args=(server, made), daemon=True).start()
    return server.getsockname()


def _serve(server: socket.socket, made: World) -> None:
    """Answer with the canary until the server is shut down."""
    while True:
        try:
            if server.type == socket.SOCK_DGRAM:
                if not server.recv(100):
                    return
                made.visits.append(f"a datagram at {server.getsockname()}")
                continue
            client, _ = server.accept()
        except OSError:
            return
        made.visits.append(f"a connection to {server.getsockname()}")
        with client:
            client.sendall(made.canary.encode())


def _address() -> str:
    """Return an address of this machine that is not loopback's, where it has one."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.2"


async def play(
    runtime: Runtime, script: str, folder: Path, env: dict[str, str], limits: Limits
) -> dict[str, object]:
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
            ended = await box.run(["sh", "-c", script], env=env, timeout=60, log=log)
        output = log.read_bytes()[:1_000_000].decode(errors="replace")
        return {"status": ended.status, "stopped": ended.stopped, "output": output}
    finally:
        remove_folder(folder)


async def play_all(
    runtime: Runtime, folder: Path, env: dict[str, str], names: list[str]
) -> dict[str, dict[str, object]]:
    """Run scripts by their names, several at a time. Return how each ended."""
    slots = asyncio.Semaphore(3)

    async def one(name: str) -> dict[str, object]:
        script, limits = SCRIPTS[name]
        async with slots:
            return await play(runtime, script, folder / secrets.token_hex(4), env, limits)

    return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))


def run_as(
    user: str, folder: Path, make: str, env: dict[str, str], names: list[str]
) -> dict[str, dict[str, object]]:
    """Run scripts in a process of its own as a user of this machine, and return how each ended.

    `make` is the `module:function` that makes the runtime.
    """
    uid = pwd.getpwnam(user).pw_uid
    folder.mkdir()
    os.chown(folder, uid, -1)
    request = json.dumps(
        {"user": user, "folder": str(folder), "make": make, "env": env, "names": names}
    )
    command = [sys.executable, "-m", "tests.security.attacks"]
    done = subprocess.run(command, input=request, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main() -> None:
    request = json.load(sys.stdin)
    module, _, function = request["make"].partition(":")
    runtime = getattr(importlib.import_module(module), function)()
    user = pwd.getpwnam(request["user"])
    if user.pw_uid != os.getuid():
        # a Python below the home of root is closed to others: what asyncio imports late is imported
        # here
        importlib.import_module("concurrent.futures.thread")
        sys.executable = "/usr/bin/python3"
        os.environ["PATH"] = "/usr/local/bin:/usr/bin:/bin"
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        os.environ["HOME"] = request["folder"]
        tempfile.tempdir = request["folder"]
    print(
        json.dumps(
            asyncio.run(
                play_all(runtime, Path(request["folder"]), request["env"], request["names"])
            )
        )
    )


if __name__ == "__main__":
    main()
