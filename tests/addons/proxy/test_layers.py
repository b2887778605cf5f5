from unittest import mock

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


@pytest.fixture
def report():
    return mock.Mock()


@pytest.fixture
def ours():
    """Return the function that tells clients of our own endpoint."""
    return mock.Mock(return_value=False)


@pytest.fixture
def http(report, ours):
    context = Context(tclient_conn(), options.Options())
    return Http(context, HTTPMode.regular, report, ours)


def test_an_error_in_a_layer_closes_its_connection_and_is_reported(http, report):
    received = events.DataReceived(http.context.client, b"GET http://a/ HTTP/1.1\r\n\r\n")
    assert list(http.handle_event(events.Start())) == []
    with mock.patch.object(http, "make_stream", side_effect=AssertionError("cannot be")):
        sent = [type(command) for command in http.handle_event(received)]
    assert commands.CloseConnection in sent
    assert {*sent} <= {commands.CloseConnection, commands.Log}
    reason = "an error in mitmproxy's layers: AssertionError('cannot be')"
    report.assert_called_once_with(http.context, mock.ANY, reason)
    assert list(http.handle_event(received)) == []


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_our_own_endpoint_sends_is_not_counted(http, ours, is_ours):
    ours.return_value = is_ours
    server = Server(address=("127.0.0.1", 1))
    server.state = ConnectionState.OPEN
    http.context.server = server
    client = HttpClient(http.context)
    http.connections[server] = client
    (command,) = client.handle_event(events.Start())
    assert type(command) is RegisterHttpConnection
    http.waiting_for_establishment[server] = []
    assert list(http.register_connection(RegisterHttpConnection(server, None))) == []
    assert (type(client.child_layer) is Http1Client) == is_ours
    ours.assert_called_with(http.context.client)


def read(reader, buf, data):
    """Return what a body has in `data`, and whether it is over."""
    buf += data
    found = b""
    part = reader(buf)
    while isinstance(part, h11.Data):
        found += part.data
        part = reader(buf)
    return found, part is not None


EXTRAS = [b"", b" ", b";a=b", b"; a=\r "]


@given(
    chunks=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.sampled_from(EXTRAS))),
    trailers=st.sampled_from([b"", b"A: b\r\n", b"no colon\r\n"]),
    step=st.integers(1, 100),
)
def test_a_body_is_read_wherever_a_read_ends_and_without_its_trailers(chunks, trailers, step):
    sent = b""
    whole = b""
    for data, extra in chunks:
        sent += b"%X%b\r\n%b\r\n" % (len(data), extra, data)
        whole += data
    sent += b"0\r\n" + trailers + b"\r\n"
    reader = Chunks()
    buf = ReceiveBuffer()
    found = b""
    for start in range(0, len(sent), step):
        part, over = read(reader, buf, sent[start : start + step])
        found += part
        assert over == (start + step >= len(sent))
    assert found == whole
    assert not buf


@pytest.mark.parametrize(
    "sent", [b"x\r\n", b"\r\n", b"1\r\nxyz", b"1" * 21 + b"\r\n", b"1;\n\r\n", b" 1\r\nx\r\n"]
)
def test_a_malformed_chunk_is_refused(sent):
    with pytest.raises(h11.ProtocolError):
        read(Chunks(), ReceiveBuffer(), b"2\r\nab\r\n" + sent)


def test_short_events_are_no_flood_and_single_bytes_are():
    reader = Chunks()
    buf = ReceiveBuffer()
    for _ in range(CHUNK_BURST // 500):
        assert read(reader, buf, b"10\r\n0123456789abcdef\r\n" * 1000)[0]
    with pytest.raises(h11.ProtocolError, match="too many chunks of less than 16 bytes"):
        read(reader, buf, b"1\r\nx\r\n" * (2 * CHUNK_BURST))
