"""Agents ask for more than the recorder has file descriptors for."""

import os
import re
import socket
from contextlib import ExitStack

import pytest

from rolltap.addons.proxy.limits import _RESERVE
from rolltap.trainer.boxes.environment import SESSION_END
from tests.recorder_process import CHAT, HELLO
from tests.scripted_engine import Say
from tests.security.raw import (
    address,
    call,
    credentials,
    listening,
    plain,
    read_head,
    request,
    tunnel,
)

LIMIT = 320


@pytest.fixture
def recorder(start, scripted_engine):
    """Yield a recorder that may open few files. Its engine says `Hi.`, or, held, half a reply."""
    scripted_engine.otherwise = lambda body: Say("Hi.")
    return start("rolltap_allow=127.0.0.3:*", command=["prlimit", f"--nofile=64:{LIMIT}"])


@pytest.fixture
def held(scripted_engine):
    """Return a function that makes the engine say half a reply."""

    def held():
        scripted_engine.otherwise = lambda body: Say("one two three", hold_after=1)

    return held


@pytest.fixture
def ask(recorder):
    """Return a function that returns the status of a request, and keeps its connection."""
    with ExitStack() as stack:

        def ask(sent, receive_buffer=65536):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.settimeout(120)
            connection.connect(address(recorder))
            connection.sendall(sent)
            return read_head(connection).split()[1]

        yield ask


def room_of(recorder):
    found = re.search(rf"room for (\d+) sessions .* {LIMIT} open files", recorder.log())
    return int(found[1])


def test_silent_connections_make_room_for_a_call(recorder):
    with ExitStack() as stack:
        for _ in range(LIMIT):
            stack.enter_context(plain(recorder))
        with plain(recorder) as connection:
            connection.sendall(call())
            assert read_head(connection).startswith(b"HTTP/1.1 200")
    assert recorder.stop() == 0
    details = {event["detail"] for event in recorder.rows("events") if event["kind"] == "refused"}
    assert any(detail.endswith("closed to make room for others") for detail in details)


def test_a_session_that_fills_the_recorder_locks_nobody_out_and_cannot_cause_a_fault(
    recorder, scripted_engine, held, ask
):
    with recorder.client("greedy") as greedy:
        assert greedy.post(CHAT, json=HELLO).status_code == 200
    held()
    with ExitStack() as stack:
        for i in range(LIMIT // 6):  # as many running calls as half-sent ones, more than fit
            running = call(f"Question {i}", "greedy", stream=True)
            assert ask(running) in (b"200", b"429")
            half = stack.enter_context(tunnel(recorder, "api.openai.com:80", user="greedy"))
            half.sendall(call()[:-1])
        assert ask(call(user="greedy")) == b"429"
        scripted_engine.otherwise = lambda body: Say("Hi.")
        for i in range(LIMIT // 12):
            assert ask(call(user=f"s{i}")) == b"200"
        with recorder.client("greedy") as greedy:
            assert greedy.post(SESSION_END).status_code == 200
        scripted_engine.release()
    assert recorder.stop() == 0
    events = recorder.rows("events")
    assert {event["session_id"] for event in events if event["kind"] == "rejected"} == {"greedy"}
    assert not [event for event in events if event["kind"] == "fault"]


def test_replies_that_nobody_reads_take_no_room_of_others(recorder, scripted_engine, held, ask):
    room = room_of(recorder)
    share = room // 4
    size = 1 << 23  # more than fits into the buffers of a connection
    large = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
    held()
    with listening("127.0.0.3", answer=large) as server:
        unread = request(f"http://{server.name}/", more=credentials("greedy"))
        asked = [ask(unread, 1) for _ in range(room)]
        assert asked == [b"200"] * share + [b"429"] * (room - share)
        for i in range(room - share):
            assert ask(call(user=f"s{i}", stream=True)) == b"200"
        assert len(os.listdir(f"/proc/{recorder.process.pid}/fd")) <= LIMIT - _RESERVE
        scripted_engine.release()


def test_calls_that_do_not_fit_are_refused_and_the_others_go_on(recorder, scripted_engine, held):
    room = room_of(recorder)
    assert 20 < room < LIMIT / 4
    held()
    served = {}
    refused = closed = 0
    with ExitStack() as stack:
        for i in range(LIMIT):
            connection = stack.enter_context(plain(recorder))
            connection.sendall(call(user=f"s{i}", stream=True))
            head = read_head(connection)
            if head.startswith(b"HTTP/1.1 200"):
                served[f"s{i}"] = connection
            elif head == b"":
                closed += 1
            else:
                assert head.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 5" in head
                refused += 1
        assert room * 0.8 < len(served) <= room
        assert len(served) + refused + closed == LIMIT
        scripted_engine.release()
        for user, connection in served.items():
            events = b""
            while not events.endswith(b"\r\n0\r\n\r\n"):
                events += connection.recv(65536)
            connection.sendall(call("More", user))
            assert read_head(connection).startswith(b"HTTP/1.1 200")
    assert recorder.stop() == 0
    log = recorder.log()
    assert log.count("\n") < 3 * LIMIT
    assert "Traceback" not in log
    assert "Too many open files" not in log
    assert len(recorder.rows("calls")) == 2 * len(served)
    assert {"fault", "refused"} <= {event["kind"] for event in recorder.rows("events")}
