"""Attacks on the runtime `container`, by programs that run in it: Podman, with a root folder of this machine's /usr."""

import os
import pwd
import signal
import tempfile
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.trainer.rollouts.runtimes.container import ContainerRuntime, system_root
from rolltap.trainer.rollouts.runtimes.runtime import Box, BoxSpec
from tests.containers import why_not
from tests.security.attacks import ATTACKS, FILLINGS, WORKS, run_as, world

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class OfRootFolder(ContainerRuntime):
    """Containers of a root folder."""

    def box(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        root = Path(tempfile.mkdtemp(prefix="root-", dir=spec.workspace.parent))
        mounts = system_root(root)
        for folder in ("etc", "tmp"):
            (root / folder).mkdir()
        (root / "etc" / "passwd").write_text("agent:x:0:0::/home/agent:/bin/sh\n")
        return super().box(replace(spec, image=str(root), mounts=mounts))


def make():
    return OfRootFolder()


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """How each script ended."""
    folder = tmp_path_factory.mktemp("attacks")
    with world(folder) as machine:
        # the rest of its system is a container's own copy
        env = {**machine.env, "SYSTEM": "/usr /usr/bin"}
        me = pwd.getpwuid(os.getuid()).pw_name
        yield machine, run_as(me, folder / "boxes", "tests.security.test_container:make", env)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_held(played, name):
    machine, results = played
    assert machine.escaped(results[name]["output"]) == []


def test_no_server_of_the_machine_is_reached(played):
    machine, _ = played
    assert machine.visits == []


@pytest.mark.parametrize("name", WORKS)
def test_what_agents_do_works(played, name):
    _, results = played
    assert results[name]["status"] == 0, results[name]["output"]


@pytest.mark.parametrize("name", FILLINGS)
def test_a_box_that_exceeds_its_limit_is_stopped(played, name):
    _, results = played
    result = results[f"fill {name}"]
    too_large = name == "the log" and result["status"] == -signal.SIGXFSZ
    assert too_large or result["stopped"] == FILLINGS[name].stopped, result["output"][-500:]
