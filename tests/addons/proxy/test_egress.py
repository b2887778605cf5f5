import asyncio
import json
import socket
from unittest import mock

import pytest
from mitmproxy import ctx, http
from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.connection import Server
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.server_hooks import ServerConnectionHookData
from mitmproxy.test import taddons, tflow

from rolltap.addons.hosts import read_patterns
from rolltap.addons.proxy.capture import CAPTURED
from rolltap.addons.proxy.egress import Egress, conflicting_host, is_allowed
from rolltap.addons.proxy.sessions import SESSION
from rolltap.addons.recorder import Recorder
from rolltap.addons.store.session_options import SessionOptions
from tests.addons.harness import rows

OPTIONS = {
    "own": SessionOptions(allow=("crates.io:443",)),
    "none": SessionOptions(allow=()),
    "judge": SessionOptions(allow=("crates.io", "10.0.0.1"), model_calls=False),
}
"""Options of the sessions that have some."""


def session_of(client):
    return "s1"


def options_of(session):
    return OPTIONS.get(session, SessionOptions())


@pytest.fixture
def record(events):
    return mock.Mock(side_effect=events.append)


@pytest.fixture
async def egress(record):
    addon = Egress(record, session_of, options_of)
    with taddons.context(Proxyserver(), Recorder(), addon) as context:
        context.configure(addon, rolltap_allow=["pypi.org", "*.PythonHosted.org"])
        yield addon


def request(url="https://evil.com/a?b=c", method="GET", **metadata):
    flow = tflow.tflow(req=http.Request.make(method, url))
    flow.metadata.update({SESSION: "s1", **metadata})
    flow.client_conn.sni = None
    return flow


def seen(egress, *asked, **fields):
    """Return a request that the addon has seen."""
    flow = request(*asked, **fields)
    egress.requestheaders(flow)
    return flow


def test_other_hosts_get_an_empty_object_at_once_and_the_record_has_no_query(egress, events):
    flow = seen(egress, method="POST")
    assert (flow.response.status_code, flow.response.content) == (404, b"{}")
    assert flow.response.headers["content-type"] == "application/json"
    (event,) = events
    assert (event.kind, event.session_id, event.host) == ("refused", "s1", "evil.com")
    assert (event.method, event.path) == ("POST", "/a")


async def connect(egress, flow, address=None, error=None):
    """Return the error that keeps a connection from being opened for `flow`, or None."""
    server = Server(address=address or (flow.request.host, flow.request.port))
    server.error = error
    await egress.server_connect(ServerConnectionHookData(server, flow.client_conn))
    return server.error


@pytest.fixture(autouse=True)
async def names():
    """Yield the addresses of a name, one list for each time that it is looked up; the last one
    stays. An error is raised."""
    found = [["93.184.216.34"]]

    async def look_up(host, port, **how):
        addresses = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(addresses, BaseException):
            raise addresses
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (address, port)) for address in addresses]

    with mock.patch.object(asyncio.get_running_loop(), "getaddrinfo", look_up):
        yield found


@pytest.mark.parametrize(
    "url", ["https://pypi.org/simple/", "http://PyPI.org:80/", "https://files.pythonhosted.org/x"]
)
async def test_allowed_hosts_are_reached(egress, events, url):
    flow = seen(egress, url)
    assert flow.response is None
    assert await connect(egress, flow) is None
    assert events == []


OWN_HOSTS = """
own    https://crates.io/  reached
own    http://crates.io/   refused
own    https://pypi.org/   refused
none   https://pypi.org/   refused
none   https://crates.io/  refused
s1     https://crates.io/  refused
judge  http://crates.io/   reached
"""


@pytest.mark.parametrize(("session", "url", "decision"), rows(OWN_HOSTS))
async def test_a_sessions_own_hosts_stand_in_place_of_the_options(
    egress, events, session, url, decision
):
    flow = seen(egress, url, **{SESSION: session})
    reached = decision == "reached"
    assert (flow.response is None) is reached
    assert (await connect(egress, flow) is None) is reached
    told = [(event.kind, event.session_id) for event in events[:1]]
    assert told == ([] if reached else [("refused", session)])


