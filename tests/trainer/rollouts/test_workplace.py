import os
import signal
import subprocess
import sys
import tempfile

import pytest

from rolltap.trainer.rollouts.workplace import remove_tree, workplace

HOLD = """
from rolltap.trainer.rollouts.workplace import workplace
with workplace() as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_it_is_removed_at_the_end_and_what_a_killed_process_left_at_the_next_start(tmp_path):
    hold = [sys.executable, "-c", HOLD]
    with subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        left = other.stdout.readline().strip()
        with workplace():
            assert os.path.exists(left)  # of a process that runs
        other.send_signal(signal.SIGKILL)
        other.wait()
    with workplace() as folder:
        assert [str(path) for path in tmp_path.iterdir()] == [str(folder)]
    assert list(tmp_path.iterdir()) == []


def test_folders_that_an_agent_made_unreadable_and_links_out_of_them_are_removed_and_nothing_else(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = tmp_path / "tree"
    (tree / "closed" / "inner").mkdir(parents=True)
    (tree / "closed" / "inner" / "file").touch()
    (tree / "closed" / "link").symlink_to(outside)
    (tree / "closed" / "inner").chmod(0)
    (tree / "closed").chmod(0)
    remove_tree(tree)
    assert not tree.exists()
    assert (outside / "kept").exists()
