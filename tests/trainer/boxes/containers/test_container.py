"""Containers of Podman, their images, and their limits."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers import container
from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.containers.find import find_engine
from rolltap.trainer.boxes.runtime import Ended, Mount
from rolltap.trainer.tasks.task import Limits
from tests.boxes import ENV, containers, copy_programs, imported, in_box, make_spec

pytestmark = pytest.mark.usefixtures("podman")


async def test_a_box_that_cannot_be_made_says_why_and_leaves_nothing(tmp_path):
    runtime = ContainerRuntime()
    mounts = [Mount(tmp_path / "absent", "/absent")]
    with pytest.raises(OSError, match="absent"):
        async with runtime.box(make_spec(tmp_path, mounts=mounts)):
            pass
    assert containers(runtime) == []


@pytest.mark.parametrize(
    ("engine", "image", "message"),
    [
        ("podman", {"image": "/no/such/folder"}, "/no/such/folder is no folder"),
        ("podman", {"image": "/"}, "the root folder / contains the workspace"),
        ("docker", {}, "Docker has no containers of a root folder"),
    ],
)
async def test_an_image_that_cannot_be_used_is_refused_with_the_fix(
    tmp_path, engine, image, message
):
    with pytest.raises(InputError, match=message):
        async with ContainerRuntime(engine).box(make_spec(tmp_path, **image)):
            pass


def test_an_oci_runtime_that_fails_is_named_with_the_fix_and_as_the_default_one_it_is_replaced(
    tmp_path, monkeypatch
):
    (tmp_path / "broken").write_text("#!/bin/sh\necho is broken >&2; exit 1\n")
    (tmp_path / "broken").chmod(0o755)
    with pytest.raises(
        InputError,
        match=r"(?s)podman cannot start containers here: .*broken.*container_arguments = ",
    ):
        ContainerRuntime("podman", ["--runtime", str(tmp_path / "broken")]).check()
    with pytest.raises(InputError, match=r"podman does not work here: .*no-such-runtime"):
        ContainerRuntime("podman", ["--runtime", "no-such-runtime"]).check()
    settings = f'[engine]\nruntime = "broken"\n[engine.runtimes]\nbroken = ["{tmp_path}/broken"]\n'
    (tmp_path / "containers.conf").write_text(settings)
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    find_engine.cache_clear()
    try:
        assert find_engine("podman", ()).command == ("podman", "--runtime", "runc")
    finally:
        find_engine.cache_clear()


@pytest.fixture
def image(tmp_path_factory):
    """An image with a shell, three programs and an environment of its own."""
    folder = tmp_path_factory.mktemp("image")
    copy_programs(folder, "sh", "sleep", "cat", "env")
    (folder / "testbed").mkdir()
    (folder / "testbed" / "start").write_text("of the image")
    (folder / "testbed" / "link").symlink_to("start")
    with imported(folder, ["podman"], "ENV PATH=/programs", "ENV OF_IMAGE=kept") as name:
        yield name


async def test_a_box_of_an_image_keeps_the_images_variables_and_its_path_first(tmp_path, image):
    async with ContainerRuntime().box(
        make_spec(tmp_path, image=image, mounts=[], workdir="/testbed")
    ) as box:
        ended = await box.run(["env"], env=ENV, timeout=60, log=tmp_path / "log")
    variables = dict(line.split("=", 1) for line in (tmp_path / "log").read_text().splitlines())
    assert ended == Ended(0)
    assert (variables["PATH"], variables["OF_IMAGE"]) == ("/programs:/usr/bin:/bin", "kept")


def test_the_folder_of_an_image_is_copied_out_and_its_digest_is_that_of_its_configuration(
    tmp_path, image
):
    runtime = ContainerRuntime()
    runtime.copy_out(image, "/testbed", tmp_path / "start")
    assert (tmp_path / "start" / "start").read_text() == "of the image"
    assert (tmp_path / "start" / "link").readlink() == Path("start")
    with pytest.raises(InputError, match="/absent of the image"):
        runtime.copy_out(image, "/absent", tmp_path / "absent")
    inspected = json.loads(
        subprocess.run(["podman", "image", "inspect", image], capture_output=True).stdout
    )
    assert runtime.image_digest(image) == f"sha256:{inspected[0]['Id']}"
    with pytest.raises(
        InputError, match="the image localhost/no-such-image is not here and cannot be pulled"
    ):
        runtime.image_digest("localhost/no-such-image")


@pytest.fixture
def watched(monkeypatch):
    """Hold limits by looking at what a box uses. tests/security fills boxes that control groups
    hold."""
    without = replace(find_engine("podman", ()), controllers=frozenset())
    monkeypatch.setattr(container, "find_engine", lambda program, arguments: without)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(
    ("code", "limits", "stopped"),
    [
        ("x = bytearray(600 << 20)", Limits(memory_gib=0.2), "memory"),
        (
            "for _ in range(80):\n    if not os.fork(): time.sleep(600)",
            Limits(processes=60),
            "processes",
        ),
    ],
)
async def test_memory_and_processes_are_limited(tmp_path, code, limits, stopped):
    script = f"exec python3 -c 'import os, time\n{code}\ntime.sleep(600)'"
    ended, _ = await in_box(tmp_path, script, limits=limits)
    assert ended == Ended(None, stopped)


async def test_a_program_that_forks_faster_than_it_is_watched_does_not_fill_the_machine(tmp_path):
    if not find_engine("podman", ()).controllers:
        pytest.skip("Podman can use no control groups here")
    script = "import os, time\nfor _ in range(1000):\n    if not os.fork(): time.sleep(600)"
    ended, output = await in_box(tmp_path, f"python3 -c '{script}'", limits=Limits(processes=10))
    # whoever looks at the box may be faster than the program that sees its fork fail
    assert "BlockingIOError" in output or ended == Ended(None, "processes")


async def test_the_space_on_disk_is_limited_wherever_it_is_written(tmp_path):
    script = "cd /var/tmp; for i in $(seq 30); do head -c 2000000 /dev/zero > $i; done; sleep 600"
    ended, _ = await in_box(tmp_path, script, limits=Limits(disk_gib=0.02))
    assert ended == Ended(None, "disk")
