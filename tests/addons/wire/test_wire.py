from mitmproxy import options
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import HTTPMode
from mitmproxy.test.tflow import tclient_conn

from rolltap.addons.wire.protocol import Http


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