@pytest.mark.parametrize(("session", "reached"), [("judge", True), ("own", False)])
async def test_a_private_address_needs_a_pattern_of_the_session(egress, names, session, reached):
    names[:] = [["10.0.0.1"]]
    error = await connect(egress, seen(egress, "https://crates.io/", **{SESSION: session}))
    assert (error is None) is reached


@pytest.mark.parametrize(
    ("url", "told"),
    [("https://crates.io/v9/messages", []), ("https://a.example/v1/responses", ["refused"])],
)
def test_a_request_of_a_judge_is_no_model_call_that_was_missed(egress, events, url, told):
    seen(egress, url, "POST", **{SESSION: "judge"})
    assert [event.kind for event in events] == told


@pytest.mark.parametrize(
    "url",
    [
        "https://pypi.org.evil.com/",
        "https://evil.com/pypi.org",
        "https://notpypi.org/",
        "https://pythonhosted.org/",
        "https://127.0.0.1:8000/",
        "http://127.0.0.1:4/",
        "https://pypi.org:8443/",
        "http://pypi.org:22/",
    ],
)
async def test_hosts_that_only_look_allowed_are_not(egress, url):
    flow = request(url)
    flow.request.headers["host"] = "pypi.org"
    egress.requestheaders(flow)
    assert flow.response.status_code == 404
    assert "does not let sessions connect" in await connect(egress, flow)


async def test_a_connection_is_opened_only_to_the_target_of_the_last_request(egress):
    flow = request("https://pypi.org/")
    assert "does not let" in await connect(egress, flow)
    egress.requestheaders(flow)
    assert await connect(egress, flow) is None
    assert await connect(egress, flow, error="another addon refused") == "another addon refused"
    assert "does not let" in await connect(egress, flow, ("pypi.org", 53))
    other = request("https://evil.com/")
    other.client_conn = flow.client_conn
    egress.requestheaders(other)
    assert "does not let" in await connect(egress, flow)


async def test_without_a_record_of_the_decision_nothing_is_connected_to_and_a_request_is_refused(
    egress, record
):
    record.side_effect = RuntimeError
    flow = request()
    server = Server(address=("evil.com", 443))
    with pytest.raises(RuntimeError):
        await egress.server_connect(ServerConnectionHookData(server, flow.client_conn))
    assert server.error
    with pytest.raises(RuntimeError):
        egress.requestheaders(flow)
    assert flow.response.status_code == 404


async def test_a_host_is_verified_by_the_name_that_was_allowed(egress):
    flow = seen(egress, "https://PyPI.org./")
    server = Server(address=(flow.request.host, 443))
    server.sni = "evil.com"
    await egress.server_connect(ServerConnectionHookData(server, flow.client_conn))
    assert (server.error, server.sni) == (None, "pypi.org")


@pytest.mark.parametrize(
    ("headers", "sni", "other"),
    [
        ([("Host", "PyPI.org.")], "pypi.org", ""),
        ([("Host", "pypi.org:443")], None, ""),
        ([], None, ""),
        ([("Host", "pypi.org:80")], None, "pypi.org:80"),
        ([("Host", "pypi.org"), ("host", "evil.com")], None, "evil.com"),
        ([("Host", "pypi.org")], "evil.com", "evil.com"),
        ([("Host", "pypi.org@evil.com")], None, "pypi.org@evil.com"),
    ],
)
def test_a_request_has_one_name(headers, sni, other):
    made = http.Request.make("GET", "https://pypi.org/")
    made.headers = http.Headers([(name.encode(), value.encode()) for name, value in headers])
    assert conflicting_host(made, sni) == other


def test_the_name_of_an_address_has_no_brackets():
    made = http.Request.make("GET", "https://x:8443/")
    made.data.host, made.headers["host"] = "::1", "[::1]:8443"
    assert conflicting_host(made, None) == ""


