import pytest
from mitmproxy import options
from mitmproxy.connection import ConnectionState, Server
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import HttpClient, HTTPMode, RegisterHttpConnection
from mitmproxy.proxy.layers.http._http1 import Http1Client
from mitmproxy.test.tflow import tclient_conn

from rolltap.addons.wire.protocol import Http


def test_an_error_in_a_layer_closes_its_connection_and_is_reported(monkeypatch):
    context, reports = Context(tclient_conn(), options.Options()), []
    http = Http(context, HTTPMode.regular, lambda *report: reports.append(report), lambda _: False)
    received = events.DataReceived(context.client, b"GET http://a.example/ HTTP/1.1\r\n\r\n")

    def fail(*arguments):
        raise AssertionError("a state that cannot be")

    assert list(http.handle_event(events.Start())) == []
    monkeypatch.setattr(http, "make_stream", fail)
    sent = [command for command in http.handle_event(received) if not isinstance(command, commands.Log)]
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
    http = Http(context, HTTPMode.regular, lambda *report: None, lambda client: ours and client is context.client)
    context.server = Server(address=("127.0.0.1", 1))
    context.server.state = ConnectionState.OPEN
    client = http.connections[context.server] = HttpClient(context)
    assert [type(command) for command in client.handle_event(events.Start())] == [RegisterHttpConnection]
    http.waiting_for_establishment[context.server] = []
    assert list(http.register_connection(RegisterHttpConnection(context.server, None))) == []
    assert (type(client.child_layer) is Http1Client) == ours
