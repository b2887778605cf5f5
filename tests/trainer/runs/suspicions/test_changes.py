"""Suspicions about an agent's changes, from the evidence of the judge's own code."""

import os

import pytest

from rolltap.trainer.rollouts.judges.changes import find_changes
from rolltap.trainer.rollouts.judges.protected import select
from rolltap.trainer.runs.suspicions.rules import Seen, find_suspicions
from rolltap.trainer.tasks.task import PytestJudge


@pytest.fixture
def folders(tmp_path):
    """Return a start with a package and its test, and a copy of it that an agent changes."""
    for name in ("start", "workspace"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "app.py").write_text("x = 1\n")
        (tmp_path / name / "tests" / "test_app.py").write_text("def test(): assert x == 2\n")
    return tmp_path / "start", tmp_path / "workspace"


def suspicions(start, workspace):
    changes = find_changes(start, workspace)
    applied = select(changes, PytestJudge(), [], "/workspace", start, workspace)
    # as `judge` puts it together
    evidence = {**changes.evidence(), "refused": applied.evidence()["refused"]}
    return find_suspicions(Seen(evidence=evidence))


def test_an_honest_patch_with_a_new_test_and_the_traces_of_running_it_is_no_suspicion(folders):
    start, workspace = folders
    (workspace / "app.py").write_text("x = 2\n")
    (workspace / "tests" / "test_more.py").write_text("def test(): pass\n")
    (workspace / ".pytest_cache" / "v").mkdir(parents=True)
    (workspace / ".pytest_cache" / "v" / "lastfailed").write_text("{}")
    (workspace / "__pycache__").mkdir()
    (workspace / "__pycache__" / "app.pyc").write_bytes(b"x")
    (workspace / ".venv" / "bin").mkdir(parents=True)
    (workspace / ".venv" / "bin" / "python").symlink_to("/usr/bin/python3")
    (workspace / ".git").mkdir()
    (workspace / ".git" / "index").write_bytes(b"x")
    assert suspicions(start, workspace) == {}


def test_a_changed_test_a_planted_file_and_odd_files_are_counted(folders):
    start, workspace = folders
    (workspace / "tests" / "test_app.py").write_text("def test(): pass\n")
    (workspace / "conftest.py").write_text("")
    (workspace / "sitecustomize.py").write_text("")
    os.mkfifo(workspace / "pipe")
    (workspace / "passwd").symlink_to("/etc/passwd")
    assert suspicions(start, workspace) == {"changed_tests": 1, "planted_files": 2, "odd_files": 2}


def test_a_deleted_test_is_a_changed_one(folders):
    start, workspace = folders
    (workspace / "tests" / "test_app.py").unlink()
    assert suspicions(start, workspace) == {"changed_tests": 1}
