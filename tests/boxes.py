"""Real boxes for tests: sandboxes of bubblewrap, containers of Podman and of a Docker daemon, and
images for them."""

import functools
import os
import secrets
import select
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.containers.find import system_root
from rolltap.trainer.boxes.containers.podman import LABEL
from rolltap.trainer.boxes.runtime import BoxSpec
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.folders import scratch_folder


@functools.cache
def fault_of(runtime) -> str:
    """Return why a runtime does not work here; nothing when it does."""
    try:
        runtime().check()
    except InputError as error:
        return str(error)
    return ""


NO_SANDBOX = fault_of(SandboxRuntime)
sandboxed = pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX)


def require_podman() -> None:
    if reason := fault_of(ContainerRuntime):
        pytest.skip(reason)


@contextmanager
def docker_daemon() -> Iterator[str]:
    """Run a Docker daemon of the tests' own, and yield the address of its socket. Skips the test
    where it cannot run.

    It makes no bridge and no rules of a firewall: containers have the network `none`, and nothing
    of this machine changes.
    """
    if not shutil.which("dockerd") or not shutil.which("docker"):
        pytest.skip("Docker is not installed: apt-get install docker.io")
    if os.geteuid():
        pytest.skip("only root can run a Docker daemon")
    with scratch_folder() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(str(folder / "ready"))
        host = f"unix://{folder}/docker.sock"
        options = "--storage-driver vfs --bridge none --iptables=false --ip6tables=false"
        command = ["dockerd", *options.split(), "--host", host]
        for name in ("data-root", "exec-root", "pidfile"):
            command += [f"--{name}", str(folder / name)]
        environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "ready")}
        with (folder / "log").open("wb") as log:
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        ended = os.pidfd_open(daemon.pid)
        try:
            reported, _, _ = select.select([ready, ended], [], [], 600)
            if ready not in reported:
                said = (folder / "log").read_text().strip()
                pytest.skip(f"dockerd does not start: {said[-500:]}")
            yield host
        finally:
            os.close(ended)
            daemon.terminate()
            daemon.wait()


@contextmanager
def imported(root: Path, engine: Sequence[str], *changes: str) -> Iterator[str]:
    """Make an image of a root folder, with changes like `ENV A=1`, and yield its name. It is
    removed at the end."""
    archive = root.with_suffix(".tar")
    name = f"localhost/rolltap-test-{secrets.token_hex(6)}"
    subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
    options = [f"--change={change}" for change in changes]
    command = [*engine, "import", *options, archive, name]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield name
    finally:
        subprocess.run([*engine, "image", "rm", "--force", name], check=True, capture_output=True)


def copy_programs(root: Path, *names: str) -> None:
    """Copy programs of this machine into the folder `programs` of a root folder, with their
    libraries.

    The shell is in `bin` too.
    """
    for name in names:
        program = Path("/usr/bin", name).resolve()
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        targets = {f"programs/{name}": program}
        if name == "sh":
            targets["bin/sh"] = program
        for word in listed.split():
            if word.startswith("/"):
                targets[word.lstrip("/")] = Path(word)
        for target, source in targets.items():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / target)


def wait_until_dead(pid: int) -> bool:
    """Return True when a process has ended or ends soon. A killed process takes a moment to end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([descriptor], [], [], 600)
    os.close(descriptor)
    return bool(ended)


def accept_with(answer: Callable[[socket.socket], None]):
    """Return a stand-in of a recorder for `BoxSpec.accept`. `answer` gets each connection in a
    thread of its own."""

    def answer_and_close(client: socket.socket) -> None:
        with client:
            answer(client)

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # it was shut down
                return
            threading.Thread(target=answer_and_close, args=[client], daemon=True).start()

    @contextmanager
    def accept(listener: socket.socket) -> Iterator[None]:
        with listener.dup() as own:
            own.setblocking(True)
            thread = threading.Thread(target=serve, args=[own])
            thread.start()
            try:
                yield
            finally:
                own.shutdown(socket.SHUT_RDWR)
                thread.join()

    return accept


def spec_in(folder: Path, **fields) -> BoxSpec:
    """Return a box without an image, with a workspace and a home below `folder`."""
    for name in ("workspace", "home"):
        (folder / name).mkdir(exist_ok=True)
    values = {"name": "box", "workdir": "/testbed", **fields}
    return BoxSpec(workspace=folder / "workspace", home=folder / "home", **values)


def make_spec(folder: Path, **settings) -> BoxSpec:
    """Return a box with a workspace, a home, and a root folder of links to this machine's /usr, all
    below `folder`."""
    for name in ("workspace", "home", "root"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    mounts = [*system_root(folder / "root"), *settings.pop("mounts", [])]
    for path in ("etc", "tmp", "var/tmp"):
        (folder / "root" / path).mkdir(parents=True)
    name = f"test-{os.getpid()}-{folder.name}"
    values = {"workdir": "/workspace", "image": str(folder / "root"), "name": name, **settings}
    return BoxSpec(workspace=folder / "workspace", home=folder / "home", mounts=mounts, **values)


def make_docker_spec(folder: Path, **settings) -> BoxSpec:
    """Return such a box with an image of Docker, which is as empty as the root folder."""
    spec = make_spec(folder, **settings)
    image = f"localhost/rolltap-test-{spec.name}"
    pack = ["tar", "-C", folder / "root", "-c", "."]
    packed = subprocess.run(pack, check=True, capture_output=True).stdout
    load = ["docker", "import", "-", image]
    subprocess.run(load, input=packed, check=True, capture_output=True)
    return replace(spec, image=image)


ENV = {"PATH": "/usr/bin:/bin", "HOME": "/home/agent"}


async def sh(box, script, log, *, timeout=120.0, **env):
    """Run a script of bash in a box. Return its end and its output."""
    ended = await box.run(["bash", "-c", script], env={**ENV, **env}, timeout=timeout, log=log)
    return ended, log.read_text()


async def in_box(tmp_path, script, *, env=None, **settings):
    async with ContainerRuntime().box(make_spec(tmp_path, **settings)) as box:
        return await sh(box, script, tmp_path / "log", **(env or {}))


def containers(runtime=None):
    """Return the names of the containers with rolltap's label."""
    label = LABEL if runtime is None else f"{LABEL}={runtime.id}"
    command = ["podman", "ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
