from pathlib import Path

import pytest

from rolltap.trainer.rollouts.runtimes.choose import make_runtime
from rolltap.trainer.rollouts.runtimes.sandbox import HidingRuntime, covered, private_paths
from rolltap.trainer.tasks.task import CommandJudge, Task


@pytest.fixture
def project(tmp_path):
    """A folder with a tool, a run folder in it, and a link to it."""
    for name in ("tool/run", "tool/inner/bin", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("tool")
    return tmp_path


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
def test_what_is_hidden_is_covered_where_a_tool_folder_shows_it(project, hidden, tool, found):
    assert covered([project / hidden], [project / tool]) == [project / path for path in found]


def test_all_paths_of_tasks_are_private(tmp_path):
    for name in ("run", "work", "start", "tests", "data", "rows"):
        (tmp_path / name).mkdir()
    (tmp_path / "rows" / "tasks.jsonl").touch()
    judge = CommandJudge(command=["true"], tests=tmp_path / "tests", mounts={"/data": tmp_path / "data"})
    source = f"{tmp_path}/rows/tasks.jsonl, line 3"
    task = Task(id="t", instruction="i", workspace=tmp_path / "start", judge=judge, image="/usr", source=source)
    found = private_paths(tmp_path / "run", tmp_path / "work", [task])
    names = {"run", "work", "start", "tests", "data", "rows/tasks.jsonl"}
    assert set(found) == {tmp_path / name for name in names}


def test_a_source_that_names_no_file_hides_nothing(tmp_path):
    task = Task(id="t", instruction="i", evaluate=["true"], source="a book, page 3")
    assert private_paths(tmp_path, tmp_path, [task]) == [tmp_path]


@pytest.mark.parametrize("name", ["sandbox", "container", "apptainer"])
def test_runtimes_that_isolate_hide_and_process_does_not(name):
    assert isinstance(make_runtime(name), HidingRuntime)
    assert not isinstance(make_runtime("process"), HidingRuntime)
    assert Path("/") not in private_paths(Path("/nowhere"), Path("/nowhere"), [])
