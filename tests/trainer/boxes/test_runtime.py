import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes import runtime
from rolltap.trainer.boxes.engines.container import ContainerRuntime
from rolltap.trainer.boxes.runtime import (
    HidingRuntime,
    layered,
    private_paths,
    projects_around,
    require_narrow,
    tool_folders,
)
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.tasks.task import CommandJudge, Task


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A home folder with installations as package managers make them."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))

    def write(path, text="\x7fELF", mode=0o755):
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        return file

    def link(path, target):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).symlink_to(target)

    # npm in a folder
    write("cache/agent-1/node_modules/agent/cli.js", "#!/usr/bin/env -S node --flag\n")
    link("cache/agent-1/node_modules/.bin/agent", "../agent/cli.js")
    # node below a prefix, with global packages
    write(".nvm/versions/v22/bin/node")
    write(".nvm/versions/v22/lib/node_modules/global/cli.js", "#!/usr/bin/env node\n")
    link(".nvm/versions/v22/bin/global", "../lib/node_modules/global/cli.js")
    # a virtual environment of a Python of pyenv
    write(".pyenv/versions/3.11/bin/python3.11")
    link(".pyenv/versions/3.11/bin/python3", "python3.11")
    (home / ".pyenv/versions/3.11/lib/python3.11").mkdir(parents=True)
    write("venv/pyvenv.cfg", f"home = {home}/.pyenv/versions/3.11/bin\nversion = 3.11\n")
    link("venv/bin/python", home / ".pyenv/versions/3.11/bin/python3.11")
    for path in (
        "run/session.log",
        "share/tasks",
        "etc/key",
        "lib/secret.py",
    ):  # made at the root of a project
        write(f"venv/{path}")
    write("venv/bin/mini", f"#!{home}/venv/bin/python\n")
    write(".pyenv/shims/tox", "#!/usr/bin/env sh\n")
    # pip install --user, pipx, a native program
    write(".local/bin/user-agent", "#!/usr/bin/env sh\n")
    (home / ".local/lib/python3.11").mkdir(parents=True)
    link(".local/bin/mini-by-pipx", "../../venv/bin/mini")
    write(".local/share/claude/versions/2")
    link(".local/bin/claude", "../share/claude/versions/2")
    write("scripts/run.sh", "#!/bin/sh\n")
    write("scripts/not-a-program", mode=0o644)
    write("project/shims/deploy", "#!/bin/sh\n")
    write("project/secret")
    return home


FOLDERS = [
    "cache/agent-1/node_modules/.bin",
    ".nvm/versions/v22/bin",
    "venv/bin",
    ".pyenv/shims",
    ".local/bin",
    "scripts",
    "project/shims",
]
NODE = [".nvm/versions/v22/bin", ".nvm/versions/v22/lib"]
ENVIRONMENT = [
    "venv/pyvenv.cfg",
    "venv/bin",
    ".pyenv/versions/3.11/bin",
    ".pyenv/versions/3.11/lib",
]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("agent", ["cache/agent-1/node_modules", *NODE]),
        ("global", [*NODE, ".nvm/versions/v22/lib/node_modules"]),
        ("mini", ENVIRONMENT),
        ("tox", [".pyenv/shims", ".pyenv/versions"]),
        ("deploy", ["project/shims/deploy"]),
        ("user-agent", [".local/bin/user-agent", ".local/lib/python3.11"]),
        ("mini-by-pipx", [".local/bin/mini-by-pipx", ".local/lib/python3.11", *ENVIRONMENT]),
        (
            "claude",
            [".local/bin/claude", ".local/lib/python3.11", ".local/share/claude/versions/2"],
        ),
        ("run.sh", ["scripts/run.sh"]),
        ("not-a-program", []),
        ("no-such-program", []),
        ("sh", []),
    ],
)
def test_a_program_is_found_with_all_of_its_installation_and_no_more(place, program, expected):
    path = ":".join([*(str(place / folder) for folder in FOLDERS), "/usr/bin", "/bin"])
    found = tool_folders(program, path)
    assert {folder.relative_to(place) for folder in found} == {Path(folder) for folder in expected}


def test_a_program_of_a_folder_that_rolltap_runs_in_is_found_only_by_an_absolute_path(
    place, monkeypatch
):
    monkeypatch.chdir(place / "scripts")
    assert tool_folders("./run.sh", "") == tool_folders("run.sh", ".:") == ()
    assert tool_folders(f"{place}/scripts/run.sh", "") == (place / "scripts" / "run.sh",)


LAYERS = [
    (["a"], [], {"a": True}),
    ([], ["a"], {}),
    (["a", "a/b"], [], {"a": True}),
    (["a"], ["a/b", "a/b/c"], {"a": True, "a/b": False}),
    (
        ["a", "a/b/c"],
        ["a/b", "a/b/c/d"],
        {"a": True, "a/b": False, "a/b/c": True, "a/b/c/d": False},
    ),
    (["a/b"], ["a"], {"a/b": True}),
    (["a-b", "a"], ["a-b/c"], {"a": True, "a-b": True, "a-b/c": False}),
]


@pytest.mark.parametrize(("shown", "hidden", "expected"), LAYERS)
def test_what_is_nearest_above_a_file_says_whether_it_is_seen(shown, hidden, expected):
    found = layered([Path("/", path) for path in shown], [Path("/", path) for path in hidden])
    assert found == {Path("/", path): seen for path, seen in expected.items()}
    assert list(found) == sorted(found)


def test_what_is_needed_and_private_is_refused():
    with pytest.raises(
        InputError, match=r"a session needs /a/b, and must not see it: .*install the program"
    ):
        layered([Path("/a"), Path("/a/b")], [Path("/a/b")])


