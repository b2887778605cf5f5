"""Attacks by programs that run in boxes: sandboxes, and containers whose /usr is this machine's."""

import atexit
import functools
import os
import pwd
import signal
import subprocess
import tempfile
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.containers.find import system_root
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.runtime import Box, BoxSpec, Mount
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.folders import remove_folder, scratch_folder
from tests.boxes import fault_of
from tests.deep import DEEP, cases
from tests.machines import SshMachine
from tests.security.attack_scripts import ATTACKS, FILLS, HARMFUL, ONE_OF_EACH, SCRIPTS, WORKS
from tests.security.attacks import play, run_as, world

ME = pwd.getpwuid(os.getuid()).pw_name


def sandbox():
    return SandboxRuntime()


class OfRootFolder(ContainerRuntime):
    """Containers of a root folder."""

    def box(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        root = Path(tempfile.mkdtemp(prefix="root-", dir=spec.workspace.parent))
        mounts = fill(root)
        return super().box(replace(spec, image=str(root), mounts=mounts))


class OfImage(ContainerRuntime):
    """Containers of Docker, of an image that is as empty as the root folder."""

    def box(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        with scratch_folder() as root:
            mounts = fill(root)
            root.chmod(0o755)
            packed = subprocess.run(
                ["tar", "-C", root, "-c", "."], check=True, capture_output=True
            ).stdout
        command = ["docker", "import", "-", "localhost/rolltap-test"]
        subprocess.run(command, input=packed, check=True, stdout=subprocess.DEVNULL)
        return super().box(replace(spec, image="localhost/rolltap-test", mounts=mounts))


def fill(root: Path) -> list[Mount]:
    """Make the few files of a system whose programs are this machine's. Return the mounts that it
    needs."""
    for folder in ("etc", "tmp"):
        (root / folder).mkdir()
    (root / "etc" / "passwd").write_text("agent:x:0:0::/home/agent:/bin/sh\n")
    (root / "tmp").chmod(0o1777)
    return system_root(root)


def container():
    return OfRootFolder()


def docker_container():
    return OfImage("docker")


def behind_ssh():
    """Return sandboxes behind ssh. The machine is this one: its files and processes are as near as
    can be."""
    folder = Path(tempfile.mkdtemp(prefix="machine-"))
    atexit.register(remove_folder, folder)
    return SshMachine(folder).runtime()


BOXES = {
    f"sandbox of {ME}": (sandbox, ME, list(SCRIPTS)),
    "container": (container, ME, list(SCRIPTS) if DEEP else ONE_OF_EACH),
    "container of Docker": (
        docker_container,
        ME,
        list(SCRIPTS) if DEEP else ["disturb the first process of its box"],
    ),
    "sandbox of nobody": (sandbox, "nobody", list(SCRIPTS)),
    "sandbox behind ssh": (behind_ssh, ME, list(SCRIPTS)),
}
"""Function that makes the runtime, user, and the scripts that it runs."""


CHOSEN = cases(BOXES, 0, 1, 2)


def in_each_box(names):
    """Parametrize a test with the boxes, and those of `names` that are run in each."""
    found = [(box, name) for box in CHOSEN for name in names if name in BOXES[box][2]]
    return pytest.mark.parametrize(("box", "name"), found)


@pytest.fixture(scope="module")
def played(request):
    """Return a function that plays all scripts in a box, once, and returns the machine and how each
    script ended.

    The box is no parameter of the fixture: pytest makes such a fixture anew for each pair of
    parameters of a test.
    """
    with ExitStack() as stack:

        @functools.cache
        def play_in(box):
            make, user, names = BOXES[box]
            if make is docker_container:
                request.getfixturevalue("docker")
            if reason := fault_of(make):
                pytest.skip(reason)
            if user != ME and os.getuid() != 0:
                pytest.skip("only root can become another user")
            # not below pytest's folder, which it closes to others again and again
            folder = stack.enter_context(scratch_folder())
            folder.chmod(0o755)
            machine = stack.enter_context(world(folder))
            # the rest of a container's system is its own copy
            env = (
                machine.env
                if make in (sandbox, behind_ssh)
                else {**machine.env, "SYSTEM": "/usr /usr/bin"}
            )
            return machine, run_as(
                user, folder / "boxes", f"{__name__}:{make.__name__}", env, names
            )

        yield play_in


@in_each_box(ATTACKS)
def test_an_attack_is_held(played, box, name):
    machine, results = played(box)
    assert machine.escaped(results[name]["output"]) == []


@pytest.mark.parametrize("box", CHOSEN)
def test_no_server_of_the_machine_is_reached(played, box):
    machine, _ = played(box)
    assert machine.visits == []


@pytest.mark.parametrize("name", cases(sorted(HARMFUL), 4, 11))
async def test_the_attack_works_where_nothing_isolates(tmp_path, name):
    script, limits = SCRIPTS[name]
    with world(tmp_path) as machine:
        result = await play(ProcessRuntime(), script, tmp_path / "box", machine.env, limits)
        assert machine.escaped(result["output"]) + machine.visits != []


@in_each_box(WORKS)
def test_what_agents_do_works(played, box, name):
    _, results = played(box)
    assert results[name]["status"] == 0, results[name]["output"]


@in_each_box(FILLS)
def test_a_box_that_exceeds_its_limit_is_stopped(played, box, name):
    _, results = played(box)
    result = results[name]
    too_large = name == "fill the log" and result["status"] == -signal.SIGXFSZ
    assert too_large or result["stopped"] == FILLS[name], result["output"][-500:]
