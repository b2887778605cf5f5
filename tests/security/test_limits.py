"""Agents ask for more than the recorder has file descriptors for."""

import os
import re
import socket
from contextlib import ExitStack

from rolltap.addons.proxy.limits import _RESERVE
from rolltap.trainer.boxes.environment import SESSION_END
from tests.recorder_process import CHAT, HELLO
from tests.scripted_engine import Say
from tests.security.raw import address, call, credentials, listening, plain, read_head, tunnel

LIMIT = 320


def test_silent_connections_make_room_for_a_call(start, scripted_engine):
    recorder = start(command=["prlimit", f"--nofile=64:{LIMIT}"])
    scripted_engine.otherwise = lambda body: Say("Hi.")
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
    start, scripted_engine
):
    recorder = start(command=["prlimit", f"--nofile=64:{LIMIT}"])
    scripted_engine.otherwise = lambda body: Say("Hi.")
    with recorder.client("greedy") as client:
        assert client.post(CHAT, json=HELLO).status_code == 200
    scripted_engine.otherwise = lambda body: Say("one two three", hold_after=1)
    with ExitStack() as stack:

        def ask(user, **fields):
            connection = stack.enter_context(plain(recorder))
            connection.sendall(call(user=user, **fields))
            return read_head(connection).split()[1]

        for i in range(LIMIT // 6):  # as many running calls as half-sent ones, more than fit
            assert ask("greedy", text=f"Question {i}", stream=True) in (b"200", b"429")
            half = stack.enter_context(tunnel(recorder, "api.openai.com:80", user="greedy"))
            half.sendall(call()[:-1])
        assert ask("greedy") == b"429"
        scripted_engine.otherwise = lambda body: Say("Hi.")
        assert {ask(f"s{i}") for i in range(LIMIT // 12)} == {b"200"}
        with recorder.client("greedy") as client:
            assert client.post(SESSION_END).status_code == 200
        scripted_engine.release()
    assert recorder.stop() == 0
    events = recorder.rows("events")
    assert {event["session_id"] for event in events if event["kind"] == "rejected"} == {"greedy"}
    assert not [event for event in events if event["kind"] == "fault"]


def test_replies_that_nobody_reads_take_no_room_of_others(start, scripted_engine):
    recorder = start("rolltap_allow=127.0.0.3:*", command=["prlimit", f"--nofile=64:{LIMIT}"])
    room = int(re.search(r"room for (\d+) sessions", recorder.log())[1])
    size = 1 << 23  # more than fits into the buffers of a connection
    scripted_engine.otherwise = lambda body: Say("one two three", hold_after=1)
    with ExitStack() as stack:

        def ask(request, receive_buffer):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.connect(address(recorder))
            connection.sendall(request)
            return read_head(connection).split()[1]

        large = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
        server = stack.enter_context(listening("127.0.0.3", answer=large))
        host = f"{server.host}:{server.port}"
        unread = (
            f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n".encode()
            + credentials("greedy")
            + b"\r\n"
        )
        asked = [ask(unread, 1) for _ in range(room)]
        share = room // 4
        assert asked == [b"200"] * share + [b"429"] * (room - share)
        others = [ask(call(user=f"s{i}", stream=True), 65536) for i in range(room - share)]
        assert others == [b"200"] * (room - share)
        assert len(os.listdir(f"/proc/{recorder.process.pid}/fd")) <= LIMIT - _RESERVE
        scripted_engine.release()


def test_calls_that_do_not_fit_are_refused_and_the_others_go_on(start, scripted_engine):
    recorder = start(command=["prlimit", f"--nofile=64:{LIMIT}"])
    room = int(re.search(rf"room for (\d+) sessions .* {LIMIT} open files", recorder.log())[1])
    assert 20 < room < LIMIT / 4
    scripted_engine.otherwise = lambda body: Say("one two three", hold_after=1)
    with ExitStack() as stack:
        heads, users = {}, {}
        for i in range(LIMIT):
            connection = stack.enter_context(plain(recorder))
            connection.sendall(call(user=f"s{i}", stream=True))
            heads[connection], users[connection] = read_head(connection), f"s{i}"
        served = [
            connection for connection, head in heads.items() if head.startswith(b"HTTP/1.1 200")
        ]
        refused = [head for head in heads.values() if head.startswith(b"HTTP/1.1 503")]
        closed = [head for head in heads.values() if head == b""]
        assert room * 0.8 < len(served) <= room
        assert all(b"retry-after: 5" in head for head in refused)
        assert len(served) + len(refused) + len(closed) == LIMIT
        scripted_engine.release()
        for connection in served:
            events = b""
            while not events.endswith(b"\r\n0\r\n\r\n"):
                events += connection.recv(65536)
            connection.sendall(call("More", users[connection]))
            assert read_head(connection).startswith(b"HTTP/1.1 200")
    assert recorder.stop() == 0
    log = recorder.log()
    assert log.count("\n") < 3 * LIMIT
    assert "Traceback" not in log
    assert "Too many open files" not in log
    assert len(recorder.rows("calls")) == 2 * len(served)
    told = [event["kind"] for event in recorder.rows("events")]
    assert min(told.count("fault"), told.count("refused")) > 0