@pytest.mark.parametrize(
    ("hook", "flow"),
    [
        ("tcp_start", tflow.ttcpflow()),
        ("udp_start", tflow.tudpflow()),
        ("dns_request", tflow.tdnsflow()),
    ],
)
def test_other_protocols_are_closed_even_if_mitmproxy_chose_them(egress, events, hook, flow):
    flow.live = True
    getattr(egress, hook)(flow)
    assert flow.error.msg == "Connection killed."
    (event,) = events
    assert (event.kind, event.detail) == ("refused", f"{hook[:3]}, not HTTP")


@pytest.mark.parametrize("metadata", [{}, {CAPTURED: True}])
def test_what_is_let_through_is_streamed_both_ways(egress, metadata):
    flow = seen(egress, "https://pypi.org/", **metadata)
    flow.response = http.Response.make()
    egress.responseheaders(flow)
    assert (flow.request.stream, flow.response.stream) == (True, True)


def test_a_tunnel_is_answered_without_connecting_and_carries_http_alone(egress):
    assert ctx.options.connection_strategy == "lazy"
    assert not ctx.options.upstream_cert
    assert not ctx.options.rawtcp


@pytest.mark.parametrize(
    ("metadata", "answer"), [({CAPTURED: True}, None), ({}, http.Response.make(407))]
)
def test_model_calls_pass_and_an_answer_that_is_there_stays(egress, events, metadata, answer):
    flow = request(**metadata)
    flow.response = answer
    egress.requestheaders(flow)
    assert (flow.response, events) == (answer, [])


USE = "Let the program use OpenAI's Chat Completions or Responses, or Anthropic's Messages"
BEDROCK = f"refused: the recorder does not serve Bedrock's Converse and InvokeModel. {USE}"
INTERACTIONS = f"refused: the recorder does not serve Google's Interactions API. {USE}"


UNCAPTURED = """
https://api.openai.com/v1/completions                                     refused
https://bedrock.amazonaws.com/model/m/invoke-with-response-stream         BEDROCK
https://bedrock.amazonaws.com/model/m/converse                            BEDROCK
https://google.com/v1beta/interactions                                    INTERACTIONS
https://pypi.org/v1beta/interactions                                      let through
https://api.cohere.com/v2/generate                                        refused
https://generativelanguage.googleapis.com/v2/models/m:generateContent     refused
https://api.openai.com/v1/batches                                         refused
https://pypi.org/v9/messages?beta=true                                    let through
https://pypi.org/v1/chat/%63ompletions/                                   let through
"""
"""URLs, and what the event says."""


@pytest.mark.parametrize("row", UNCAPTURED.strip().splitlines())
def test_a_request_that_looks_like_a_model_call_is_recorded_as_uncaptured(egress, events, row):
    url, told = row.split(maxsplit=1)
    told = {"BEDROCK": BEDROCK, "INTERACTIONS": INTERACTIONS}.get(told, told)
    seen(egress, url, "POST")
    (event,) = events
    assert (event.kind, event.detail) == ("uncaptured", told)


def test_an_allowed_host_may_have_a_path_that_is_nearly_that_of_a_model_call(egress, events):
    seen(egress, "https://pypi.org/v1/message", "POST")
    assert events == []


def test_a_mistyped_path_of_a_model_call_is_answered_with_advice(egress, events):
    flow = seen(egress, "https://a.example/v1/chat/completion", "POST")
    (event,) = events
    advice = "did you mean /v1/chat/completions?"
    assert (event.kind, event.detail) == ("uncaptured", f"refused: {advice}")
    error = json.loads(flow.response.content)["error"]["message"]
    assert error == f"POST /v1/chat/completion is not served here: {advice}"


