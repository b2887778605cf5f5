"""Tasks whose paths, variables and images try to reach the machine from the command line of a box.

Whoever may send a task to a service writes all of these texts.
"""

import json
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
from rolltap.trainer.tasks.harbor import load_harbor
from rolltap.trainer.tasks.task import Task
from tests.boxes import ENV, make_spec, require_podman, sandboxed, sh, spec_in
from tests.trainer.judges.sessions import command, write
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
FIELDS = {
    "workdir": {"workdir": "PATH", "evaluate": ["true"]},
    "judge.writable": {"judge": command("true", writable=["PATH"])},
    "judge.reward_files": {"judge": command("true", reward_files=["PATH"])},
    "judge.mounts": {"judge": command("true", mounts={"PATH": "/usr"})},
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", OUT_OF_A_BOX)
def test_a_path_that_is_none_of_the_boxs_own_is_refused_by_name(field, name):
    path = json.dumps(OUT_OF_A_BOX[name])
    fields = json.loads(json.dumps(FIELDS[field]).replace('"PATH"', path))
    with pytest.raises(InputError, match=re.escape(field)):
        Task(id="t", instruction="go", **fields)


def test_a_path_is_kept_in_its_shortest_form():
    judge = command("true", writable=["/logs//verifier/"], reward_files=["/logs/./reward.txt"])
    task = Task(id="t", instruction="go", workdir="/app/", judge=judge)
    assert task.workdir == "/app"
    assert task.judge.writable == ["/logs/verifier"]
    assert task.judge.reward_files == ["/logs/reward.txt"]


def test_a_harbor_folder_cannot_name_such_a_path_either(tmp_path):
    files = {
        "tests/test.sh": "true\n",
        "instruction.md": "go\n",
        "environment/Dockerfile": "FROM debian\n",
        "task.toml": '[environment]\nworkdir = "/../oldroot/tmp/x"\n',
    }
    write(tmp_path, files)
    with pytest.raises(InputError, match="workdir"):
        load_harbor(tmp_path)


async def look(runtime, folder, words, *, env=ENV, **fields):
    async with runtime.box(spec_in(folder, **fields)) as box:
        await box.run(words, env=env, timeout=60, log=folder / "log")
    return (folder / "log").read_text()


@sandboxed
@pytest.mark.parametrize("where", ["workspace", "home"])
async def test_a_link_that_an_agent_made_on_the_way_of_a_mount_leads_nowhere(tmp_path, where):
    source = tmp_path / "source"
    source.mkdir()
    spec_in(tmp_path)
    (tmp_path / where / "link").symlink_to(f"/oldroot{tmp_path}")
    top = {"workspace": "/testbed", "home": "/home/agent"}[where]
    mounts = [Mount(source, f"{top}/link/planted", writable=True)]
    with pytest.raises(OSError, match=f"{top}/link is a link"):
        await look(SandboxRuntime(), tmp_path, ["true"], mounts=mounts)
    assert not (tmp_path / "planted").exists()


async def test_such_a_link_leads_to_nothing_of_the_machine_in_a_container(tmp_path):
    require_podman()
    (tmp_path / "source").mkdir()
    mount = Mount(tmp_path / "source", "/workspace/link/planted", writable=True)
    spec = make_spec(tmp_path, mounts=[mount])
    (spec.workspace / "link").symlink_to(tmp_path)
    with suppress(OSError):
        async with ContainerRuntime().box(spec) as box:
            await sh(box, "touch /workspace/link/planted/x", tmp_path / "log")
    assert not (tmp_path / "planted").exists()


@sandboxed
@pytest.mark.parametrize("by", ["value", "name"])
async def test_a_variable_cannot_carry_an_option_of_the_sandbox(tmp_path, by):
    secret = tmp_path / "secret"
    secret.write_text("canary")
    text = f"x\0--ro-bind\0{secret}\0/run/seen"
    carried = {"A": text} if by == "value" else {f"A\0{text}": "x"}
    with pytest.raises(OSError, match="NUL"):
        await look(SandboxRuntime(), tmp_path, ["cat", "/run/seen"], env={**ENV, **carried})
    log = tmp_path / "log"
    assert not log.exists() or "canary" not in log.read_text()


@pytest.fixture
def private(tmp_path):
    """Return the program of an environment that belongs to nobody's session, with a private file in
    it."""
    folder = tmp_path / "private"
    reads = "#!/bin/sh\nexec cat $(dirname $0)/../lib/python3/secret\n"
    write(folder, {"pyvenv.cfg": "home = /usr/bin\n", "lib/python3/secret": "canary"})
    write(folder, {"bin/tool": reads})
    program = folder / "bin" / "tool"
    program.chmod(0o755)
    return program


@sandboxed
@pytest.mark.parametrize("words", ["tool", "sh -c $0 tool", "{tool}", "./{relative}"])
async def test_a_task_does_not_show_a_folder_by_its_path_or_its_command(tmp_path, private, words):
    words = words.format(tool=private, relative=os.path.relpath(private)).split()
    env = {"PATH": f"{private.parent}:/usr/bin:/bin"}
    said = ""
    with suppress(FileNotFoundError):
        said = await look(SandboxRuntime(), tmp_path, words, env=env)
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


ENDS_AT = """
git init --quiet --initial-branch=main
git --git-dir=$REPOSITORY rev-parse main > .git/refs/heads/main
"""
BORROWED = {
    "as a file": "echo gitdir: $REPOSITORY > .git",
    "as a link": "ln -s $REPOSITORY .git",
    "by a common folder": """
mkdir .git
echo ref: refs/heads/main > .git/HEAD
echo $REPOSITORY > .git/commondir
""",
    "by alternates": f"{ENDS_AT} echo $REPOSITORY/objects > .git/objects/info/alternates",
    "by linked objects": f"{ENDS_AT} rm -r .git/objects; ln -s $REPOSITORY/objects .git/objects",
    "by a linked pack": f"""{ENDS_AT}
git --git-dir=$REPOSITORY repack -adq
ln -s $REPOSITORY/objects/pack/* .git/objects/pack
""",
}


@pytest.fixture(params=BORROWED)
def image(request, tmp_path):
    """Return the folder of an image whose history is that of a repository of this machine."""
    own = tmp_path / "own"
    image = tmp_path / "image"
    own.mkdir()
    image.mkdir()
    git(own, "init", "--quiet", "--initial-branch=main")
    commit(own, "secret", "canary")
    env = {**os.environ, "REPOSITORY": str(own / ".git")}
    subprocess.run(["sh", "-ec", BORROWED[request.param]], cwd=image, env=env, check=True)
    return image


async def test_the_checkout_of_an_image_has_no_history_of_a_repository_of_this_machine(
    tmp_path, image
):
    task = Task(id="t", instruction="go", image="any", evaluate=["true"])
    with pytest.raises(InputError, match=r"task 't': .*outside of the image"):
        await Starts(tmp_path / "starts", OfFolder(image)).of(task)
