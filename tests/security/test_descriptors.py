"""More programs ask at the same time than the recorder has file descriptors for."""

import re
from contextlib import ExitStack

from rolltap.trainer.doctor.scripted_engine import Say
from tests.security.raw import call, plain, read_head

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


def test_calls_that_do_not_fit_are_refused_and_the_others_go_on(start, scripted_engine):
    recorder = start(command=["prlimit", f"--nofile=64:{LIMIT}"])
    room = int(re.search(rf"room for (\d+) sessions .* {LIMIT} open files", recorder.log())[1])
    assert 20 < room < LIMIT / 4
    scripted_engine.otherwise = lambda body: Say("one two three", hold_after=1)
    with ExitStack() as stack:
        heads = {}
        for i in range(LIMIT):
            connection = stack.enter_context(plain(recorder))
            connection.sendall(call(f"Hello {i}", stream=True))
            heads[connection] = read_head(connection)
        served = [connection for connection, head in heads.items() if head.startswith(b"HTTP/1.1 200")]
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
            connection.sendall(call("More"))
            assert read_head(connection).startswith(b"HTTP/1.1 200")
    assert recorder.stop() == 0
    log = recorder.log()
    assert log.count("\n") < 200
    assert "Traceback" not in log
    assert "Too many open files" not in log
    assert len(recorder.rows("calls")) == 2 * len(served)
    told = [event["kind"] for event in recorder.rows("events")]
    assert min(told.count("fault"), told.count("refused")) > 0
