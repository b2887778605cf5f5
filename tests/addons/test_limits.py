import json

import pytest
from mitmproxy import ctx, http
from mitmproxy.test import taddons, tflow

from rolltap.addons.limits import _BURST, _RESERVE, Descriptors, Limits
from rolltap.addons.recorder import Startup
from rolltap.addons.sessions import SESSION

COMPLETIONS = "https://api.openai.com/v1/chat/completions"


@pytest.fixture
def generations():
    """Return a map of sessions to their numbers of running generations."""
    return {}


@pytest.fixture
async def limits(events, generations):
    addon = Limits(events.append, lambda session_id: generations.get(session_id, 0))
    with taddons.context(Startup(), addon):
        yield addon


def request(limits, session="s1", url=COMPLETIONS):
    flow = tflow.tflow(req=http.Request.make("POST", url))
    flow.metadata[SESSION] = session
    limits.requestheaders(flow)
    return flow


def test_there_are_none_unless_they_are_set(limits):
    assert all(request(limits).response is None for _ in range(100))
    assert limits._usage == {}


def test_a_session_has_so_many_requests_at_the_same_time(limits, events):
    ctx.options.rolltap_max_concurrent_calls = 2
    running = [request(limits), request(limits)]
    refused = request(limits).response
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert json.loads(refused.content)["error"]["code"] == "rate_limit_exceeded"
    assert [(event.kind, event.session_id, event.detail) for event in events] == [
        ("rejected", "s1", "2 requests of this session run already: the limit.")
    ]
    assert request(limits, "s2").response is None
    running[0].response = http.Response.make()
    limits.response(running[0])
    assert request(limits).response is None


@pytest.mark.parametrize("end", ["response", "error", "client_disconnected"])
def test_a_request_is_over_once_however_it_ends(limits, end):
    ctx.options.rolltap_max_concurrent_calls = 1
    flow = request(limits)
    for _ in range(2):
        getattr(limits, end)(flow.client_conn if end == "client_disconnected" else flow)
    assert request(limits).response is None
    assert request(limits).response.status_code == 429


def test_a_session_transfers_so_many_bytes(limits):
    ctx.options.rolltap_max_session_bytes = 10
    flow = request(limits)
    assert flow.request.stream(b"hello") == b"hello"
    flow.response = http.Response.make()
    limits.responseheaders(flow)
    assert request(limits).response is None
    assert flow.response.stream(b"world") == b"world"
    refused = request(limits).response
    assert refused.status_code == 429
    assert "retry-after" not in refused.headers
    assert request(limits, "s2").response is None


def test_a_session_has_so_many_requests_a_minute(limits, monkeypatch):
    now = 120.0
    monkeypatch.setattr("rolltap.addons.limits.time.monotonic", lambda: now)
    ctx.options.rolltap_max_requests_per_minute = 3
    assert [request(limits, url="http://a.example/").response for _ in range(3)] == [None] * 3
    now = 170.0
    refused = request(limits).response
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
    now = 180.0
    assert request(limits).response is None


def test_the_end_of_a_session_is_served_over_its_limits_unless_it_has_a_body(limits):
    ctx.options.rolltap_max_requests_per_minute = 1
    assert [request(limits, url="http://session.rolltap/end").response for _ in range(3)] == [None] * 3
    flow = tflow.tflow(req=http.Request.make("POST", "http://session.rolltap/end", b"x" * 9))
    flow.metadata[SESSION] = "s1"
    for _ in range(2):
        limits.requestheaders(flow)
    assert flow.response.status_code == 429


def test_generations_that_nobody_listens_to_count_but_one_may_be_joined(limits, generations):
    ctx.options.rolltap_max_concurrent_calls = 2
    generations["s1"] = 2
    joining = request(limits)
    assert joining.response is None
    limits.error(joining)
    generations["s1"] = 3
    assert request(limits).response.status_code == 429
    assert request(limits, "s2").response is None


def test_the_usage_of_sessions_is_bounded(limits, monkeypatch):
    monkeypatch.setattr("rolltap.addons.limits.REMEMBERED", 10)
    ctx.options.rolltap_max_requests_per_minute = 3
    for i in range(30):
        request(limits, f"s{i}")
    assert list(limits._usage) == [f"s{i}" for i in range(20, 30)]


@pytest.fixture
def closed():
    return []


@pytest.fixture
def descriptors(events, closed):
    """Return an addon with room for four connections."""
    addon = Descriptors(events.append, closed.append)
    addon._limit = _BURST + 4
    return addon


def connect(descriptors):
    client = tflow.tclient_conn()
    descriptors.client_connected(client)
    return client


def ask(descriptors, client):
    flow = tflow.tflow(client_conn=client)
    flow.metadata[SESSION] = "s1"
    descriptors._clients[client].servers += 1  # it needs no other
    descriptors._limit += 3
    descriptors.requestheaders(flow)
    descriptors.request(flow)
    return flow


@pytest.mark.parametrize("num_silent", [1, 6])
async def test_the_oldest_idle_connection_of_who_holds_most_is_closed_first(descriptors, events, closed, num_silent):
    descriptors._limit = _BURST + 1 + num_silent
    known, *silent = (connect(descriptors) for _ in range(1 + num_silent))
    descriptors.response(ask(descriptors, known))  # it holds four
    connect(descriptors)
    assert closed == [silent[0] if num_silent > 4 else known]
    assert {event.detail for event in events} == {"closed to make room for others"}


@pytest.mark.parametrize("end", ["response", "error"])
async def test_a_new_connection_is_refused_until_a_request_of_another_has_ended(descriptors, closed, end):
    clients = [connect(descriptors) for _ in range(4)]
    flows = [ask(descriptors, client) for client in clients]
    refused = connect(descriptors)
    assert (bool(refused.error), closed) == (True, [])
    descriptors.client_disconnected(refused)
    getattr(descriptors, end)(flows[2])
    assert (connect(descriptors).error, closed) == (None, [clients[2]])


async def test_a_request_that_was_let_in_holds_its_room_before_it_is_connected(descriptors):
    descriptors._limit = _RESERVE + 4 * 20
    flows = []
    for i in range(25):
        flows.append(tflow.tflow(client_conn=connect(descriptors)))
        flows[-1].metadata[SESSION] = f"s{i}"
        descriptors.requestheaders(flows[-1])
    assert [flow.response.status_code if flow.response else 0 for flow in flows] == [0] * 20 + [503] * 5
    descriptors.error(flows[0])
    for flow in flows[20:]:
        flow.response = None
        descriptors.client_disconnected(flow.client_conn)
    again = tflow.tflow(client_conn=connect(descriptors))
    again.metadata[SESSION] = "s25"
    descriptors.requestheaders(again)
    assert again.response is None


async def test_a_connection_without_credentials_is_closed_after_a_while(descriptors, closed):
    silent, known, tunnel, wrong = (connect(descriptors) for _ in range(4))
    ask(descriptors, known)
    opened = tflow.tflow(client_conn=tunnel)
    opened.metadata[SESSION] = "s1"
    descriptors.http_connect(opened)
    refused = tflow.tflow(client_conn=wrong)
    refused.response = http.Response.make(407)
    descriptors.http_connect(refused)
    deadlines = {client: state.deadline for client, state in descriptors._clients.items()}
    assert [deadlines[client].cancelled() for client in (silent, known, tunnel, wrong)] == [False, True, True, False]
    for deadline in deadlines.values():
        if not deadline.cancelled():
            deadline._run()
    assert closed == [silent, wrong]
