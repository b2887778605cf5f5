"""Private files that lie around programs, among the system's, and in tool folders: a session's
program looks for them.

Every place is attacked with all that a rollout hides: `Worker.fit` says what is private, a real box
runs the program.
"""

import os
import secrets
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from rolltap.addons.engine.key import KEY_FILE
from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.tasks.task import CommandJudge, Task
from tests.boxes import make_spec, require_podman, sandboxed, spec_in
from tests.deep import cases

CANARY = f"canary-{secrets.token_hex(16)}"
LOOK = (
    'echo begun; cat "$(dirname "$0")/../lib/python3/agent.py"; grep -rhs canary- {places}; ls -aR'
    " {places}"
)
"""A program that reads its own library, and then all that it can find."""
PRIVATE = [
    "key",
    "runs/this/events.jsonl",
    "runs/old/run.json",
    "tasks/tests/test_secret.py",
    "tasks/rows.jsonl",
]
PRIVATE += [
    "runs/old/events.jsonl",
    "tasks/start/private.py",
    "home/.ssh/id",
    "conf/mitmproxy-ca.pem",
]
"""Files that no session may see wherever they are."""
BESIDE = [".env", "src/app.py", "share/data.csv", "etc/settings"]
"""Files of the project in which a program is installed."""


def write(path, text=CANARY, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def install(prefix, *, environment, places):
    """Install the program `agent` below a prefix."""
    write(prefix / "lib" / "python3" / "agent.py", "a library\n")
    if environment:
        write(prefix / "pyvenv.cfg", "home = /usr/bin\n")
    script = LOOK.replace("{places}", " ".join(map(str, dict.fromkeys(places))))
    return write(prefix / "bin" / "agent", f"#!/bin/sh\n{script}\n", 0o755)


@pytest.fixture
def new_folder():
    """Return a function that makes a folder below one of the system's, which is removed in the
    end."""
    made = []

    def new_folder(parent):
        if not os.access(parent, os.W_OK):
            pytest.skip(f"{parent} is closed to this user")
        made.append(Path(tempfile.mkdtemp(prefix="rolltap-test-", dir=parent)))
        made[-1].chmod(0o755)
        return made[-1]

    yield new_folder
    for folder in made:
        shutil.rmtree(folder)


@pytest.fixture
def world(tmp_path, new_folder, monkeypatch):
    """Return a function that lays out a project with private files, and returns what a rollout
    knows of it."""

    def world(parent, prefix, *, environment=True, private=None, program="agent", tools=()):
        # not below the temporary folder, which is hidden as a whole: nothing else would be seen to
        # hide a file
        project = new_folder(parent)
        place = new_folder(private) if private else project
        for name in PRIVATE:
            write(place / name)
        for name in BESIDE:
            write(project / name)
        bin = install(project / prefix, environment=environment, places=[project, place]).parent
        monkeypatch.setenv("HOME", str(place / "home"))
        monkeypatch.setenv("PATH", str(bin), prepend=":")
        judge = CommandJudge(command=["true"], tests=place / "tasks" / "tests")
        start, source = place / "tasks" / "start", f"{place}/tasks/rows.jsonl, line 1"
        task = Task(id="t", instruction="go", workspace=start, judge=judge, source=source)
        worker = Worker(
            RolloutConfig.of(
                {
                    "recorder": {
                        "rolltap_engine_key_file": str(place / "key"),
                        "confdir": f"{place}/conf",
                    }
                }
            ),
            harness=Harness(name="agent", program=program, headless=["{instruction}"]),
            engine="http://127.0.0.1:9",
            model="m",
            out=place / "runs" / "this",
            runtime=SandboxRuntime([project / tool for tool in tools]),
        )
        return SimpleNamespace(project=project, place=place, worker=worker, task=task)

    return world


async def look(made, folder, instruction="go"):
    """Run the program of a world in a box, and return what it found."""
    made.worker.fit([made.task])
    async with made.worker.runtime.box(spec_in(folder)) as box:
        command = made.worker.harness.command_for(instruction)
        await box.run(command, env={"PATH": os.environ["PATH"]}, timeout=60, log=folder / "log")
    return (folder / "log").read_text()


LAYOUTS = {
    "an environment in a project": ("/srv", ".venv", {}),
    "an environment in a project of the system": ("/usr/local", ".venv", {}),
    "private files among the system's": ("/srv", ".venv", {"private": "/usr/local/share"}),
    "an environment in a package of the system": ("/opt", ".venv", {}),
    "an environment at the root of a project": ("/srv", ".", {}),
    "an environment at the root of a project of the system": ("/usr/local/share", ".", {}),
    "an environment with others": ("/usr/local", "envs/a", {}),
    "a prefix in a package of the system": (
        "/opt",
        ".",
        {"environment": False, "private": "/usr/share"},
    ),
    "a prefix in a project": ("/srv", "agent", {"environment": False}),
}


@sandboxed
@pytest.mark.parametrize("name", cases(LAYOUTS, 0, 1, 2))
async def test_a_program_sees_its_own_files_and_nothing_that_lies_around_them(
    world, tmp_path, name
):
    parent, prefix, how = LAYOUTS[name]
    made = world(parent, prefix, **how)
    if not how.get("environment", True):
        shutil.rmtree(made.project / prefix / "share", ignore_errors=True)  # a prefix's own
    said = await look(made, tmp_path)
    assert said.startswith("begun\na library\n")
    assert CANARY not in said
    names = (
        BESIDE if "private" in how else BESIDE + PRIVATE
    )  # in a system's folder, a hidden file has its name
    assert not {Path(path).name for path in names} & set(said.split())


@sandboxed
@pytest.mark.parametrize("prefix", cases([".venv", "runs/this/.venv", "tasks/.venv"]))
async def test_a_tool_folder_shows_what_it_has_but_nothing_that_is_private(
    world, tmp_path, prefix, monkeypatch
):
    made = world("/srv", prefix, tools=["."])
    with pytest.raises(
        InputError, match=rf"the tool folder {made.project} contains {made.place}/home"
    ):
        made.worker.fit([made.task])
    monkeypatch.setenv("HOME", "/nowhere")
    made.worker.recorder.path = (
        tmp_path / "run"
    )  # those in the tool folder are known by their files
    write(made.project / "runs" / "this" / "run.json")
    said = await look(made, tmp_path)
    assert said.startswith("begun\na library\n")
    seen = [made.project / path for path in BESIDE] + [made.project / "home" / ".ssh" / "id"]
    assert said.count(CANARY) == len(seen)


@sandboxed
@pytest.mark.parametrize("by", cases(["the option", "the variable"], 1))
async def test_the_engines_key_is_hidden_however_it_is_named(world, tmp_path, monkeypatch, by):
    made = world("/srv", ".venv")
    key = write(made.project / ".venv" / "bin" / "engine.key")
    if by == "the variable":
        monkeypatch.setenv(KEY_FILE, str(key))
    else:
        made.worker.recorder._options["rolltap_engine_key_file"] = [str(key)]
    said = await look(made, tmp_path)
    assert said.startswith("begun\na library\n")
    assert CANARY not in said


@sandboxed
@pytest.mark.parametrize("where", cases(["link", "absolute"]))
async def test_a_program_outside_of_its_environment_shows_its_link_alone(
    world, tmp_path, where, monkeypatch
):
    made = world("/srv", ".venv")
    link = made.project / "tools" / "agent"
    write(link.parent / "deploy")
    link.symlink_to("../.venv/bin/agent")
    program = str(link) if where == "absolute" else "agent"
    monkeypatch.setenv("PATH", f"{link.parent}:/usr/bin:/bin")
    made.worker.harness = made.worker.harness.model_copy(update={"program": program})
    said = await look(made, tmp_path)
    assert said.startswith("begun\n")
    assert CANARY not in said


@sandboxed
async def test_an_instruction_that_names_a_file_does_not_show_it(world, tmp_path):
    made = world("/srv", ".venv")
    script = write(made.project / "deploy", f"#!/bin/sh\n# {CANARY}\n", 0o755)
    for instruction in (str(script), f"{made.project}/.env", os.path.relpath(script)):
        assert CANARY not in await look(made, tmp_path, instruction)


@sandboxed
async def test_a_program_that_another_one_starts_is_seen(world, tmp_path):
    made = world("/srv", ".venv")
    made.worker.fit([made.task])
    async with made.worker.runtime.box(spec_in(tmp_path)) as box:
        env = {"PATH": os.environ["PATH"]}
        await box.run(
            ["sh", "-c", 'exec "$@"', "sh", "agent"], env=env, timeout=60, log=tmp_path / "log"
        )
    assert (tmp_path / "log").read_text().startswith("begun\na library\n")


@sandboxed
def test_a_rollout_whose_program_would_be_hidden_does_not_start(world, monkeypatch):
    made = world("/usr/local", "tasks/start", environment=False)
    program = made.project / "tasks" / "start" / "bin" / "agent"
    with pytest.raises(
        InputError,
        match=rf"the program {program} is in {made.project}/tasks/start, which .*elsewhere",
    ):
        made.worker.fit([made.task])
    made.worker.runtime.tools = [made.project / "tasks" / "tests"]
    with pytest.raises(
        InputError, match=rf"a session needs {made.project}/tasks/tests, and must not see it"
    ):
        made.worker.fit([made.task])


async def test_a_container_shows_a_tool_in_a_hidden_folder_of_another_tool_and_nothing_else_of_it(
    tmp_path,
):
    require_podman()
    for name in ("top/runs/file", "top/runs/env/bin/file", "top/runs/env/key", "top/seen"):
        write(tmp_path / name, name)
    top = tmp_path / "top"
    runtime = ContainerRuntime(tools=[top, top / "runs" / "env"])
    runtime.hide([top / "runs", top / "runs" / "env" / "key"])
    async with runtime.box(make_spec(tmp_path)) as box:
        command = [
            "sh",
            "-c",
            f"grep -rhs . {top}; ls -R {top}/runs; touch {top}/runs/x {top}/runs/env/x",
        ]
        ended = await box.run(
            command, env={"PATH": "/usr/bin:/bin"}, timeout=60, log=tmp_path / "log"
        )
    said = (tmp_path / "log").read_text()
    assert sorted(line for line in said.splitlines() if line.startswith("top/")) == [
        "top/runs/env/bin/file",
        "top/seen",
    ]
    assert "Read-only file system" in said
    assert ended.status == 1