@pytest.mark.parametrize(
    ("url", "headers", "error"),
    [
        ("https://api.openai.com/v1/embeddings", {}, {"error": {"code": "not_found"}}),
        (
            "https://api.anthropic.com/v1/files",
            {"anthropic-version": "1"},
            {"error": {"type": "not_found_error"}},
        ),
        ("https://google.com/v1beta/cachedContents", {}, {"error": {"status": "NOT_FOUND"}}),
    ],
)
def test_an_unknown_path_of_a_model_api_gets_that_apis_404(egress, url, headers, error):
    flow = request(url)
    flow.request.headers.update(headers)
    egress.requestheaders(flow)
    assert flow.response.status_code == 404
    body = json.loads(flow.response.content)
    assert error["error"].items() <= body["error"].items()


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["10.0.0.1", "169.254.169.254"]])
async def test_a_host_with_private_addresses_alone_is_not_connected_to(
    egress, events, names, addresses
):
    names[:] = [addresses]
    error = await connect(egress, seen(egress, "https://pypi.org/"))
    assert "does not let sessions connect" in error
    (event,) = events
    assert (event.session_id, event.host) == ("s1", "pypi.org")
    assert f"not public: allow {addresses[0]}:443" in event.detail


async def test_the_endpoint_is_not_looked_up(egress, names):
    names[:] = [[]]
    assert await connect(egress, seen(egress, "http://127.0.0.1:9/", **{CAPTURED: True})) is None


async def test_a_connection_gets_the_addresses_that_were_checked(egress, events, names):
    """The second answer is another one. Others that look the name up get it."""
    names[:] = [["10.0.0.1", "93.184.216.34"], ["10.0.0.1"]]
    egress.running()
    loop = asyncio.get_running_loop()

    async def addresses():
        return [found[4][0] for found in await loop.getaddrinfo("pypi.org", 443)]

    async def opened():
        assert await connect(egress, seen(egress, "https://pypi.org/")) is None
        return await addresses()

    assert await loop.create_task(opened()) == ["93.184.216.34"]
    assert await addresses() == ["10.0.0.1"]
    assert events == []


@pytest.mark.parametrize(
    "error", [OSError("no such host"), UnicodeError("label too long"), asyncio.CancelledError()]
)
async def test_a_lookup_that_fails_or_is_cancelled_ends_the_connection_and_is_told(
    egress, names, error
):
    names[:] = [error]
    told = str(error) or "connection cancelled"
    assert await connect(egress, seen(egress, "https://pypi.org/")) == told


def test_bytes_of_a_tunnel_are_refused_with_its_host_and_port(egress, events):
    context = Context(tflow.tclient_conn(), ctx.options)
    context.server.address = ("a.example", 22)
    egress._report(context, None, "not an HTTP/1.1 request")
    (event,) = events
    assert (event.host, event.detail) == ("a.example", "not an HTTP/1.1 request (port 22)")


def test_a_wrong_pattern_is_an_error_of_the_start(egress, caplog):
    ctx.options.rolltap_allow = ["pypi.org", "pypi.org:https"]
    assert "rolltap_allow: 'pypi.org:https' has the port 'https': give" in caplog.text
    assert seen(egress, "https://pypi.org/").response.status_code == 404


PATTERNS = """
pypi.org           pypi.org             443   allowed
pypi.org           PyPI.org.            80    allowed
pypi.org           pypi.org             8080  refused
pypi.org:8080      pypi.org             8080  allowed
pypi.org:8080      pypi.org             443   refused
pypi.org:*         pypi.org             22    allowed
[ab].example.org   a.example.org        443   allowed
[ab].example.org   c.example.org        443   refused
::1                [::1]                80    allowed
[2606:4700::1]:*   2606:4700::1         443   allowed
[2606:4700::1]:*   2606:4700::1:beef    443   refused
[::1]:*            ::1:2:3:4            443   refused
2606:*             2606:4700:4700::1111 443   refused
cafe:*             cafe::1              443   refused
"""


@pytest.mark.parametrize(("pattern", "host", "port", "decision"), rows(PATTERNS))
def test_a_host_is_allowed_on_the_ports_of_its_pattern(pattern, host, port, decision):
    allowed = is_allowed(read_patterns(pattern), host, int(port))
    assert allowed == (decision == "allowed")


def test_a_name_with_a_blank_is_no_host():
    assert not is_allowed(read_patterns("*"), "bad name", 80)
