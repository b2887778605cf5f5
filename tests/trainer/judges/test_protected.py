import pytest

from rolltap.trainer.judges.protected import ambiguous, own_files
from rolltap.trainer.tasks.task import Task
from tests.trainer.judges.sessions import write

START = [
    *(
        "check.py",
        "tools/check.py",
        "run/check.sh",
        "my check.py",
        "check/__main__.py",
        "bin/go",
        "calc.py",
        "notes.txt",
    ),
    *("pkg/data.json", "Makefile", "tests/test_old.py", "tests/data.json", "test/add.mjs"),
]
BY_NAME = {"Makefile", "tests/test_old.py", "tests/data.json", "test/add.mjs"}


def own(tmp_path, command, **fields):
    write(tmp_path, dict.fromkeys(START, ""))
    judge = {"kind": "command", "command": command, **fields}
    task = Task.model_validate({"id": "t", "instruction": "Mend notes.txt", "judge": judge})
    found = own_files(tmp_path, task.effective_judge)
    assert found >= BY_NAME
    return found - BY_NAME, ambiguous(START, task, task.effective_judge)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["python", "check.py"], {"check.py", "tools/check.py"}),
        (["/usr/bin/python3.11", "-B", "./tools/check.py"], {"check.py", "tools/check.py"}),
        (["./run/check.sh", "a"], {"run/check.sh"}),
        (["env", "A=b", "bash", "-c", "true&&. run/check.sh"], {"run/check.sh"}),
        (["sh", "-c", "cd run; x=check.sh; sh <$x"], {"run/check.sh"}),
        (
            ["sh", "-c", "python './my check.py'; true"],
            {"my check.py", "check.py", "tools/check.py"},
        ),
        (["sh", "-c", "it's broken; exec python<check.py"], {"check.py", "tools/check.py"}),
        (["nice", "timeout", "9", "/workspace/bin/go"], {"bin/go"}),
        (["python", "-m", "tools.check"], {"tools/check.py"}),
        (["python", "-B", "-mcheck"], {"check.py", "check/__main__.py"}),
        (["sh", "-c", "diff data.json pkg/data.json"], {"pkg/data.json"}),
        (["go", "build", "-o", "x", "check.python", "recheck.py", "check.py.orig"], set()),
    ],
)
def test_files_that_a_command_names_are_the_judges(tmp_path, command, named):
    assert own(tmp_path, command) == (named, [])


def test_what_paths_match_is_never_the_judges_and_what_files_match_is(tmp_path):
    assert own(tmp_path, ["python", "check.py"], paths=["check.py"])[0] == {"tools/check.py"}
    assert own(tmp_path, ["true"], files=["pkg/**", "*.txt"])[0] == {"pkg/data.json", "notes.txt"}


def test_a_file_that_the_command_and_the_instruction_name_is_ambiguous_without_paths(tmp_path):
    assert own(tmp_path, ["grep", "-q", "new", "notes.txt"]) == ({"notes.txt"}, ["notes.txt"])
    assert own(tmp_path, ["grep", "-q", "new", "notes.txt"], paths=["*.txt"]) == (set(), [])
