"""`rolltap tasks check`."""

import json

import pytest
from click.testing import CliRunner

from rolltap.trainer.checks import trial
from rolltap.trainer.checks.cheats import CHEATS
from rolltap.trainer.cli.main import rolltap

EXIT = "an exit with status 0 at the import"
CHECK = "import calc\nraise SystemExit(calc.add(2, 2) != 4)\n"


STRONG = ["test", "-e", "answer.txt"]


def run_check(tasks, *options):
    return CliRunner().invoke(rolltap, ["tasks", "check", str(tasks), *options])


def first_cells(table):
    return [line.split("│")[1].strip() for line in table.splitlines() if "│" in line]


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that runs the command on tasks whose judges are these commands, with one
    cheat."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "CHEATS", [cheat for cheat in CHEATS if cheat.name == EXIT])
    start = tmp_path / "start"
    start.mkdir()
    (start / "calc.py").write_text("def add(a, b):\n    return a - b\n" + "# more\n" * 40)
    (start / "check.py").write_text(CHECK)

    def check(*options, **judges):
        with (tmp_path / "tasks.jsonl").open("w") as tasks:
            for name, judge in judges.items():
                task = {"instruction": "Mend it.", "workspace": "start", "evaluate": judge}
                tasks.write(json.dumps({"id": name, **task}) + "\n")
        return run_check(tasks.name, *options)

    return check


def test_a_weak_task_is_in_the_table_with_the_cheat_its_diff_and_what_to_do(check):
    ended = check(weak=["python", "check.py"], strong=STRONG)
    assert ended.exit_code == 1, ended.output
    table = ended.stdout.replace(" ", "")
    assert "│weak│0│none│1│1│" in table
    assert "│strong│0│none│1│0│" in table
    words = f"weak: the cheat '{EXIT}' earns 1, and the untouched start 0\n"
    assert f"{words}    --- a/calc.py\n    +++ b/calc.py\n" in ended.stdout
    assert "\n  To mend it: run the agent's code as a child process" in ended.stdout


def test_strong_tasks_have_the_exit_status_0_and_json_has_all(check):
    ended = check("--json", "--concurrency", "2", strong=STRONG)
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout) == [
        {
            "passed": True,
            "task": "strong",
            "start": 0.0,
            "solution": None,
            "tried": [EXIT],
            "weaknesses": [],
            "reachable": [],
            "wrong": [],
        }
    ]


def test_the_build_of_images_is_an_option_that_needs_a_runtime_with_images(check):
    ended = check("--build", strong=["true"])
    assert "build = True has no meaning with runtime" in str(ended.exception)


def test_a_line_that_is_no_task_is_told_by_its_line_and_has_no_row(check, tmp_path):
    check(weak=["true"])
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(tasks.read_text() * 2)
    ended = run_check(tasks)
    assert ended.exit_code == 1
    assert first_cells(ended.stdout) == ["weak"]
    assert f"\n{tasks}, line 2: the id 'weak' is used twice\n" in ended.stdout
    tasks.write_text("no task")
    assert str(run_check(tasks).exception).startswith(f"{tasks}, line 1: Invalid JSON")


def test_a_task_that_cannot_be_tried_is_a_finding_and_the_others_are_tried(check):
    ended = check(missing=["no-such-program"], strong=STRONG)
    assert ended.exit_code == 1
    why = "missing: the untouched start could not be judged: the judge 'no-such-program'"
    assert why in ended.stdout
