import pytest

from rolltap.trainer.rollouts.judges.protected import is_script, judges_files, pytest_command, runs_pytest
from rolltap.trainer.tasks.task import CommandJudge


@pytest.mark.parametrize(
    ("command", "path"),
    [
        (["python", "check.py"], "check.py"),
        (["/usr/bin/python3.11", "-B", "./check.py", "calc.py"], "check.py"),
        (["./run/check.sh", "a"], "run/check.sh"),
        (["/workspace/check"], "check"),
        (["env", "A=b", "bash", "check.sh"], "check.sh"),
        (["sh", "-c", "cd . && python './my check.py'; true"], "my check.py"),
        (["sh", "-c", "test -e calc.py && ./check calc.py"], "check"),
        (["sh", "-c", "it's broken; python check.py"], "check.py"),
        (["python", "-m", "tools.check"], "tools/check.py"),
        (["python", "-m", "check"], "check/__main__.py"),
    ],
)
def test_a_script_that_a_command_starts_is_found(command, path):
    assert is_script(path, command, "/workspace")
    assert not is_script("calc.py", command, "/workspace")


def test_a_file_that_a_command_reads_is_the_agents():
    for script in ("grep -q new notes.txt", "python check.py notes.txt"):
        assert not is_script("notes.txt", script.split(), "/workspace")
    for script in ("diff notes.txt -", 'test "$(python3 notes.txt)" = 4'):
        assert not is_script("notes.txt", ["sh", "-c", script], "/workspace")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["python", "-m", "pytest"], ["python", "-m", "pytest"]),
        (["env", "A=b", "python", "-B", "-m", "pytest", "-q"], ["env", "A=b", "python", "-B", "-m", "pytest", "-q"]),
        (["/usr/bin/pytest-3", "tests"], ["/usr/bin/pytest-3", "tests"]),
        (["sh", "-c", "python -m pytest -q 'my tests'"], ["python", "-m", "pytest", "-q", "my tests"]),
        (["sh", "-c", "cd src && pytest"], None),
        (["pytest", "--junitxml=a"], None),
        (["python", "-m", "unittest"], None),
        (["bash", "-c", ""], None),
    ],
)
def test_a_command_that_is_pytest_itself_is_found(command, words):
    assert pytest_command(command) == words
    assert runs_pytest(["sh", "-c", "cd src && exec python -m pytest"])
    assert not runs_pytest(["sh", "-c", "python test_it.py"])


JUDGES = {
    "without tests of its own": (CommandJudge(command=["./run.sh"]), ["run.sh", "tests/laid.py", "tests/test_old.py"]),
    "with tests": (CommandJudge(command=["./run.sh"], mounts={"/t": "elsewhere"}), ["run.sh", "tests/laid.py"]),
    "of named changes": (CommandJudge(command=["true"], paths=["tests"]), ["tests/laid.py"]),
}


@pytest.mark.parametrize(("judge", "own"), JUDGES.values(), ids=JUDGES)
def test_the_tests_of_the_start_are_the_judges_unless_it_brings_tests(tmp_path, judge, own):
    start, workspace = tmp_path / "start", tmp_path / "workspace"
    for folder, names in (
        (start, ["run.sh", "code.py", "tests/test_old.py"]),
        (workspace, ["run.sh", "code.py", "tests/test_old.py", "tests/laid.py", "tests/test_of_the_agent.py"]),
    ):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    assert sorted(judges_files(start, workspace, judge, ["tests/laid.py"], "/app")) == own
