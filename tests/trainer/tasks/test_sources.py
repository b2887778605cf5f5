import json

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.tasks.task import Task

GOOD = {"id": "t", "instruction": "Do it.", "evaluate": ["true"]}


def write(folder, *tasks):
    path = folder / "tasks.jsonl"
    path.write_text(
        "\n".join(task if isinstance(task, str) else json.dumps(task) for task in tasks)
    )
    return path


def test_a_workspace_is_relative_to_the_task_file_and_empty_lines_are_skipped(tmp_path):
    (tmp_path / "start").mkdir()
    tasks = load_tasks(write(tmp_path, {**GOOD, "workspace": "start"}, "", {**GOOD, "id": "u"}))
    assert [(task.id, task.workspace) for task in tasks] == [("t", tmp_path / "start"), ("u", None)]
    (task,) = load_tasks(write(tmp_path, {**GOOD, "build": {"folder": "start"}}))
    assert task.build.folder == tmp_path / "start"
    with pytest.raises(InputError, match=r"line 1: 'build\.folder' .*/nowhere does not exist"):
        load_tasks(write(tmp_path, {**GOOD, "build": {"folder": "nowhere"}}))


def test_the_module_of_a_function_is_looked_for_beside_the_task_file(tmp_path):
    (tmp_path / "judges").mkdir()
    function = {"kind": "python", "function": "my_judges:right"}
    several = {"kind": "several", "judges": [{"name": "a", "judge": function}]}
    judges = [function, {**function, "folder": "judges"}, several]
    written = [
        {"id": f"t{n}", "instruction": "x", "judge": judge} for n, judge in enumerate(judges)
    ]
    tasks = load_tasks(write(tmp_path, *written))
    assert [task.judge.folder for task in tasks[:2]] == [tmp_path, tmp_path / "judges"]
    assert tasks[2].judge.judges[0].judge.folder == tmp_path
    from_python = Task(id="t0", instruction="x", judge=function)
    assert from_python.judge.folder is None
    assert from_python.digest() == tasks[0].digest()


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["{"], "line 1: Invalid JSON"),
        ([GOOD, {**GOOD, "id": "u", "evalute": []}], "line 2: unknown key 'evalute'"),
        ([{"id": "t", "instruction": "x"}], "line 1: 'evaluate' is missing"),
        ([{**GOOD, "id": "a/b"}], "'id' is 'a/b'"),
        ([{**GOOD, "workspace": "nowhere"}], "nowhere is not a folder"),
        ([GOOD, GOOD], "line 2: the id 't' is used twice"),
        ([], "has no tasks"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, tasks, message):
    with pytest.raises(InputError, match=message):
        load_tasks(write(tmp_path, *tasks))
    with pytest.raises(InputError, match=r"cannot read the task file .*none\.jsonl: "):
        load_tasks(tmp_path / "none.jsonl")


NOTHING = {"kind": "command", "command": []}


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (
            {"kind": "pytset"},
            "'judge.kind' is 'pytset': write one of command, pytest, python, llm, several",
        ),
        (
            {"command": ["true"]},
            "'judge.kind' is missing: write one of command, pytest, python, llm, several",
        ),
        ({"kind": "pytest", "fail_to_pas": []}, "unknown key 'judge.fail_to_pas'"),
        (
            {"kind": "command", "command": "x"},
            "'judge.command' is 'x': give a list of words: [\"x\"]",
        ),
        (
            {"kind": "llm", "rubric": "r", "url": "u", "model": "m", "tests": "."},
            "unknown key 'judge.tests'",
        ),
        (
            {"kind": "several", "judges": [{"name": "a", "judge": NOTHING}]},
            "'judge.judges.0.judge.command' is []",
        ),
    ],
)
def test_a_mistake_in_a_judge_is_named_by_the_keys_of_the_file(tmp_path, judge, message):
    with pytest.raises(InputError) as error:
        load_tasks(write(tmp_path, {"id": "t", "instruction": "Do it.", "judge": judge}))
    assert message in str(error.value)
