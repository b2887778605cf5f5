import base64
from unittest import mock

import pytest
from mitmproxy import http
from mitmproxy.test import taddons, tflow

from rolltap.addons.proxy.sessions import SESSION, Sessions
from rolltap.addons.recorder import Recorder
from rolltap.addons.secret import password

SECRET = "key"


def credentials(session_id, given=None):
    given = password(SECRET, session_id) if given is None else given
    encoded = base64.b64encode(f"{session_id}:{given}".encode()).decode()
    return {"proxy-authorization": f"Basic {encoded}"}


def request(method="GET", url="http://example.com/", headers=None, client=None):
    made = http.Request.make(method, url, headers=headers or {})
    return tflow.tflow(req=made, client_conn=client)


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def record(events):
    return mock.Mock(side_effect=events.append)


@pytest.fixture
async def sessions(record, secret_file):
    addon = Sessions(record)
    with taddons.context(Recorder(), addon) as context:
        context.configure(addon, rolltap_secret_file=str(secret_file))
        yield addon


def test_the_credentials_of_a_tunnel_name_the_session_of_every_request_in_it_and_of_no_other(
    sessions,
):
    connect = request("CONNECT", "https://example.com/", credentials("s1"))
    sessions.http_connect(connect)
    assert connect.response is None
    assert "proxy-authorization" not in connect.request.headers
    for headers in ({}, credentials("s2")):
        inside = request(headers=headers, client=connect.client_conn)
        sessions.requestheaders(inside)
        assert (inside.metadata[SESSION], inside.response) == ("s1", None)
        assert "proxy-authorization" not in inside.request.headers
    other = request()
    sessions.requestheaders(other)
    assert (other.metadata.get(SESSION), other.response.status_code) == (None, 407)


@pytest.fixture(params=["http_connect", "requestheaders"])
def authenticate(request, sessions):
    """Return the hook of a tunnel or of a request without a tunnel."""
    return getattr(sessions, request.param)


class TestCredentials:
    def test_a_request_without_a_tunnel_has_its_own_credentials(self, sessions):
        flow = request(headers=credentials("s1"))
        sessions.requestheaders(flow)
        assert (flow.metadata[SESSION], flow.response) == ("s1", None)
        assert "proxy-authorization" not in flow.request.headers

    @pytest.mark.parametrize(
        ("session_id", "password"),
        [
            ("s1", "wrong"),
            ("s1", password(SECRET, "s2")),
            ("s1", "é"),
            ("", ""),
            ("", password(SECRET, "")),
        ],
        ids=["wrong", "another session's", "not ASCII", "empty", "empty session"],
    )
    def test_wrong_ones_are_refused_and_recorded(self, authenticate, events, session_id, password):
        flow = request("POST", headers=credentials(session_id, password))
        authenticate(flow)
        assert flow.response.status_code == 407
        assert SESSION not in flow.metadata
        assert "proxy-authorization" not in flow.request.headers
        (event,) = events
        assert (event.kind, event.session_id) == ("unauthorised", None)
        assert (event.host, event.method) == ("example.com", "POST")

    @pytest.mark.parametrize(
        "header", [{}, {"proxy-authorization": "Bearer x"}, {"proxy-authorization": "Basic *"}]
    )
    def test_without_any_the_client_is_asked_for_them(self, authenticate, events, header):
        flow = request(headers=header)
        authenticate(flow)
        assert flow.response.status_code == 407
        assert flow.response.headers["proxy-authenticate"].startswith("Basic ")
        assert "HTTPS_PROXY=http://SESSION:PASSWORD@HOST:PORT" in flow.response.text
        assert events == []

    def test_a_request_is_refused_even_when_that_cannot_be_recorded(self, sessions, record):
        record.side_effect = RuntimeError
        flow = request(headers=credentials("s1", "wrong"))
        with pytest.raises(RuntimeError):
            sessions.requestheaders(flow)
        assert flow.response.status_code == 407


async def test_any_password_is_accepted_without_a_secret_and_none_if_it_cannot_be_read(
    secret_file, caplog
):
    secret_file.chmod(0o640)
    sessions = Sessions([].append)

    def session(given):
        flow = request(headers=credentials("s1", given))
        sessions.requestheaders(flow)
        return flow.metadata.get(SESSION) if flow.response is None else flow.response.status_code

    with taddons.context(Recorder(), sessions) as context:
        assert session("anything") == "s1"
        context.configure(sessions, rolltap_secret_file=str(secret_file))
        assert "rolltap_secret_file: other users may read the secret in" in caplog.text
        for given in (SECRET, "", password("", "s1"), password(SECRET, "s1")):
            assert session(given) == 407
