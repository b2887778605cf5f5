"""Real containers for tests: Podman with a root folder made of this machine's programs."""

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes.container import LABEL, ContainerRuntime, find_engine, system_root
from rolltap.trainer.rollouts.runtimes.runtime import BoxSpec


@functools.cache
def why_not() -> str:
    """Return why there are no containers here; nothing when there are."""
    try:
        find_engine("podman", ())
    except InputError as error:
        return str(error)
    return ""


@pytest.fixture
def podman() -> None:
    """Skip a test where Podman cannot start containers."""
    if reason := why_not():
        pytest.skip(reason)


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
    """Run one script in a box of its own."""
    async with ContainerRuntime().box(make_spec(tmp_path, **settings)) as box:
        return await sh(box, script, tmp_path / "log", **(env or {}))


def containers(runtime=None):
    """Return the names of the containers with rolltap's label."""
    label = LABEL if runtime is None else f"{LABEL}={runtime.id}"
    command = ["podman", "ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
