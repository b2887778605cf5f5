import tempfile
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.hiding import HidingRuntime, layered, private_paths, require_narrow
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.tasks.task import CommandJudge, Task

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
        InputError, match=r"a session needs /a/b, and must not see it, .*install the program"
    ):
        layered([Path("/a"), Path("/a/b")], [Path("/a/b")])


def test_a_tool_folder_that_contains_the_home_or_the_workspace_is_refused_and_one_beside_them_is_not(
    tmp_path, monkeypatch
):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    private = home / "work/session/workspace"
    for folder in (Path("/"), tmp_path, home, home / "work"):
        with pytest.raises(InputError, match="contains"):
            require_narrow(folder, private)
    require_narrow(home / "venv", private)


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
    runtime = HidingRuntime()
    runtime.hide([tmp_path / hidden])
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
    runtime = HidingRuntime()
    runtime.hide([*elsewhere, tmp_path / "tool/run"])
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
