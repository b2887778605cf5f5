import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.judges.check import check_judges
from rolltap.trainer.tasks.task import Task
from tests.trainer.judges.sessions import command, write

MODEL = {"kind": "llm", "rubric": "It works.", "url": "http://localhost:9/v1", "model": "m"}
CANNOT_JUDGE = [
    ("key_env", {**MODEL, "key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY with the key"),
    ("url", {**MODEL, "url": "http://localhost:8000/v1"}, "it may not judge itself"),
    ("function", {"kind": "python", "function": "no_module_of_mine:f"}, "No module named 'no_mod"),
    ("function", {"kind": "python", "function": "json:no_function"}, "has no attribute 'no_func"),
]


def check(spec):
    check_judges([Task(id="sum", instruction="x", judge=spec)], "http://127.0.0.1:8000")


@pytest.mark.parametrize(("key", "spec", "why"), CANNOT_JUDGE)
def test_a_judge_that_cannot_judge_is_an_error_before_the_first_session(spec, key, why):
    with pytest.raises(InputError, match=rf"^task sum, judge.{key}: .*{why}"):
        check(spec)
    judges = [{"name": "a", "judge": command("true")}, {"name": "b", "judge": spec}]
    with pytest.raises(InputError, match=rf"^task sum, judge.judges\[1\].judge.{key}: .*{why}"):
        check({"kind": "several", "judges": judges})


@pytest.mark.parametrize("spec", [MODEL, command("true")])
def test_a_judge_that_can_judge_is_none(spec):
    check(spec)


def test_a_function_of_each_task_file_is_checked_where_it_is_looked_for(tmp_path, monkeypatch):
    right = "def right(folder): raise OSError\n"
    write(tmp_path, {"one/marks.py": right, "two/marks.py": "", "modules/my_checks.py": right})
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    check({"kind": "python", "function": "my_checks:right"})
    spec = {"kind": "python", "function": "marks:right"}
    check({**spec, "folder": tmp_path / "one"})
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["marks.py"]
    with pytest.raises(InputError, match="has no attribute 'right'"):
        check({**spec, "folder": tmp_path / "two"})
