"""`rolltap tasks check`."""

import json

import pytest
from click.testing import CliRunner

from rolltap.trainer.checks import trial
from rolltap.trainer.checks.cheats import CHEATS
from rolltap.trainer.cli.main import rolltap

EXIT = "an exit with status 0 at the import"
CHECK = "import calc\nraise SystemExit(calc.add(2, 2) != 4)\n"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that runs the command on tasks whose judges are these commands, with one
    cheat."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "CHEATS", [cheat for cheat in CHEATS if cheat.name == EXIT])
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "calc.py").write_text(
        "def add(a, b):\n    return a - b\n" + "# more\n" * 40
    )
    (tmp_path / "start" / "check.py").write_text(CHECK)

    def check(*options, **judges):
        task = {"instruction": "Mend it.", "workspace": "start"}
        lines = [
            json.dumps({"id": name, "evaluate": judge, **task}) for name, judge in judges.items()
        ]
        (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
        return CliRunner().invoke(
            rolltap, ["tasks", "check", str(tmp_path / "tasks.jsonl"), *options]
        )

    return check


def test_a_weak_task_is_in_the_table_with_the_cheat_its_diff_and_what_to_do(check):
    ended = check(weak=["python", "check.py"], strong=["test", "-e", "answer.txt"])
    assert ended.exit_code == 1, ended.output
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in ended.stdout.splitlines()
        if "│" in line
    ]
    assert rows == [["weak", "0", "none", "1", "1"], ["strong", "0", "none", "1", "0"]]
    words = f"weak: the cheat '{EXIT}' earns 1, and the untouched start 0\n"
    assert f"{words}    --- a/calc.py\n    +++ b/calc.py\n" in ended.stdout
    assert "\n  To mend it: run the agent's code as a child process" in ended.stdout


def test_strong_tasks_have_the_exit_status_0_and_json_has_all(check):
    ended = check("--json", "--concurrency", "2", strong=["test", "-e", "answer.txt"])
    assert ended.exit_code == 0, ended.output
    (found,) = json.loads(ended.stdout)
    assert found == {
        "passed": True,
        "task": "strong",
        "start": 0.0,
        "solution": None,
        "tried": [EXIT],
        "weaknesses": [],
        "reachable": [],
        "wrong": [],
    }


def test_the_build_of_images_is_an_option_that_needs_a_runtime_with_images(check):
    ended = check("--build", strong=["true"])
    assert "build = True has no meaning with runtime" in str(ended.exception)


def test_a_line_that_is_no_task_is_told_by_its_line_and_has_no_row(check, tmp_path):
    check(weak=["true"])
    file = tmp_path / "tasks.jsonl"
    line = file.read_text()
    file.write_text(f"{line}\n{line}")
    ended = CliRunner().invoke(rolltap, ["tasks", "check", str(file)])
    assert ended.exit_code == 1
    rows = [line.split("│")[1].strip() for line in ended.stdout.splitlines() if "│" in line]
    assert rows == ["weak"]
    assert f"\n{file}, line 2: the id 'weak' is used twice\n" in ended.stdout
    file.write_text("no task")
    ended = CliRunner().invoke(rolltap, ["tasks", "check", str(file)])
    assert str(ended.exception).startswith(f"{file}, line 1: Invalid JSON")


def test_a_task_that_cannot_be_tried_is_a_finding_and_the_others_are_tried(check):
    ended = check(missing=["no-such-program"], strong=["test", "-e", "answer.txt"])
    assert ended.exit_code == 1
    assert (
        "missing: the untouched start could not be judged: the judge 'no-such-program'"
        in ended.stdout
    )
