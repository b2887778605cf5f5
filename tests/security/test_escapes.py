"""Tasks whose paths, variables and images try to reach the machine from the command line of a box.

Whoever may send a task to a service writes all of these texts.
"""

import os
import re
import subprocess
from contextlib import suppress

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.runtime import Mount
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.preparation import Starts
from rolltap.trainer.tasks.task import Task
from tests.boxes import make_spec, require_podman, sandboxed, spec_in
from tests.trainer.tasks.checkouts import commit, git

OUT_OF_A_BOX = {
    "above the root": "/../oldroot/tmp/x",
    "above the root, later": "/a/../../oldroot/tmp/x",
    "the root": "/",
    "no absolute path": "tmp/x",
    "a second path, after a NUL": "/x\0/oldroot/tmp/x",
    "a second line": "/x\n/y",
    "processes": "/proc/self",
    "devices": "/dev",
    "kernel": "/sys/kernel",
    "programs": "/usr",
    "the home's parent": "/home",
    "the home": "/home/agent",
    "what rolltap lays there": "/rolltap/tools",
    "rolltap's scripts": "/.rolltap/scripts",
    "the recorder's certificate": "/etc/rolltap",
}
JUDGED = {"kind": "command", "command": ["true"]}
FIELDS = {
    "workdir": lambda path: {"workdir": path, "evaluate": ["true"]},
    "judge.writable": lambda path: {"judge": {**JUDGED, "writable": [path]}},
    "judge.reward_files": lambda path: {"judge": {**JUDGED, "reward_files": [path]}},
    "judge.mounts": lambda path: {"judge": {**JUDGED, "mounts": {path: "/usr"}}},
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", OUT_OF_A_BOX)
def test_a_path_that_is_none_of_the_boxs_own_is_refused_by_name(field, name):
    with pytest.raises(InputError, match=re.escape(field)):
        Task(id="t", instruction="go", **FIELDS[field](OUT_OF_A_BOX[name]))


def test_a_path_is_kept_in_its_shortest_form():
    judge = {**JUDGED, "writable": ["/logs//verifier/"], "reward_files": ["/logs/./reward.txt"]}
    task = Task(id="t", instruction="go", workdir="/app/", judge=judge)
    assert (task.workdir, task.judge.writable, task.judge.reward_files) == (
        "/app",
        ["/logs/verifier"],
        ["/logs/reward.txt"],
    )


def test_a_harbor_folder_cannot_name_such_a_path_either(tmp_path):
    from rolltap.trainer.tasks.harbor import load_harbor

    (tmp_path / "t" / "environment").mkdir(parents=True)
    (tmp_path / "t" / "tests").mkdir()
    (tmp_path / "t" / "tests" / "test.sh").write_text("true\n")
    (tmp_path / "t" / "instruction.md").write_text("go\n")
    (tmp_path / "t" / "environment" / "Dockerfile").write_text("FROM debian\n")
    (tmp_path / "t" / "task.toml").write_text('[environment]\nworkdir = "/../oldroot/tmp/x"\n')
    with pytest.raises(InputError, match="workdir"):
        load_harbor(tmp_path / "t")


async def look(runtime, folder, command, **fields):
    env = fields.pop("env", {"PATH": "/usr/bin:/bin"})
    async with runtime.box(spec_in(folder, **fields)) as box:
        await box.run(command, env=env, timeout=60, log=folder / "log")
    return (folder / "log").read_text()


@sandboxed
@pytest.mark.parametrize("where", ["workspace", "home"])
async def test_a_link_that_an_agent_made_on_the_way_of_a_mount_leads_nowhere(tmp_path, where):
    made = tmp_path / "planted"
    source = tmp_path / "source"
    source.mkdir()
    spec_in(tmp_path)
    (tmp_path / where / "link").symlink_to(f"/oldroot{tmp_path}")
    top = {"workspace": "/testbed", "home": "/home/agent"}[where]
    mounts = [Mount(source, f"{top}/link/planted", writable=True)]
    with pytest.raises(OSError, match=f"{top}/link is a link"):
        await look(SandboxRuntime(), tmp_path, ["true"], mounts=mounts)
    assert not made.exists()


async def test_such_a_link_leads_to_nothing_of_the_machine_in_a_container(tmp_path):
    require_podman()
    (tmp_path / "source").mkdir()
    mount = Mount(tmp_path / "source", "/workspace/link/planted", writable=True)
    spec = make_spec(tmp_path, mounts=[mount])
    (spec.workspace / "link").symlink_to(tmp_path)
    with suppress(OSError):
        async with ContainerRuntime().box(spec) as box:
            env = {"PATH": "/usr/bin:/bin"}
            await box.run(
                ["touch", "/workspace/link/planted/x"], env=env, timeout=60, log=tmp_path / "log"
            )
    assert not (tmp_path / "planted").exists()


@sandboxed
@pytest.mark.parametrize("by", ["value", "name"])
async def test_a_variable_cannot_carry_an_option_of_the_sandbox(tmp_path, by):
    secret = tmp_path / "secret"
    secret.write_text("canary")
    text = f"x\0--ro-bind\0{secret}\0/run/seen"
    env = {"PATH": "/usr/bin:/bin"} | ({"A": text} if by == "value" else {f"A\0{text}": "x"})
    with pytest.raises(OSError, match="NUL"):
        await look(SandboxRuntime(), tmp_path, ["cat", "/run/seen"], env=env)
    assert not (tmp_path / "log").exists() or "canary" not in (tmp_path / "log").read_text()


@pytest.fixture
def private(tmp_path):
    """Return the program of an environment that belongs to nobody's session, with a private file in
    it."""
    folder = tmp_path / "private"
    (folder / "bin").mkdir(parents=True)
    (folder / "lib" / "python3").mkdir(parents=True)
    (folder / "lib" / "python3" / "secret").write_text("canary")
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\n")
    program = folder / "bin" / "tool"
    program.write_text("#!/bin/sh\nexec cat $(dirname $0)/../lib/python3/secret\n")
    program.chmod(0o755)
    return program


@sandboxed
@pytest.mark.parametrize(
    "command", [["tool"], ["sh", "-c", 'exec "$@"', "sh", "tool"], ["{tool}"], ["./{tool}"]]
)
async def test_a_task_does_not_show_a_folder_by_its_path_or_its_command(tmp_path, private, command):
    words = [
        word.replace("./{tool}", os.path.relpath(private)).replace("{tool}", str(private))
        for word in command
    ]
    env = {"PATH": f"{private.parent}:/usr/bin:/bin"}
    try:
        said = await look(SandboxRuntime(), tmp_path, words, env=env)
    except FileNotFoundError:
        said = ""
    assert "canary" not in said


@sandboxed
async def test_the_operators_path_and_the_harness_show_their_programs(
    tmp_path, private, monkeypatch
):
    runtime = SandboxRuntime()
    runtime.show(Harness(name="h", program=str(private), headless=[]).program)
    assert "canary" in await look(runtime, tmp_path, [str(private)])
    monkeypatch.setenv("PATH", str(private.parent), prepend=":")
    env = {"PATH": os.environ["PATH"]}
    assert "canary" in await look(SandboxRuntime(), tmp_path, ["tool"], env=env)


class OfFolder:
    """A runtime whose images are one folder of this machine."""

    name = "container"
    warning = None
    isolated = True
    programs_here = True

    def __init__(self, folder):
        self.folder = folder

    def copy_out(self, image, workdir, dest):
        dest.mkdir(parents=True)
        subprocess.run(["cp", "-a", f"{self.folder}/.", dest], check=True)

    def check(self):
        pass

    def show(self, program, files=()):
        pass

    def box(self, spec):
        raise NotImplementedError

    def image_digest(self, image):
        return ""


def as_file(image, repository):
    (image / ".git").write_text(f"gitdir: {repository}\n")


def as_link(image, repository):
    (image / ".git").symlink_to(repository)


def by_common_folder(image, repository):
    (image / ".git").mkdir()
    (image / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (image / ".git" / "commondir").write_text(f"{repository}\n")


def a_repository_that_ends_at(image, repository):
    git(image, "init", "--quiet", "--initial-branch=main")
    commit(image, "a", "a")
    (image / ".git" / "refs" / "heads" / "main").write_text(
        git(repository, "rev-parse", "main") + "\n"
    )


def by_alternates(image, repository):
    a_repository_that_ends_at(image, repository)
    (image / ".git" / "objects" / "info" / "alternates").write_text(f"{repository}/objects\n")


def by_linked_objects(image, repository):
    a_repository_that_ends_at(image, repository)
    subprocess.run(["rm", "-r", image / ".git" / "objects"], check=True)
    (image / ".git" / "objects").symlink_to(repository / "objects")


def by_a_linked_pack(image, repository):
    a_repository_that_ends_at(image, repository)
    git(repository, "repack", "-adq")
    for file in (repository / "objects" / "pack").iterdir():
        (image / ".git" / "objects" / "pack" / file.name).symlink_to(file)


BORROWED = [as_file, as_link, by_common_folder, by_alternates, by_linked_objects, by_a_linked_pack]


@pytest.mark.parametrize("borrow", BORROWED)
async def test_the_checkout_of_an_image_has_no_history_of_a_repository_of_this_machine(
    tmp_path, borrow
):
    own = tmp_path / "own"
    own.mkdir()
    git(own, "init", "--quiet", "--initial-branch=main")
    commit(own, "secret", "canary")
    image = tmp_path / "image"
    image.mkdir()
    borrow(image, own / ".git")
    task = Task(id="t", instruction="go", image="any", evaluate=["true"])
    with pytest.raises(InputError, match=r"task 't': .*outside of the image"):
        await Starts(tmp_path / "starts", OfFolder(image)).of(task)
