"""The locks of a run folder, and the folder for temporary files."""

import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from rolltap.addons.errors import RunError
from rolltap.trainer import locks
from rolltap.trainer.locks import rollout_lock, workplace
from tests.boxes import wait_until_dead
from tests.trainer.judges.sessions import nest

LOCK = """
import pathlib, sys
from rolltap.trainer.locks import rollout_lock
with rollout_lock(pathlib.Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


def test_a_second_rollout_into_a_folder_is_refused_until_the_first_has_ended_or_died(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-c", LOCK, run]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    refused = pytest.raises(RunError, match=f"another rollout or training runs sessions in {run}")
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()
        with refused, rollout_lock(run):
            pass
        other.kill()
        other.wait()
    for _ in range(2):
        with rollout_lock(run):
            pass


KILLED = """
import sys
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.worker import Worker
config = RolloutConfig(recorders=2, runtime="process")
how = {"engine": "http://127.0.0.1:9", "model": sys.argv[1], "out": "run"}
with Worker(config, harness="pi", **how) as worker:
    for process in worker.recorder._processes:
        print(process.pid, process._process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def left(tmp_path, tokenizer_folder):
    """Return the process ids of two recorders that the killed process of a run has left."""
    command = [sys.executable, "-c", KILLED, str(tokenizer_folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "HOME": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as rolltap:
        recorders = []
        for _ in range(2):
            recorder, supervisor = map(int, rolltap.stdout.readline().split())
            os.kill(supervisor, signal.SIGSTOP)  # it would end the recorder at a time of its own
            recorders.append((recorder, supervisor))
        rolltap.kill()
    yield [recorder for recorder, _ in recorders]
    for _, supervisor in recorders:  # the recorder is killed with it
        os.kill(supervisor, signal.SIGKILL)


def test_a_start_waits_until_all_recorders_of_a_killed_process_have_ended(
    tmp_path, left, caplog, monkeypatch
):
    run = tmp_path / "run"
    still = f"the recorder of a killed rollout or training still records into {run}"
    refused = pytest.raises(RunError, match=f"{still}: start again when its mitmdump has ended")
    with refused, rollout_lock(run, lambda: True):  # the start is stopped
        pass
    with monkeypatch.context() as patched:
        patched.setattr(locks, "LEFT_SECONDS", 0.0)
        with refused, rollout_lock(run):
            pass
    entered = threading.Event()
    monkeypatch.setattr(locks, "LEFT_SECONDS", 3600.0)

    def start():
        with rollout_lock(run):
            entered.set()

    waiting = threading.Thread(target=start)
    waiting.start()
    while still not in caplog.text:
        assert not entered.wait(0.01)
    os.kill(left[0], signal.SIGKILL)
    assert wait_until_dead(left[0])
    with pytest.raises(RunError, match="another rollout or training runs"), rollout_lock(run):
        pass
    assert not entered.is_set()
    os.kill(left[1], signal.SIGKILL)
    waiting.join()
    assert entered.is_set()


HOLD = """
from rolltap.trainer.locks import workplace
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


def test_a_new_folder_that_another_start_removes_as_a_left_one_is_made_again(tmp_path, monkeypatch):
    made = []
    make = tempfile.mkdtemp

    def make_and_lose_the_first(**how):
        made.append(make(**how))
        if len(made) == 1:
            os.rmdir(made[0])  # before it is locked
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose_the_first)
    with workplace() as folder:
        assert [str(path) for path in tmp_path.iterdir()] == [str(folder)] == made[1:]


def test_folders_that_an_agent_nested_a_thousand_times_keep_nothing_from_starting(tmp_path, caplog):
    left = tmp_path / "rolltap-work-left"
    left.mkdir()
    nest(left, 1500)
    with workplace() as folder:
        assert list(tmp_path.iterdir()) == [folder]
        nest(folder, 1500)
    assert list(tmp_path.iterdir()) == []
    assert not caplog.messages
