"""Real boxes for tests: sandboxes of bubblewrap, and containers of Podman with a root folder of this machine."""

import functools
import os
import select
import shutil
import subprocess
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes.container import LABEL, ContainerRuntime, system_root
from rolltap.trainer.rollouts.runtimes.runtime import BoxSpec
from rolltap.trainer.rollouts.runtimes.sandbox import SandboxRuntime


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


def wait_until_dead(pid: int) -> bool:
    """Return True when a process has ended or ends soon. A killed process takes a moment to end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([descriptor], [], [], 60)
    os.close(descriptor)
    return bool(ended)


def spec_in(folder: Path, **fields) -> BoxSpec:
    """Return a box without an image, with a workspace and a home below `folder`."""
    for name in ("workspace", "home"):
        (folder / name).mkdir(exist_ok=True)
    values = {"name": "box", "workdir": "/testbed", **fields}
    return BoxSpec(workspace=folder / "workspace", home=folder / "home", **values)


def make_spec(folder: Path, **settings) -> BoxSpec:
    """Return a box with a workspace, a home, and a root folder of links to this machine's /usr, all below `folder`."""
    for name in ("workspace", "home", "root"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    mounts = [*system_root(folder / "root"), *settings.pop("mounts", [])]
    for path in ("etc", "tmp", "var/tmp"):
        (folder / "root" / path).mkdir(parents=True)
    name = f"test-{os.getpid()}-{folder.name}"
    values = {"workdir": "/workspace", "image": str(folder / "root"), "name": name, **settings}
    return BoxSpec(workspace=folder / "workspace", home=folder / "home", mounts=mounts, **values)


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
