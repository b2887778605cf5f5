import pytest

from rolltap.trainer.judges.protected import ambiguous, own_files
from rolltap.trainer.tasks.task import Task
from tests.trainer.judges.sessions import command, shell, write

BY_NAME = {"Makefile", "tests/test_old.py", "tests/data.json", "test/add.mjs"}
OTHERS = """check.py
tools/check.py
run/check.sh
my check.py
check/__main__.py
bin/go
calc.py
notes.txt
pkg/data.json""".splitlines()


@pytest.fixture
def own(tmp_path):
    """Return a function of a judge that returns its own files, other than those that have a name of
    tests, and those that are ambiguous."""
    start = [*OTHERS, *BY_NAME]
    write(tmp_path, dict.fromkeys(start, ""))

    def own(judge):
        task = Task(id="t", instruction="Mend notes.txt", judge=judge)
        found = own_files(tmp_path, task.judge)
        assert found >= BY_NAME
        return found - BY_NAME, ambiguous(start, task, task.judge)

    return own


CHECKS = {"check.py", "tools/check.py"}
NAMED = [
    (command("python", "check.py"), CHECKS),
    (command("/usr/bin/python3.11", "-B", "./tools/check.py"), CHECKS),
    (command("./run/check.sh", "a"), {"run/check.sh"}),
    (command("env", "A=b", "bash", "-c", "true&&. run/check.sh"), {"run/check.sh"}),
    (shell("cd run; x=check.sh; sh <$x"), {"run/check.sh"}),
    (shell("python './my check.py'; true"), {"my check.py", *CHECKS}),
    (shell("it's broken; exec python<check.py"), CHECKS),
    (command("nice", "timeout", "9", "/workspace/bin/go"), {"bin/go"}),
    (command("python", "-m", "tools.check"), {"tools/check.py"}),
    (command("python", "-B", "-mcheck"), {"check.py", "check/__main__.py"}),
    (shell("diff data.json pkg/data.json"), {"pkg/data.json"}),
    (command("go", "build", "-o", "x", "check.python", "recheck.py", "check.py.orig"), set()),
    (command("python", "check.py", paths=["check.py"]), {"tools/check.py"}),
    (command("true", files=["pkg/**", "*.txt"]), {"pkg/data.json", "notes.txt"}),
]


@pytest.mark.parametrize(("judge", "named"), NAMED)
def test_files_that_a_command_or_files_name_are_the_judges_and_those_of_paths_are_not(
    own, judge, named
):
    assert own(judge)[0] == named


def test_a_file_that_the_command_and_the_instruction_name_is_ambiguous_without_paths(own):
    judge = command("grep", "-q", "new", "notes.txt")
    assert own(judge) == ({"notes.txt"}, ["notes.txt"])
    assert own({**judge, "paths": ["*.txt"]}) == (set(), [])
