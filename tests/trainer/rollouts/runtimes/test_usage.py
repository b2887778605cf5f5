from dataclasses import replace

import pytest

from rolltap.trainer.rollouts.runtimes import container
from rolltap.trainer.rollouts.runtimes.container import find_engine
from rolltap.trainer.rollouts.runtimes.runtime import Ended
from rolltap.trainer.tasks.task import Limits
from tests.containers import in_box, podman  # noqa: F401

pytestmark = pytest.mark.usefixtures("podman")


@pytest.fixture(params=["control groups", "watched"])
def held_by(request, monkeypatch):
    """Hold limits by control groups, where the engine can use them, and by looking at what a box uses."""
    engine = find_engine("podman", ())
    if request.param == "control groups" and not engine.controllers:
        pytest.skip("Podman can use no control groups here")
    if request.param == "watched":
        without = replace(engine, controllers=frozenset())
        monkeypatch.setattr(container, "find_engine", lambda program, arguments: without)
    return request.param


@pytest.mark.usefixtures("held_by")
async def test_memory_is_limited(tmp_path):
    script = "exec python3 -c 'import time; x = bytearray(600 << 20); time.sleep(600)'"
    ended, _ = await in_box(tmp_path, script, limits=Limits(memory_gib=0.2))
    assert ended == Ended(None, "memory")


@pytest.mark.usefixtures("held_by")
async def test_processes_are_limited(tmp_path):
    script = "import os, time\nfor _ in range(80):\n    if not os.fork(): time.sleep(600)\ntime.sleep(600)"
    ended, _ = await in_box(tmp_path, f"python3 -c '{script}'", limits=Limits(processes=60))
    assert ended == Ended(None, "processes")


async def test_a_program_that_forks_faster_than_it_is_watched_does_not_fill_the_machine(tmp_path):
    if not find_engine("podman", ()).controllers:
        pytest.skip("Podman can use no control groups here")
    script = "import os, time\nfor _ in range(1000):\n    if not os.fork(): time.sleep(600)"
    _, output = await in_box(tmp_path, f"python3 -c '{script}'", limits=Limits(processes=10))
    assert "BlockingIOError" in output


@pytest.mark.parametrize("where", [".", "~", "/var/tmp"])
async def test_the_space_on_disk_is_limited_wherever_it_is_written(tmp_path, where):
    script = f"cd {where}; for i in $(seq 30); do head -c 2000000 /dev/zero > $i; done; sleep 600"
    ended, _ = await in_box(tmp_path, script, limits=Limits(disk_gib=0.02))
    assert ended == Ended(None, "disk")


async def test_a_file_cannot_be_larger_than_the_disk_limit(tmp_path):
    await in_box(tmp_path, "head -c 40000000 /dev/zero > large", limits=Limits(disk_gib=0.02))
    assert (tmp_path / "workspace" / "large").stat().st_size <= 0.02 * 2**30
