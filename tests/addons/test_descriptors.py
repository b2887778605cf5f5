import pytest
from mitmproxy import http
from mitmproxy.test import tflow

from rolltap.addons.limits import _BURST, Descriptors
from rolltap.addons.sessions import SESSION


@pytest.fixture
def events():
    return []


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
    descriptors._servers[client] += 1  # it needs no other
    descriptors._limit += 3
    descriptors.requestheaders(flow)
    return flow


async def test_the_oldest_idle_connection_is_closed_first_those_without_credentials_before_all(
    descriptors, events, closed
):
    known, busy, silent, other = (connect(descriptors) for _ in range(4))
    answered = ask(descriptors, known)
    ask(descriptors, busy)
    descriptors.response(answered)
    for _ in range(3):
        connect(descriptors)
    assert closed[:2] == [silent, other]
    assert known not in closed
    assert busy not in closed
    assert {event.detail for event in events} == {"closed to make room for others"}


async def test_a_new_connection_is_refused_when_all_others_are_busy(descriptors, closed):
    for client in [connect(descriptors) for _ in range(4)]:
        ask(descriptors, client)
    assert connect(descriptors).error
    assert closed == []


@pytest.mark.parametrize("end", ["response", "error", "websocket_end"])
async def test_a_connection_is_idle_again_however_its_request_ends(descriptors, closed, end):
    clients = [connect(descriptors) for _ in range(4)]
    flows = [ask(descriptors, client) for client in clients]
    getattr(descriptors, end)(flows[2])
    connect(descriptors)
    assert closed == [clients[2]]


async def test_a_connection_without_credentials_is_closed_after_a_while(descriptors, closed):
    silent, known, tunnel, wrong = (connect(descriptors) for _ in range(4))
    ask(descriptors, known)
    descriptors.http_connect(tflow.tflow(client_conn=tunnel))
    refused = tflow.tflow(client_conn=wrong)
    refused.response = http.Response.make(407)
    descriptors.http_connect(refused)
    deadlines = {client: state.deadline for client, state in descriptors._clients.items()}
    assert [deadlines[client].cancelled() for client in (silent, known, tunnel, wrong)] == [False, True, True, False]
    for deadline in deadlines.values():
        if not deadline.cancelled():
            deadline._run()
    assert closed == [silent, wrong]
