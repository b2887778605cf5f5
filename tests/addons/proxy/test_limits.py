import asyncio
import sys
from unittest import mock

import pytest
from mitmproxy import http
from mitmproxy.test import tflow

from rolltap.addons.proxy.limits import STRANGERS, Descriptors
from rolltap.addons.proxy.sessions import SESSION


@pytest.fixture
def closed():
    return []


@pytest.fixture
def descriptors(events, closed):
    """Return an addon with room for eight connections, two of a session."""
    addon = Descriptors(events.append, closed.append)
    addon._most = 8
    return addon


def connect(descriptors):
    client = tflow.tclient_conn()
    descriptors.client_connected(client)
    return client


def ask(descriptors, client=None, session="s1", url="http://api.example/v1/chat/completions"):
    """Return a request of a session, which goes on unless it is refused."""
    request = http.Request.make("POST", url)
    flow = tflow.tflow(client_conn=client or connect(descriptors), req=request)
    flow.metadata[SESSION] = session
    descriptors.requestheaders(flow)
    return flow


def status(flow):
    return flow.response.status_code if flow.response else None


async def test_a_session_with_too_many_connections_loses_its_oldest_one_without_a_request(
    descriptors, events, closed
):
    first, second = ask(descriptors), ask(descriptors)
    other = ask(descriptors, session="s2")
    for flow in (other, second, first):
        descriptors.response(flow)
    assert [status(ask(descriptors)) for _ in range(2)] == [None, None]
    assert closed == [first.client_conn, second.client_conn]
    for event in events:
        assert (event.session_id, event.detail) == ("s1", "closed to make room for others")
    assert len(events) == 2


@pytest.mark.parametrize("end", ["response", "error"])
async def test_a_session_whose_connections_all_have_a_request_gets_429_until_one_has_ended(
    descriptors, events, closed, end
):
    running = [ask(descriptors) for _ in range(2)]
    refused = ask(descriptors)
    assert (status(refused), refused.response.headers["retry-after"]) == (429, "5")
    assert b"too many connections" in refused.response.content
    assert [event.kind for event in events] == ["rejected"]
    assert status(ask(descriptors, session="s2")) is None
    getattr(descriptors, end)(running[1])
    assert status(ask(descriptors, refused.client_conn)) is None
    assert closed == [running[1].client_conn]


async def test_of_too_many_connections_of_all_sessions_the_least_recently_used_is_closed(
    descriptors, closed
):
    asked = [ask(descriptors, session=f"s{i}") for i in range(8)]
    for flow in (asked[5], asked[2]):
        descriptors.response(flow)
    assert status(ask(descriptors, session="another")) is None
    assert closed == [asked[5].client_conn]


async def test_when_all_connections_have_a_request_another_session_gets_503(
    descriptors, events, closed
):
    running = [ask(descriptors, session=f"s{i}") for i in range(8)]
    refused = ask(descriptors, session="late")
    assert status(refused) == 503
    assert [event.kind for event in events] == ["fault"]
    descriptors.response(running[3])
    assert status(ask(descriptors, refused.client_conn, session="late")) is None
    assert closed == [running[3].client_conn]


async def test_the_request_that_ends_a_session_takes_the_place_of_another_one_of_it(
    descriptors, closed
):
    running = [ask(descriptors) for _ in range(2)]
    assert status(ask(descriptors, url="http://session.rolltap/end")) is None
    assert closed == [running[0].client_conn]


async def test_tunnels_without_a_request_are_connections_of_their_session(descriptors, closed):
    tunnels = []
    for _ in range(4):
        flow = tflow.tflow(client_conn=connect(descriptors))
        flow.metadata[SESSION] = "s1"
        descriptors.http_connect(flow)
        tunnels.append(flow.client_conn)
    assert closed == tunnels[:2]


async def test_a_connection_of_two_sessions_counts_for_the_last_one(descriptors, closed):
    shared = connect(descriptors)
    for session in ("s1", "s2", "s1", "s2"):
        descriptors.response(ask(descriptors, shared, session))
    assert [status(ask(descriptors)) for _ in range(3)] == [None, None, 429]
    assert closed == []


async def test_a_closed_connection_makes_room(descriptors):
    running = [ask(descriptors) for _ in range(2)]
    descriptors.client_disconnected(running[0].client_conn)
    descriptors.error(running[0])
    assert status(ask(descriptors)) is None
    assert descriptors._idle == {}


async def test_a_connection_without_credentials_is_closed_after_a_while(descriptors, closed):
    loop = asyncio.get_running_loop()
    timers = [mock.Mock() for _ in range(4)]
    with mock.patch.object(loop, "call_later", side_effect=timers) as called:
        silent, known, tunnel, wrong = (connect(descriptors) for _ in range(4))
    ask(descriptors, known)
    opened = tflow.tflow(client_conn=tunnel)
    opened.metadata[SESSION] = "s1"
    descriptors.http_connect(opened)
    refused = tflow.tflow(client_conn=wrong)
    refused.response = http.Response.make(407)
    descriptors.http_connect(refused)
    for call, timer in zip(called.call_args_list, timers, strict=True):
        _, close, *arguments = call.args
        if not timer.cancel.called:
            close(*arguments)
    assert closed == [silent, wrong]


async def test_of_too_many_connections_without_credentials_the_oldest_is_closed(
    descriptors, closed
):
    first, second, *_ = (connect(descriptors) for _ in range(STRANGERS + 2))
    assert closed == [first, second]


async def test_a_box_takes_the_room_of_a_connection(events, closed):
    boxes = []
    addon = Descriptors(events.append, closed.append, boxes)
    addon._most = 3
    first, second = ask(addon, session="s1"), ask(addon, session="s2")
    for flow in (first, second):
        addon.response(flow)
    assert closed == []
    boxes += ["box 1", "box 2"]
    assert status(ask(addon, second.client_conn, session="s2")) is None
    assert closed == [first.client_conn]


async def test_a_connection_costs_the_same_beside_few_and_many(descriptors):
    def cost(others):
        """Return the number of lines that one more connection and its request run."""
        descriptors._most = 1 << 20
        while len(descriptors._clients) < others:
            descriptors.response(ask(descriptors, session=f"s{len(descriptors._clients)}"))
        descriptors._most = others
        lines = 0

        def count(frame, event, argument):
            nonlocal lines
            lines += event == "line"
            return count

        tracing = sys.gettrace()
        sys.settrace(count)
        try:
            flow = ask(descriptors, session="another")
        finally:
            sys.settrace(tracing)
        assert status(flow) is None
        return lines

    assert cost(200) < 2 * cost(20)
