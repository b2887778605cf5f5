"""Apptainer is not installed where the tests run: a script in its place records the command
lines."""

import json
import os
import shlex

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers import apptainer
from rolltap.trainer.boxes.containers.apptainer import ApptainerEngine, ApptainerRuntime
from rolltap.trainer.boxes.runtime import Ended, Mount
from rolltap.trainer.tasks.task import Limits
from tests.boxes import spec_in

RECORDER = """#!/bin/bash
printf '%s\\n' "${*@Q}" >> "$RECORDED"
case "$1 $2" in
"instance list") echo "{\\"instances\\": $INSTANCES}" ;;
exec\\ --cleanenv) echo "rolltap starts ${*: -1}"; echo output; exit 7 ;;
exec*) exit 1 ;;
esac
"""


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Put the recording script in Apptainer's place. Return a function that returns the command
    lines so far."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "apptainer").write_text(RECORDER)
    (programs / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORDED", str(tmp_path / "recorded"))
    instance = {"instance": "s1", "pid": os.getpid(), "img": "", "ip": ""}
    monkeypatch.setenv("INSTANCES", json.dumps([instance]))
    monkeypatch.setattr(apptainer, "_CONTROL_GROUPS", tmp_path / "absent")
    return lambda: [shlex.split(line) for line in (tmp_path / "recorded").read_text().splitlines()]


def make_spec(tmp_path, **fields):
    (tmp_path / "image.sif").write_text("an image")
    values = {"name": "s1", "workdir": "/app, here", "image": str(tmp_path / "image.sif")}
    # the "instance" is this whole machine
    values["limits"] = Limits(memory_gib=1e6, processes=1_000_000, disk_gib=1e6)
    return spec_in(tmp_path, **{**values, **fields})


async def test_a_session_is_an_instance_without_network_and_with_its_own_folders(tmp_path, lines):
    runtime = ApptainerRuntime()
    mounts = [Mount(tmp_path, "/opt/tools")]
    async with runtime.box(make_spec(tmp_path, mounts=mounts)) as box:
        ended = await box.run(["agent", "an instruction"], env={}, timeout=60, log=tmp_path / "log")
    started, listed, executed, stopped = lines()
    name = f"rolltap-{runtime.id}-s1"
    assert ended == Ended(7)
    assert (tmp_path / "log").read_text() == "output\n"
    assert started[:2] == ["instance", "start"]
    assert started[-2:] == [str(tmp_path / "image.sif"), name]
    for option in ["containall", "no-home", "writable-tmpfs", "net", "network", "no-privs"]:
        assert f"--{option}" in started
    assert started[started.index("--network") + 1] == "none"
    assert f'type=bind,source={tmp_path}/workspace,"destination=/app, here"' in started
    assert f"type=bind,source={tmp_path}/home,destination=/home/agent" in started
    assert f"type=bind,source={tmp_path},destination=/opt/tools,ro" in started
    assert listed == ["instance", "list", "--json", name]
    line = f"exec --cleanenv --no-eval --no-privs --pwd / instance://{name} /bin/sh"
    assert executed[:-2] == line.split()
    assert "instruction" not in " ".join(executed)
    assert stopped == ["instance", "stop", "--force", name]


async def test_settling_stops_the_instance_and_the_next_program_starts_it(tmp_path, lines):
    async with ApptainerRuntime().box(make_spec(tmp_path)) as box:
        await box.settle()
        await box.run(["agent"], env={}, timeout=60, log=tmp_path / "log")
    verbs = [" ".join(line[:2]) for line in lines()]
    start, ask, stop = "instance start", "instance list", "instance stop"
    assert verbs == [start, ask, stop, start, ask, "exec --cleanenv", stop]


async def test_an_instance_that_does_not_run_is_an_error(tmp_path, lines, monkeypatch):
    monkeypatch.setenv("INSTANCES", "[]")
    with pytest.raises(OSError, match="s1 has ended by itself"):
        async with ApptainerRuntime().box(make_spec(tmp_path)):
            pass
    assert lines()[-1][:2] == ["instance", "stop"]


def test_limits_are_given_where_control_groups_have_version_2(tmp_path, monkeypatch):
    monkeypatch.setattr(apptainer, "_CONTROL_GROUPS", tmp_path)
    spec = make_spec(tmp_path, limits=Limits(cpus=1.5, memory_gib=2, processes=100))
    [command] = ApptainerEngine().create("name", spec, [], tmp_path)
    assert " --cpus 1.5 --memory 2147483648 --pids-limit 100 " in " ".join(command)


def test_an_image_of_a_docker_registry_is_named_as_apptainer_names_it_and_a_file_has_a_digest(
    tmp_path,
):
    for image in ("/images/a.sif", "docker://python:3.12", "oras://registry/image"):
        assert apptainer.source(image.removeprefix("docker://")) == image
    digest = ApptainerRuntime().image_digest
    image = tmp_path / "image.sif"
    image.write_text("one")
    first = digest(str(image))
    image.write_text("two")
    assert digest(str(image)) != first
    assert digest("python:3.12") == ""


def test_a_folder_that_cannot_be_copied_out_of_an_image_is_named(tmp_path, lines):
    with pytest.raises(
        InputError, match=r"the folder /testbed of the image a\.sif cannot be copied"
    ):
        ApptainerRuntime().copy_out("a.sif", "/testbed", tmp_path / "start")
    mount = f"type=bind,source={tmp_path}/start,destination=/rolltap-copy"
    command = ["exec", "--containall", "--no-home", "--mount", mount, "docker://a.sif", "cp", "-a"]
    assert lines() == [[*command, "/testbed/.", "/rolltap-copy"]]


def test_without_apptainer_the_fix_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="apptainer is not installed: see https"):
        ApptainerRuntime().check()


def test_a_variable_that_gives_rights_to_programs_is_refused(monkeypatch, lines):
    ApptainerRuntime().check()
    monkeypatch.setenv("APPTAINER_ADD_CAPS", "CAP_SYS_ADMIN")
    with pytest.raises(InputError, match=r"APPTAINER_ADD_CAPS would give .*: unset it"):
        ApptainerRuntime().check()


async def test_an_absent_image_is_refused(tmp_path, lines):
    with pytest.raises(InputError, match=r"no image /no/such\.sif"):
        async with ApptainerRuntime().box(make_spec(tmp_path, image="/no/such.sif")):
            pass