def test_a_project_of_the_system_is_found_around_its_environment():
    places = [
        "/usr/local/p/.venv",
        "/usr/local/p",
        "/usr/share/p/envs/a",
        "/usr/lib/venv",
        "/srv/p/.venv",
        "/usr",
    ]
    found = projects_around([Path(place, "pyvenv.cfg") for place in places])
    assert found == [
        Path(path) for path in ("/usr/local/p", "/usr/local/p", "/usr/share/p", "/usr/lib/venv")
    ]


def test_a_tool_folder_that_contains_the_home_or_the_workspace_is_refused_and_one_beside_them_is_not(
    place,
):
    private = place / "work/session/workspace"
    for folder in ("/", "home", "home/work", "."):
        with pytest.raises(InputError, match="contains"):
            require_narrow(place.parent / folder, private)
    require_narrow(place / "venv", private)


LEFT = {
    "a file": "touch file",
    "folders that are nested deeper than Python recurses": (
        'python3 -c \'\nimport os\nfor _ in range(1500): os.mkdir("d" * 20); os.chdir("d" * 20)\n\''
    ),
    "a folder that is closed": (
        "mkdir -p closed/inside; touch closed/inside/file; chmod 0 closed/inside closed"
    ),
    "a link to what must stay": "ln -s ../kept kept",
    "a FIFO and a name with a newline": "mkfifo fifo; touch 'a\nb' -- '-rf'",
}


@pytest.mark.parametrize("script", LEFT.values(), ids=list(LEFT))
def test_what_a_session_leaves_is_removed(tmp_path, monkeypatch, script):
    monkeypatch.setattr(runtime.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    with runtime.scratch_folder() as folder:
        subprocess.run(["sh", "-c", script], cwd=folder, check=True)
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_a_folder_that_cannot_be_removed_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("rm", "chmod"):
        (tmp_path / name).write_text("#!/bin/sh\necho busy >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    runtime.remove_folder(tmp_path / "x")
    assert "x could not be removed: busy" in caplog.text


@pytest.mark.parametrize(
    ("hidden", "tool", "found"),
    [
        ("tool/run", "tool", ["tool/run"]),
        ("tool/run", "link", ["link/run"]),
        ("link/run", "tool", ["tool/run"]),
        ("tool", "tool", ["tool"]),
        ("tool/none", "tool", []),
        ("elsewhere", "tool", []),
        ("tool", "tool/inner/bin", []),
    ],
)
def test_what_is_hidden_is_covered_where_a_tool_folder_shows_it(tmp_path, hidden, tool, found):
    for name in ("tool/run", "tool/inner/bin", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("tool")
    runtime = HidingRuntime(hidden=[tmp_path / hidden])
    assert runtime.hidden_in([tmp_path / tool]) == [tmp_path / path for path in found]


class Looked(list):
    """A list that counts the elements which are looked at."""

    looked = 0

    def __getitem__(self, index):
        self.looked += 1
        return super().__getitem__(index)


def test_what_is_hidden_elsewhere_is_not_looked_at(tmp_path):
    (tmp_path / "tool/run").mkdir(parents=True)
    elsewhere = [tmp_path / f"tool{number}" for number in range(1000)]
    runtime = HidingRuntime(hidden=[*elsewhere, tmp_path / "tool/run"])
    runtime._hidden = Looked(runtime._hidden)
    assert runtime.hidden_in([tmp_path / "tool"]) == [tmp_path / "tool/run"]
    assert runtime._hidden.looked < 20


def test_runs_the_home_and_all_paths_of_tasks_are_private(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("beside", "other", "start", "tests", "data", "rows"):
        (tmp_path / name).mkdir()
    (tmp_path / "beside" / "run.json").touch()
    (tmp_path / "rows" / "tasks.jsonl").touch()
    judge = CommandJudge(
        command=["true"], tests=tmp_path / "tests", mounts={"/data": tmp_path / "data"}
    )
    source = f"{tmp_path}/rows/tasks.jsonl, line 3"
    task = Task(
        id="t",
        instruction="i",
        workspace=tmp_path / "start",
        judge=judge,
        image="/usr",
        source=source,
    )
    found = private_paths(tmp_path / "run", [task], [tmp_path / "key"])
    names = {"run", "beside", "key", "home", "start", "tests", "data", "rows/tasks.jsonl"}
    assert set(found) == {Path(tempfile.gettempdir()), *(tmp_path / name for name in names)}
    written = Task(id="t", instruction="i", evaluate=["true"])
    assert private_paths(tmp_path / "run", [written], [tmp_path / "key"]) == found[:5]
    built = Task(id="t", instruction="i", evaluate=["true"], build={"folder": tmp_path / "start"})
    assert private_paths(tmp_path / "run", [built], [tmp_path / "key"]) == [
        *found[:5],
        tmp_path / "start",
    ]


def test_files_of_a_preset_are_seen_in_every_box_and_what_is_hidden_beside_them_is_not(tmp_path):
    for name in ("own/agent.py", "own/lib/a.py", "own/lib/secret/key"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    agent, lib = tmp_path / "own/agent.py", tmp_path / "own/lib"
    for made in (ContainerRuntime(), SandboxRuntime()):
        made.hide([lib / "secret", tmp_path])
        made.show("python3", [agent, lib])
        layers = made.layers()
        assert {path: layers.get(path) for path in (tmp_path, agent, lib, lib / "secret")} == {
            tmp_path: None,
            agent: True,
            lib: True,
            lib / "secret": False,
        }
