import json

import pyarrow as pa
import pytest
from mitmproxy import ctx, http
from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.connection import Server
from mitmproxy.proxy.server_hooks import ServerConnectionHookData
from mitmproxy.test import taddons, tflow

from rolltap.addons.capture import CAPTURED
from rolltap.addons.egress import Egress
from rolltap.addons.sessions import SESSION
from rolltap.addons.store.records import EVENT_SCHEMA


@pytest.fixture
def events():
    return []


ENDPOINT = ("127.0.0.1", 4)


@pytest.fixture
async def egress(events):
    addon = Egress(events.append, lambda *address: address == ENDPOINT)
    with taddons.context(Proxyserver(), addon) as context:
        context.configure(addon, rolltap_allow=["pypi.org", "*.PythonHosted.org"])
        yield addon


def request(url="https://evil.com/a?b=c", method="GET", **metadata):
    flow = tflow.tflow(req=http.Request.make(method, url))
    flow.metadata.update({SESSION: "s1", **metadata})
    return flow


def test_other_hosts_get_an_empty_object_at_once(egress):
    flow = request()
    egress.request(flow)
    assert (flow.response.status_code, flow.response.content) == (404, b"{}")
    assert flow.response.headers["content-type"] == "application/json"


def test_refusals_are_recorded_without_the_query(egress, events):
    egress.request(request(method="POST"))
    (event,) = events
    assert (event.kind, event.session_id, event.host) == ("refused", "s1", "evil.com")
    assert (event.method, event.path) == ("POST", "/a")


def connect(egress, host, port=443, error=None):
    """Return the error that keeps a connection from being opened, or None."""
    server = Server(address=(host, port))
    server.error = error
    egress.server_connect(ServerConnectionHookData(server, tflow.tflow().client_conn))
    return server.error


@pytest.mark.parametrize(
    "url", ["https://pypi.org/simple/", "http://PyPI.org:8080/", "https://files.pythonhosted.org/x"]
)
def test_allowed_hosts_are_reached(egress, events, url):
    flow = request(url)
    egress.request(flow)
    assert (flow.response, connect(egress, flow.request.host)) == (None, None)
    assert events == []


@pytest.mark.parametrize(
    "url",
    [
        "https://pypi.org.evil.com/",
        "https://evil.com/pypi.org",
        "https://notpypi.org/",
        "https://pythonhosted.org/",
        "https://127.0.0.1:8000/",
    ],
)
def test_hosts_that_only_look_allowed_are_not(egress, url):
    flow = request(url)
    egress.request(flow)
    assert flow.response.status_code == 404
    assert "does not let sessions connect" in connect(egress, flow.request.host, flow.request.port)


def test_only_the_endpoint_is_connected_to_without_being_allowed(egress):
    assert connect(egress, *ENDPOINT) is None
    assert connect(egress, ENDPOINT[0], 5) is not None


def test_a_harness_does_not_reach_the_endpoint_by_its_address(egress):
    flow = request("http://{}:{}/".format(*ENDPOINT))
    egress.request(flow)
    assert flow.response.status_code == 404


def test_no_connection_is_opened_when_the_decision_fails(egress, monkeypatch):
    def fail(*address):
        raise RuntimeError

    monkeypatch.setattr(egress, "_is_endpoint", fail)
    server = Server(address=ENDPOINT)
    with pytest.raises(RuntimeError):
        egress.server_connect(ServerConnectionHookData(server, tflow.tflow().client_conn))
    assert server.error


def test_a_connection_that_another_addon_refused_stays_refused(egress):
    assert connect(egress, "pypi.org", error="refused before") == "refused before"


def test_a_tunnel_is_answered_without_connecting_and_carries_http_alone(egress):
    assert (ctx.options.connection_strategy, ctx.options.upstream_cert, ctx.options.rawtcp) == ("lazy", False, False)


def test_the_host_header_does_not_decide(egress):
    flow = request("https://evil.com/")
    flow.request.headers["host"] = "pypi.org"
    egress.request(flow)
    assert flow.response.status_code == 404


def test_model_calls_pass(egress, events):
    flow = request(**{CAPTURED: True})
    egress.request(flow)
    assert flow.response is None
    assert events == []


def test_an_answer_that_is_there_stays(egress, events):
    flow = request()
    flow.response = http.Response.make(407)
    egress.request(flow)
    assert flow.response.status_code == 407
    assert events == []


def test_a_request_that_is_not_utf8_can_be_recorded(egress, events):
    flow = request()
    flow.request.data.path, flow.request.data.method = b"/\xff", b"G\xff"
    egress.request(flow)
    assert flow.response.status_code == 404
    pa.RecordBatch.from_pylist([event.to_row() for event in events], schema=EVENT_SCHEMA)


def test_a_request_is_refused_even_when_that_cannot_be_recorded(egress, monkeypatch):
    def fail(event):
        raise RuntimeError

    monkeypatch.setattr(egress, "_record", fail)
    flow = request()
    with pytest.raises(RuntimeError):
        egress.request(flow)
    assert flow.response.status_code == 404


@pytest.mark.parametrize(
    "url",
    [
        "https://api.openai.com/v1/completions",
        "https://bedrock.amazonaws.com/model/m/invoke-with-response-stream",
        "https://bedrock.amazonaws.com/model/m/converse",
        "https://api.cohere.com/v2/generate",
        "https://generativelanguage.googleapis.com/v2/models/m:generateContent",
        "https://pypi.org/v9/messages?beta=true",
    ],
)
def test_a_request_that_looks_like_a_model_call_is_recorded_as_uncaptured_even_when_it_is_allowed(egress, events, url):
    egress.request(request(url, "POST"))
    (event,) = events
    assert event.kind == "uncaptured"
    assert event.detail == ("let through" if "pypi" in url else "refused")


@pytest.mark.parametrize(
    ("url", "headers", "error"),
    [
        ("https://api.openai.com/v1/embeddings", {}, {"error": {"code": "not_found"}}),
        ("https://api.anthropic.com/v1/files", {"anthropic-version": "1"}, {"error": {"type": "not_found_error"}}),
        ("https://google.com/v1beta/files", {}, {"error": {"status": "NOT_FOUND"}}),
    ],
)
def test_an_unknown_path_of_a_model_api_gets_that_apis_404(egress, url, headers, error):
    flow = request(url)
    flow.request.headers.update(headers)
    egress.request(flow)
    assert flow.response.status_code == 404
    body = json.loads(flow.response.content)
    assert error["error"].items() <= body["error"].items()
