import pytest
from mitmproxy import options
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import HTTPMode
from mitmproxy.test.tflow import tclient_conn

from rolltap.addons.wire.protocol import BURST, Bucket, Frames, Http


def test_an_error_in_a_layer_closes_its_connection_and_is_reported(monkeypatch):
    context, reports = Context(tclient_conn(), options.Options()), []
    http = Http(context, HTTPMode.regular, lambda *report: reports.append(report))
    received = events.DataReceived(context.client, b"GET http://a.example/ HTTP/1.1\r\n\r\n")

    def fail(*arguments):
        raise AssertionError("a state that cannot be")

    assert list(http.handle_event(events.Start())) == []
    monkeypatch.setattr(http, "make_stream", fail)
    sent = [command for command in http.handle_event(received) if not isinstance(command, commands.Log)]
    assert [type(command) for command in sent] == [commands.CloseConnection]
    ((client, _, reason),) = reports
    assert (client, reason) == (
        context.client,
        "an error in mitmproxy's layers: AssertionError('a state that cannot be')",
    )
    assert list(http.handle_event(received)) == []


PING = b"\x89\x80mask"


def frame(length):
    if length < 126:
        size = bytes([128 | length])
    else:
        size = b"\xfe" + length.to_bytes(2) if length < 1 << 16 else b"\xff" + length.to_bytes(8)
    return b"\x82" + size + b"mask" + bytes(length)


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_frames_are_counted_wherever_a_read_ends(step):
    data = b"".join(map(frame, (0, 1, 125, 126, 65_535, 65_536, 0)))
    frames = Frames()
    assert sum(frames._count(data[i : i + step]) for i in range(0, len(data), step)) == 7


def test_a_flood_of_small_frames_is_refused():
    assert Frames().accept(PING * BURST)
    assert not Frames().accept(PING * (BURST * 2))


def test_a_long_message_in_many_frames_is_no_flood():
    frames = Frames()
    assert all(frames.accept(frame(4000)) for _ in range(4 * BURST))


def test_a_burst_is_free_and_what_goes_on_is_bounded_by_a_rate(monkeypatch):
    now = 100.0
    monkeypatch.setattr("rolltap.addons.wire.protocol.time.monotonic", lambda: now)
    bucket = Bucket(10, 2)
    assert [bucket.take() for _ in range(11)] == [True] * 10 + [False]
    now = 101.0
    assert [bucket.take(), bucket.take(2), bucket.take(), bucket.take()] == [True, False, True, False]
    now = 1000.0
    assert not bucket.take(11)
    assert bucket.take(10)
