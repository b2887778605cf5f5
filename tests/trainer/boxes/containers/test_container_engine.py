"""The engines' command lines and images as data. A script answers in Docker's place."""

import json
import os
import resource
import subprocess
from itertools import pairwise

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers import find
from rolltap.trainer.boxes.containers.engine import call
from rolltap.trainer.boxes.containers.find import find_engine
from rolltap.trainer.boxes.containers.images import copy_from_root_folder, path_digest
from rolltap.trainer.boxes.containers.podman import ContainerEngine
from rolltap.trainer.boxes.runtime import BoxSpec, Mount
from rolltap.trainer.tasks.task import Limits


def create(tmp_path, engine, *, mounts=(), **fields):
    """Return the options of the command that makes a box."""
    spec = BoxSpec(
        name="s1", workspace=tmp_path, workdir="/app", home=tmp_path, image="python:3.12", **fields
    )
    made, started = engine.create("rolltap-x-s1", spec, mounts, tmp_path)
    assert started == [*engine.command, "start", "rolltap-x-s1"]
    return made


def option(command, name):
    """Return the values of an option."""
    return [value for key, value in pairwise(command) if key == name]


OPTIONS = {
    "--network": "none",
    "--cap-drop": "all",
    "--label": "rolltap=run1",
    "--pull": "never",
    "--entrypoint": "/bin/sh",
}
WITH_RIGHTS = {"--privileged", "--cap-add", "--device", "--publish", "--pid", "--ipc"}


@pytest.mark.parametrize("program", ["podman", "docker"])
def test_a_container_has_no_network_no_capabilities_and_no_way_to_more(program, tmp_path):
    engine = ContainerEngine(command=(program, "--global"), label="run1")
    command = create(tmp_path, engine)
    assert command[:3] == [program, "--global", "create"]
    for name, value in OPTIONS.items():
        assert option(command, name) == [value]
    assert not WITH_RIGHTS & {*command}
    security = " ".join(option(command, "--security-opt"))
    assert "no-new-privileges" in security
    # its first process is out of reach for the programs: of another user in Docker, masked in
    # Podman
    assert option(command, "--user") == ["0:0" if program == "podman" else "65534:65534"]
    assert option(engine.execute("x", ["sh"]), "--user") == ["0:0"]
    assert ("mask=" in security) == (program == "podman")
    # this machine's proxy variables do not reach it
    assert ("--http-proxy=false" in command) == (program == "podman")


