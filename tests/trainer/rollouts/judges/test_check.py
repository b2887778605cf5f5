import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.judges.check import check_judge
from rolltap.trainer.tasks.task import Task
from tests.trainer.rollouts.judges.sessions import Left, write

ENGINE = "http://127.0.0.1:8000"
MODEL = {"kind": "llm", "rubric": "It works.", "url": "http://localhost:9/v1", "model": "m"}
COMMAND = {"kind": "command", "command": ["true"]}
PATCH = "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-a\n+b\n"


def task(spec):
    return Task(id="sum", instruction="x", judge=spec)


@pytest.mark.parametrize(
    ("spec", "key", "why"),
    [
        ({**MODEL, "key_env": "NO_SUCH_KEY"}, "judge.key_env", "NO_SUCH_KEY with the key of the judge's model is not"),
        ({**MODEL, "url": "http://localhost:8000/v1"}, "judge.url", "it may not judge itself"),
        (
            {"kind": "python", "function": "no_module_of_mine:f"},
            "judge.function",
            "No module named 'no_module_of_mine'",
        ),
        ({"kind": "python", "function": "json:no_function"}, "judge.function", "has no attribute 'no_function'"),
        ({**COMMAND, "where": "session", "mounts": {"/a": "/etc"}}, "judge.mounts", "'where' is 'session'"),
        ({**COMMAND, "where": "session", "writable": ["/a"]}, "judge.mounts", "'where' is 'session'"),
        ({**COMMAND, "mounts": {"/a": "/no/such"}}, "judge.mounts", "/no/such does not exist"),
        ({**COMMAND, "tests": "/no/such"}, "judge.tests", "/no/such does not exist"),
        ({"kind": "pytest", "test_patch": PATCH.replace("-a", "-c")}, "judge.test_patch", "does not fit its start"),
    ],
)
def test_a_judge_that_cannot_judge_is_an_error_before_the_first_session(tmp_path, spec, key, why):
    start = Left(tmp_path, {"a.txt": "a\n"}).start
    with pytest.raises(InputError, match=rf"^task sum, {key}: .*{why}"):
        check_judge(task(spec), start, [ENGINE])
    several = {"kind": "several", "judges": [{"name": "a", "judge": COMMAND}, {"name": "b", "judge": spec}]}
    with pytest.raises(InputError, match=rf"^task sum, judge.judges\[1\].{key}: .*{why}"):
        check_judge(task(several), start, [ENGINE])


@pytest.mark.parametrize(
    "spec", [MODEL, {"kind": "python", "function": "my_checks:right"}, COMMAND, {"kind": "pytest", "test_patch": PATCH}]
)
def test_a_judge_that_can_judge_is_none(tmp_path, monkeypatch, spec):
    write(tmp_path / "modules", {"my_checks.py": "def right(folder): raise OSError\n"})
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    start = Left(tmp_path / "left", {"a.txt": "a\n"}).start
    check_judge(task(spec), start, [ENGINE])
    assert (start.folder / "a.txt").read_text() == "a\n"
    check_judge(task(spec))


def test_the_short_form_is_checked_as_a_judge():
    check_judge(Task(id="sum", instruction="x", evaluate=["true"]))
