import h11
import pytest
from h11._receivebuffer import ReceiveBuffer
from hypothesis import given
from hypothesis import strategies as st
from mitmproxy import options
from mitmproxy.connection import ConnectionState, Server
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import HttpClient, HTTPMode, RegisterHttpConnection
from mitmproxy.proxy.layers.http._http1 import Http1Client
from mitmproxy.test.tflow import tclient_conn

from rolltap.addons.proxy.layers import CHUNK_BURST, Chunks, Http


def test_an_error_in_a_layer_closes_its_connection_and_is_reported(monkeypatch):
    context, reports = Context(tclient_conn(), options.Options()), []
    http = Http(context, HTTPMode.regular, lambda *report: reports.append(report), lambda _: False)
    received = events.DataReceived(context.client, b"GET http://a.example/ HTTP/1.1\r\n\r\n")

    def fail(*arguments):
        raise AssertionError("a state that cannot be")

    assert list(http.handle_event(events.Start())) == []
    monkeypatch.setattr(http, "make_stream", fail)
    sent = [
        command for command in http.handle_event(received) if not isinstance(command, commands.Log)
    ]
    assert [type(command) for command in sent] == [commands.CloseConnection]
    ((where, _, reason),) = reports
    assert (where, reason) == (
        context,
        "an error in mitmproxy's layers: AssertionError('a state that cannot be')",
    )
    assert list(http.handle_event(received)) == []


@pytest.mark.parametrize("ours", [True, False])
def test_what_our_own_endpoint_sends_is_not_counted(ours):
    context = Context(tclient_conn(), options.Options())
    http = Http(
        context,
        HTTPMode.regular,
        lambda *report: None,
        lambda client: ours and client is context.client,
    )
    context.server = Server(address=("127.0.0.1", 1))
    context.server.state = ConnectionState.OPEN
    client = http.connections[context.server] = HttpClient(context)
    assert [type(command) for command in client.handle_event(events.Start())] == [
        RegisterHttpConnection
    ]
    http.waiting_for_establishment[context.server] = []
    assert list(http.register_connection(RegisterHttpConnection(context.server, None))) == []
    assert (type(client.child_layer) is Http1Client) == ours


def read(reader, buf, data):
    """Return what a body has in `data`, and whether it is over."""
    buf += data
    found = []
    while isinstance(part := reader(buf), h11.Data):
        found.append(bytes(part.data))
    return b"".join(found), part is not None


EXTRAS = [b"", b" ", b";a=b", b"; a=\r "]


@given(
    chunks=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.sampled_from(EXTRAS))),
    trailers=st.sampled_from([b"", b"A: b\r\n", b"no colon\r\n"]),
    step=st.integers(1, 100),
)
def test_a_body_is_read_wherever_a_read_ends_and_without_its_trailers(chunks, trailers, step):
    sent = b"".join(b"%X%b\r\n%b\r\n" % (len(data), extra, data) for data, extra in chunks)
    sent += b"0\r\n" + trailers + b"\r\n"
    reader, buf = Chunks(), ReceiveBuffer()
    parts = [read(reader, buf, sent[i : i + step]) for i in range(0, len(sent), step)]
    assert b"".join(part for part, _ in parts) == b"".join(data for data, _ in chunks)
    assert [over for _, over in parts] == [False] * (len(parts) - 1) + [True]
    assert not buf


@pytest.mark.parametrize(
    "sent", [b"x\r\n", b"\r\n", b"1\r\nxyz", b"1" * 21 + b"\r\n", b"1;\n\r\n", b" 1\r\nx\r\n"]
)
def test_a_malformed_chunk_is_refused(sent):
    with pytest.raises(h11.ProtocolError):
        read(Chunks(), ReceiveBuffer(), b"2\r\nab\r\n" + sent)


def test_short_events_are_no_flood_and_single_bytes_are():
    reader, buf = Chunks(), ReceiveBuffer()
    assert all(
        read(reader, buf, b"10\r\n0123456789abcdef\r\n" * 1000)[0]
        for _ in range(CHUNK_BURST // 500)
    )
    with pytest.raises(h11.ProtocolError, match="too many chunks of less than 16 bytes"):
        read(reader, buf, b"1\r\nx\r\n" * (2 * CHUNK_BURST))
