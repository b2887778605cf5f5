"""The process of the recorder."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from rolltap.addons.errors import RecorderError
from rolltap.trainer.rollouts import mitmdump
from rolltap.trainer.rollouts.mitmdump import Mitmdump, reasons
from tests.boxes import wait_until_dead

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
