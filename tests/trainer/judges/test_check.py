import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.judges.check import check_judges
from rolltap.trainer.tasks.task import Task
from tests.trainer.judges.sessions import write

ENGINE = "http://127.0.0.1:8000"
MODEL = {"kind": "llm", "rubric": "It works.", "url": "http://localhost:9/v1", "model": "m"}
COMMAND = {"kind": "command", "command": ["true"]}


def check(spec):
    check_judges([Task(id="sum", instruction="x", judge=spec)], ENGINE)


@pytest.mark.parametrize(
    ("spec", "key", "why"),
    [
        (
            {**MODEL, "key_env": "NO_SUCH_KEY"},
            "judge.key_env",
            "NO_SUCH_KEY with the key of the judge's model is not",
        ),
        ({**MODEL, "url": "http://localhost:8000/v1"}, "judge.url", "it may not judge itself"),
        (
            {"kind": "python", "function": "no_module_of_mine:f"},
            "judge.function",
            "No module named 'no_module_of_min",
        ),
        (
            {"kind": "python", "function": "json:no_function"},
            "judge.function",
            "has no attribute 'no_function'",
        ),
    ],
)
def test_a_judge_that_cannot_judge_is_an_error_before_the_first_session(spec, key, why):
    with pytest.raises(InputError, match=rf"^task sum, {key}: .*{why}"):
        check(spec)
    several = {
        "kind": "several",
        "judges": [{"name": "a", "judge": COMMAND}, {"name": "b", "judge": spec}],
    }
    with pytest.raises(InputError, match=rf"^task sum, judge.judges\[1\].{key}: .*{why}"):
        check(several)


@pytest.mark.parametrize(
    "spec", [MODEL, {"kind": "python", "function": "my_checks:right"}, COMMAND]
)
def test_a_judge_that_can_judge_is_none(tmp_path, monkeypatch, spec):
    write(tmp_path / "modules", {"my_checks.py": "def right(folder): raise OSError\n"})
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    check(spec)


def test_a_function_of_each_task_file_is_checked_where_it_is_looked_for(tmp_path):
    write(tmp_path, {"one/marks.py": "def right(folder): return 1\n", "two/marks.py": ""})
    spec = {"kind": "python", "function": "marks:right"}
    check({**spec, "folder": tmp_path / "one"})
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["marks.py"]
    with pytest.raises(InputError, match="has no attribute 'right'"):
        check({**spec, "folder": tmp_path / "two"})
