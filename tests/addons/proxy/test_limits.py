import sys

import pytest
from mitmproxy import http
from mitmproxy.proxy.server_hooks import ServerConnectionHookData
from mitmproxy.test import tflow

from rolltap.addons.proxy.limits import _BURST, _RESERVE, Descriptors
from rolltap.addons.proxy.sessions import SESSION


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
    descriptors.server_connect(ServerConnectionHookData(tflow.tserver_conn(), client))  # it needs no other
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


@pytest.mark.parametrize("full", [False, True])
async def test_a_connection_costs_the_same_beside_few_and_many(descriptors, full):
    def cost(others):
        """Return the number of lines that one more connection runs."""
        descriptors._limit = 1 << 20
        while len(descriptors._clients) < others:
            descriptors.response(ask(descriptors, connect(descriptors)))
        if full:
            descriptors._limit = _BURST + descriptors._held
        lines = 0

        def count(frame, event, argument):
            nonlocal lines
            lines += event == "line"
            return count

        client = tflow.tclient_conn()
        tracing = sys.gettrace()
        sys.settrace(count)
        try:
            descriptors.client_connected(client)
        finally:
            sys.settrace(tracing)
        assert not client.error
        return lines

    assert cost(200) < 2 * cost(20)
