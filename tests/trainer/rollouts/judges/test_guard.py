"""Which files of a workspace are the judge's own."""

import pytest

from rolltap.trainer.rollouts.judges.protected import judges_files
from rolltap.trainer.tasks.task import CommandJudge

JUDGES = {
    "without tests of its own": (CommandJudge(command=["./run.sh"]), ["run.sh", "tests/laid.py", "tests/test_old.py"]),
    "with tests from outside": (
        CommandJudge(command=["./run.sh"], mounts={"/tests": "elsewhere"}),
        ["run.sh", "tests/laid.py"],
    ),
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