def test_limits_are_given_as_far_as_control_groups_work_and_none_is_above_this_process_own(
    tmp_path,
):
    limits = Limits(cpus=1.5, memory_gib=2, processes=100, disk_gib=1)
    engine = ContainerEngine(command=("docker",), controllers={"cpu", "memory", "pids"})
    command = create(tmp_path, engine, limits=limits)
    assert option(command, "--cpus") == ["1.5"]
    assert option(command, "--memory") == option(command, "--memory-swap") == [str(2 << 30)]
    assert int(option(command, "--pids-limit")[0]) > 100
    assert f"fsize={1 << 30}:{1 << 30}" in option(command, "--ulimit")
    command = create(tmp_path, ContainerEngine(command=("docker",)), limits=limits)
    assert not {"--cpus", "--memory", "--pids-limit"} & set(command)
    ulimits = dict(value.split("=") for value in option(command, "--ulimit"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard == resource.RLIM_INFINITY or int(ulimits["nofile"].split(":")[1]) <= hard
    assert ulimits["core"] == "0:0"


def test_paths_may_have_commas_and_colons(tmp_path):
    mounts = [Mount(tmp_path / "a,b:c", "/d,e", writable=True), Mount(tmp_path, "/plain")]
    command = create(tmp_path, ContainerEngine(command=("podman",)), mounts=mounts)
    assert option(command, "--mount") == [
        f'type=bind,"source={tmp_path}/a,b:c","destination=/d,e"',
        f"type=bind,source={tmp_path},destination=/plain,readonly",
    ]


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Return a function that sets what `docker info` answers: a script is in Docker's place."""

    def answer(**info):
        (tmp_path / "docker").write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(info)}\nEND\n")
        (tmp_path / "docker").chmod(0o755)
        find_engine.cache_clear()

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    yield answer
    find_engine.cache_clear()


def test_the_limits_of_docker_are_those_that_its_daemon_has(docker):
    docker(MemoryLimit=True, PidsLimit=False, CpuCfsQuota=True, SecurityOptions=["name=rootless"])
    assert find_engine("docker", ("--context", "x")) == ContainerEngine(
        command=("docker", "--context", "x"), controllers=frozenset({"memory", "cpu"})
    )


@pytest.mark.parametrize(
    ("path", "options", "calls"),
    [
        ("profile", ["name=seccomp"], [["read"]]),
        ("profile", [], []),
        ("no", ["seccomp"], []),
    ],
)
def test_docker_gets_the_narrowed_profile_of_podman_where_both_have_one(
    docker, tmp_path, monkeypatch, path, options, calls
):
    profile = {"syscalls": [{"names": ["read", "ptrace", "mount"]}]}
    (tmp_path / "profile").write_text(json.dumps(profile))
    monkeypatch.setattr(find, "_PROFILE", str(tmp_path / path))
    docker(SecurityOptions=["name=rootless", *options])
    narrowed = find_engine("docker", ()).seccomp or {"syscalls": []}
    assert [rule["names"] for rule in narrowed["syscalls"][:1]] == calls


def test_a_daemon_of_root_serves_root_only(docker, monkeypatch):
    docker(SecurityOptions=["name=seccomp,profile=builtin"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="run rolltap as root, use rootless Docker"):
        find_engine("docker", ())


@pytest.fixture
def root(tmp_path):
    """A root folder with a file, a link, a folder and a FIFO."""
    root = tmp_path / "root"
    (root / "testbed" / "empty").mkdir(parents=True)
    (root / "testbed" / "file").write_text("start")
    (root / "testbed" / "link").symlink_to("/etc/passwd")
    os.mkfifo(root / "fifo")
    return root


CHANGES = {
    "a content": "echo other > file",
    "a mode": "chmod 755 file",
    "a name": "mv file renamed",
    "an empty folder": "rmdir empty",
    "the target of a link": "ln -sf /etc/group link",
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_digest_of_a_root_folder_is_that_of_its_copy_until_it_changes(what, root, tmp_path):
    subprocess.run(["cp", "-a", root, tmp_path / "copy"], check=True)
    digest = path_digest(str(root))
    assert digest.startswith("sha256:")
    assert path_digest(str(tmp_path / "copy")) == digest
    subprocess.run(["sh", "-c", CHANGES[what]], cwd=root / "testbed", check=True)
    assert path_digest(str(root)) != digest


def test_a_root_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"absent is no folder .*; an image name does not begin"):
        path_digest(str(tmp_path / "absent"))


@pytest.mark.parametrize("workdir", ["/absent", "/../outside", "/out", "/testbed/file"])
def test_a_folder_of_a_root_folder_is_copied_with_its_links_as_they_are_and_nothing_else(
    workdir, root, tmp_path
):
    copy_from_root_folder(root, "/testbed", tmp_path / "testbed")
    assert (tmp_path / "testbed" / "file").read_text() == "start"
    assert os.readlink(tmp_path / "testbed" / "link") == "/etc/passwd"
    (tmp_path / "outside").mkdir()
    (root / "out").symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match=f"has no folder {workdir}"):
        copy_from_root_folder(root, workdir, tmp_path / "start")


def test_a_command_that_fails_says_its_own_message():
    with pytest.raises(OSError, match=r"`sh -c '.*' \.\.\.` fails with status 3: why"):
        call(["sh", "-c", "echo why >&2; exit 3"])
    with pytest.raises(OSError, match=r"does not end within 0\.1 s"):
        call(["sleep", "60"], timeout=0.1)
