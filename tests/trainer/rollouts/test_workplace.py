import os
import signal
import subprocess
import sys
import tempfile

import pytest

from rolltap.trainer.rollouts.mitmdump import workplace

HOLD = """
from rolltap.trainer.rollouts.mitmdump import workplace
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


def nested(folder, depth):
    """Make a folder with so many folders in one another: the path of the innermost is longer than paths can be."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("n", dir_fd=here)
        below = os.open("n", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_folders_that_an_agent_nested_a_thousand_times_keep_nothing_from_starting(tmp_path, caplog):
    left = tmp_path / "rolltap-work-left"
    left.mkdir()
    nested(left, 1500)
    with workplace() as folder:
        assert list(tmp_path.iterdir()) == [folder]
        nested(folder, 1500)
    assert list(tmp_path.iterdir()) == []
    assert not caplog.messages
