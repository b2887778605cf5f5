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
    found = layered(map(Path, shown), map(Path, hidden))
    assert [*found.items()] == sorted((Path(path), seen) for path, seen in expected.items())


def test_what_is_needed_and_private_is_refused():
    message = r"a session needs /a/b, and must not see it, .*install the program"
    with pytest.raises(InputError, match=message):
        layered([Path("/a"), Path("/a/b")], [Path("/a/b")])


@pytest.mark.parametrize("folder", ["/", "", "home", "home/work"])
def test_a_tool_folder_that_contains_the_home_or_the_workspace_is_refused(
    tmp_path, monkeypatch, folder
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    private = tmp_path / "home/work/session/workspace"
    with pytest.raises(InputError, match="contains"):
        require_narrow(tmp_path / folder, private)
    require_narrow(tmp_path / "home/venv", private)


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
    looked = Looked(runtime._hidden)
    runtime._hidden = looked
    assert runtime.hidden_in([tmp_path / "tool"]) == [tmp_path / "tool/run"]
    assert looked.looked < 20


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("beside", "other", "start", "tests", "data", "rows"):
        (tmp_path / name).mkdir()
    (tmp_path / "beside" / "run.json").touch()
    (tmp_path / "rows" / "tasks.jsonl").touch()
    return tmp_path


def private_of(place, **fields):
    """Return what is private of a run with one task, without the temporary folder."""
    task = Task(id="t", instruction="i", **fields)
    found = private_paths(place / "run", [task], [place / "key"])
    found.remove(Path(tempfile.gettempdir()))
    return {str(path.relative_to(place)) for path in found}


ALWAYS = {"run", "beside", "key", "home"}


def test_runs_the_home_and_all_paths_of_tasks_are_private(place):
    mounts = {"/data": place / "data"}
    judge = CommandJudge(command=["true"], tests=place / "tests", mounts=mounts)
    source = f"{place}/rows/tasks.jsonl, line 3"
    start = place / "start"
    found = private_of(place, workspace=start, judge=judge, image="/usr", source=source)
    assert found == ALWAYS | {"start", "tests", "data", "rows/tasks.jsonl"}
    assert private_of(place, evaluate=["true"]) == ALWAYS
    built = private_of(place, evaluate=["true"], build={"folder": start})
    assert built == ALWAYS | {"start"}


@pytest.mark.parametrize("made", [ContainerRuntime, SandboxRuntime])
def test_files_of_a_preset_are_seen_in_every_box_and_what_is_hidden_beside_them_is_not(
    tmp_path, made
):
    for name in ("own/agent.py", "own/lib/a.py", "own/lib/secret/key"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    agent = tmp_path / "own/agent.py"
    lib = tmp_path / "own/lib"
    runtime = made()
    runtime.hide([lib / "secret", tmp_path])
    runtime.show("python3", [agent, lib])
    layers = runtime.layers()
    assert layers[agent] is layers[lib] is True
    assert layers[lib / "secret"] is False
    assert tmp_path not in layers
