"""The process of the recorder, the lock of a run folder, and the folder for temporary files."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import pytest

from rolltap.addons.errors import RecorderError, RunError
from rolltap.trainer import locks
from rolltap.trainer.locks import rollout_lock, workplace
from rolltap.trainer.rollouts import mitmdump
from rolltap.trainer.rollouts.mitmdump import Mitmdump, reasons
from tests.boxes import wait_until_dead
from tests.trainer.judges.sessions import nest

ROLLTAP = """
import os, sys
from rolltap.trainer.rollouts.recorder import Recorder
with Recorder("run", engine="http://127.0.0.1:9", model=sys.argv[1], options={"confdir": "conf"}) as recorder:
    process = recorder._processes[0]
    print(process.pid, process._process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_recorder_ends_with_rolltap_however_that_ends(tmp_path, tokenizer_folder, number):
    command = [sys.executable, "-c", ROLLTAP, str(tokenizer_folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as rolltap:
        recorder, supervisor = map(int, rolltap.stdout.readline().split())
        rolltap.send_signal(number)
        rolltap.stdin.close()  # a signal just before the read does not interrupt it
        assert wait_until_dead(recorder)
        assert wait_until_dead(supervisor)


@pytest.fixture
def process(tmp_path, tokenizer_folder):
    """Return a recorder that accepts calls."""
    options = {name: [str(tmp_path / "run")] for name in ("rolltap_out", "confdir")}
    options |= {"rolltap_engine": ["http://127.0.0.1:9"], "rolltap_model": [str(tokenizer_folder)]}
    process = Mitmdump("the recorder", options, secret="s" * 32, log=tmp_path / "log")
    process.address()
    yield process
    process.stop()


def ask(port):
    """Return the first line of the recorder's answer to a request without credentials."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n")
        return client.makefile("rb").readline()


def is_open(port):
    """Return False when the socket is closed: a connection that waits to be accepted then is
    reset."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    return True


def test_a_recorder_whose_supervisor_is_killed_is_an_error(process):
    os.kill(process._process.pid, signal.SIGKILL)
    assert wait_until_dead(process.pid)
    process.stop()
    with pytest.raises(RecorderError, match="the recorder died with status -9"):
        process.check()


def test_a_recorder_accepts_at_the_socket_of_a_box_until_the_box_ends(process):
    first = socket.create_server(("127.0.0.1", 0))
    second = socket.create_server(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in (first, second)]
    with process.accept(second):
        with process.accept(first):
            first.close()
            second.close()
            for port in (*ports, *ports):
                assert ask(port).split()[1] == b"407"
        while is_open(ports[0]):  # until the recorder has closed the socket
            pass
        assert ask(ports[1]).split()[1] == b"407"


def test_a_recorder_that_has_ended_accepts_nothing(process):
    process.stop()
    ended = pytest.raises(OSError, match="Bad file descriptor")
    with socket.create_server(("127.0.0.1", 0)) as listener, ended, process.accept(listener):
        pass


def test_a_program_that_cannot_be_started_is_an_os_error(tmp_path, monkeypatch):
    monkeypatch.setattr(mitmdump, "program", lambda: str(tmp_path))
    with pytest.raises(PermissionError):
        Mitmdump("the recorder", {}, secret="s", log=tmp_path / "log")


LOADING = "[10:00:00.000] Loading script record.py\n"
ENDING = "[10:00:01.000] HTTP(S) proxy listening at 127.0.0.1:1.\nError logged during startup\n"
UNSET = f"{LOADING}[10:00:00.100] error: rolltap_out is not set\n{ENDING}"
THREE = f"{LOADING}[10:00:00.1] error: one\nerror: two\n[10:00:00.2][127.0.0.1:5] error: 3\n"
TWICE = "[10:00:00.100] error: one\n[10:00:00.200] error: one\n"
SAID = "[10:00:00.100] a harness says error: one"
LONG = [str(number) for number in range(20)]


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (UNSET, "rolltap_out is not set"),
        (THREE, "one\ntwo\n3"),
        (TWICE, "one"),
        (SAID, SAID),
        ("\n".join(LONG), "\n".join(LONG[12:])),
        ("", ""),
    ],
    ids=["an error", "several", "one twice", "of a harness", "none", "nothing"],
)
def test_a_recorder_that_did_not_start_shows_its_errors_or_its_last_lines(log, shown):
    assert reasons(log) == shown


def test_a_recorder_that_does_not_start_shows_nothing_of_an_earlier_one(tmp_path):
    log = tmp_path / "recorder.log"
    log.write_text("[10:00:00.100] error: of an earlier recorder\n")
    options = {
        "rolltap_samplin": ["{}"],
        "rolltap_patience": ["soon"],
        "confdir": [str(tmp_path / "conf")],
    }
    process = Mitmdump("the recorder", options, secret="s" * 32, log=log)
    with pytest.raises(RecorderError) as refused:
        process.address()
    process.stop()
    first, second, third = str(refused.value).splitlines()
    assert first.startswith("the recorder did not start: rolltap_patience is 'soon': ")
    assert second.startswith("rolltap_samplin is no option of the recorder: did you mean")
    assert third == f"Its log is {log}"


LOCK = """
import pathlib, sys
from rolltap.trainer.rollouts.mitmdump import rollout_lock
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
    monkeypatch.setattr(mitmdump, "LEFT_SECONDS", 3600.0)

    def start():
        with rollout_lock(run):
            entered.set()

    waiting = threading.Thread(target=start)
    waiting.start()
    while still not in caplog.text:
        assert not entered.is_set()
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
