"""Attacks on the runtime `sandbox`, by programs that run in it."""

import os
import pwd
import signal

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes.process import ProcessRuntime
from rolltap.trainer.rollouts.runtimes.runtime import scratch_folder
from rolltap.trainer.rollouts.runtimes.sandbox import SandboxRuntime
from tests.security.attack_scripts import ATTACKS, FILLINGS, HARMFUL, WORKS
from tests.security.attacks import play, run_as, world


def make():
    return SandboxRuntime()


def why_not() -> str | None:
    try:
        make().check()
    except InputError as error:
        return str(error)
    return None


WHY_NOT = why_not()
sandboxed = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture(scope="module", params=[ME, "nobody"])
def played(request):
    """How each script ended as this user, and as an ordinary one."""
    if request.param != ME and os.getuid() != 0:
        pytest.skip("only root can become nobody")
    # not below pytest's folder, which it closes to others again and again
    with scratch_folder() as folder:
        folder.chmod(0o755)
        with world(folder) as machine:
            yield machine, run_as(request.param, folder / "boxes", "tests.security.test_sandbox:make", machine.env)


@sandboxed
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_held(played, name):
    machine, results = played
    assert machine.escaped(results[name]["output"]) == []


@sandboxed
def test_no_server_of_the_machine_is_reached(played):
    machine, _ = played
    assert machine.visits == []


@pytest.mark.parametrize("name", sorted(HARMFUL))
async def test_the_attack_works_where_nothing_isolates(tmp_path, name):
    with world(tmp_path) as machine:
        result = await play(ProcessRuntime(), ATTACKS[name], tmp_path / "box", machine.env)
        assert machine.escaped(result["output"]) + machine.visits != []


@sandboxed
@pytest.mark.parametrize("name", WORKS)
def test_what_agents_do_works(played, name):
    _, results = played
    assert results[name]["status"] == 0, results[name]["output"]


@sandboxed
@pytest.mark.parametrize("name", FILLINGS)
def test_a_box_that_exceeds_its_limit_is_stopped(played, name):
    _, results = played
    result = results[f"fill {name}"]
    too_large = name == "the log" and result["status"] == -signal.SIGXFSZ
    assert too_large or result["stopped"] == FILLINGS[name].stopped, result["output"][-500:]
