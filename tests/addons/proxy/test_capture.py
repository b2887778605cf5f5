from functools import partial
from unittest import mock

import aiohttp
import pytest
from mitmproxy import ctx, http
from mitmproxy.connection import Server
from mitmproxy.proxy.server_hooks import ServerConnectHook, ServerConnectionHookData
from mitmproxy.test import tflow

from rolltap.addons.dialects import routes
from rolltap.addons.proxy.capture import CAPTURED, Capture
from rolltap.addons.proxy.egress import Egress
from rolltap.addons.proxy.sessions import SESSION
from rolltap.addons.store.records import Event
from rolltap.addons.store.session_options import SessionOptions
from rolltap.addons.store.tables import read_rows
from tests.addons.harness import rows
from tests.addons.running import options_of, running

COMPLETIONS = "https://api.openai.com/v1/chat/completions"


@pytest.fixture
def options(tmp_path, tokenizer_folder):
    return options_of(tmp_path, tokenizer_folder)


@pytest.fixture
async def recorder(options):
    """Yield a running recorder."""
    async with running(options) as recorder:
        yield recorder


def no_host(session, host, port):
    return False


@pytest.fixture
def capture(recorder):
    addon = Capture(recorder, no_host)
    ctx.master.addons.add(addon)
    return addon


@pytest.fixture
def told(recorder):
    """Return a function that returns the rows of events."""
    return partial(read_rows, recorder.endpoint.writer.run, "events")


def request(method="POST", url=COMPLETIONS, headers=()):
    flow = tflow.tflow(req=http.Request.make(method, url, headers=dict(headers)))
    flow.metadata[SESSION] = "s1"
    return flow


def captured(capture, *asked, **fields):
    """Return a request that the addon has seen."""
    flow = request(*asked, **fields)
    capture.requestheaders(flow)
    return flow


URLS = """
https://app.example/api/v1/messages               no
https://app.example/api/responses                 no
https://app.example/v2/chat/completions           no
https://app.example/v1/messages                   yes
https://app.example/openai/v1/responses           no
https://x.wild.example/api/v1/messages            no
https://x.wild.example/v1/messages                yes
https://openrouter.ai/api/v1/chat/completions     yes
"""


class TestHostsOfTheUser:
    """A host that the user allowed by its name is an application, not a provider."""

    @pytest.fixture
    async def capture(self, options):
        options_of_session = mock.Mock(return_value=SessionOptions())
        egress = Egress(mock.Mock(), mock.Mock(return_value="s1"), options_of_session)
        named = {"rolltap_allow": ["app.example", "*.wild.example"]}
        async with running({**options, **named}, egress) as recorder:
            yield Capture(recorder, egress.allows)

    @pytest.mark.parametrize(("url", "is_captured"), rows(URLS))
    async def test_it_keeps_paths_that_only_a_prefix_makes_model_calls(
        self, capture, url, is_captured
    ):
        assert captured(capture, url=url).metadata.get(CAPTURED, False) == (is_captured == "yes")


CAPTURED_URLS = """
POST https://api.example.com/chat/completions
POST https://api.openai.com/v1/chat/completions?api-version=1
POST http://127.0.0.1:9/v1/chat/completions
POST https://api.anthropic.com/v1/messages?beta=true
POST https://api.anthropic.com/v1/messages/count_tokens
POST https://api.openai.com/v1/responses
POST https://generativelanguage.googleapis.com/v1beta/models/m:streamGenerateContent?alt=sse
GET  https://api.openai.com/v1/models
GET  https://chatgpt.com/backend-api/codex/models?client_version=1
POST https://gateway.example/openai/deployments/gpt/chat/completions?a=b
POST https://gateway.example/my/gateway/v1/messages
"""
OTHER_URLS = """
GET     https://api.openai.com/v1/chat/completions
PUT     https://api.openai.com/v1/chat/completions
OPTIONS https://api.openai.com/v1/chat/completions
POST    https://api.openai.com/v1/chat/completions/
POST    https://api.openai.com/v1/chat/completions/5
POST    https://api.openai.com/v1/chat/completions;x
POST    https://api.openai.com/v1/Chat/completions
POST    https://api.openai.com/v1/chat%2Fcompletions
POST    https://api.openai.com/v1/models
GET     https://api.openai.com/v1/engines/gpt-x
GET     https://example.com/?/v1/models
"""


class TestModelCalls:
    @pytest.mark.parametrize(("method", "url"), rows(CAPTURED_URLS))
    def test_they_go_to_the_endpoint_and_nowhere_else(self, recorder, capture, method, url):
        flow = captured(capture, method, url)
        assert (flow.metadata[CAPTURED], flow.response) == (True, None)
        path = request(method, url).request.path
        assert flow.request.url == f"http://127.0.0.1:{recorder.endpoint.port}{path}"

    @pytest.mark.parametrize(("method", "url"), rows(OTHER_URLS))
    def test_other_requests_are_left_alone(self, capture, method, url):
        flow = request(method, url, {"authorization": "Bearer key"})
        before = flow.request.get_state()
        capture.requestheaders(flow)
        assert CAPTURED not in flow.metadata
        assert flow.request.get_state() == before

    def test_those_of_a_judge_are_left_alone_and_its_end_is_not(self, recorder, capture):
        run = recorder.endpoint.writer.run
        SessionOptions(allow=("api.openai.com",), model_calls=False).write(run, "s1/judge")
        for url, is_captured in ((COMPLETIONS, False), ("http://session.rolltap/end", True)):
            flow = request(url=url)
            flow.metadata[SESSION] = "s1/judge"
            capture.requestheaders(flow)
            assert flow.metadata.get(CAPTURED, False) is is_captured

    def test_their_headers_and_paths_become_text(self, capture):
        flow = request(url=COMPLETIONS + "?a=b%20c")
        flow.request.headers = http.Headers([(b"X-OpenAI-Subagent", b"\xff\x1b[2J\xc3\xa9")])
        flow.request.data.path += b"&d=\xff\x1b\xe9"
        capture.requestheaders(flow)
        assert flow.request.headers["x-openai-subagent"] == "\\udcff\\x1b[2Jé"
        assert flow.request.path == "/v1/chat/completions?a=b%20c&d=%FF%1B%E9"

    @pytest.mark.parametrize(
        "path", [b"/\xff/v1/messages", b"/v1beta/models/a\x1b \xe9:generateContent", b"/\x1b/end"]
    )
    def test_the_endpoint_finds_the_route_that_was_found_here(self, capture, path):
        flow = request()
        flow.request.data.path = path
        capture.requestheaders(flow)
        route = routes.find_route("POST", flow.request.path, {})
        assert flow.metadata.get(CAPTURED, False) is (route is not None)

    @pytest.mark.parametrize(
        ("path", "kind", "detail"),
        [
            ("/v1/responses", "refused", "a WebSocket, which is not served"),
            ("/", "refused", "a WebSocket, which is not served"),
            ("/v1/realtime?model=m", "uncaptured", "refused: OpenAI's Realtime API"),
            ("/ws/google.BidiGenerateContent", "uncaptured", "refused: Google's Live API"),
        ],
    )
    def test_a_websocket_is_refused_so_that_codex_falls_back_at_once(
        self, capture, told, path, kind, detail
    ):
        flow = captured(capture, "GET", f"https://api.example{path}", {"Upgrade": "WebSocket"})
        assert flow.response.status_code == 426
        assert CAPTURED not in flow.metadata
        (event,) = told()
        assert (event["kind"], event["detail"]) == (kind, detail)

    def test_nothing_is_captured_without_a_session_or_after_another_answer(self, capture):
        answered = request()
        answered.response = http.Response.make(407)
        capture.requestheaders(answered)
        unknown = request()
        del unknown.metadata[SESSION]
        with pytest.raises(KeyError):
            capture.requestheaders(unknown)
        assert CAPTURED not in {**answered.metadata, **unknown.metadata}

    def test_the_harnesss_keys_are_removed(self, capture):
        names = ("Authorization", "X-Api-Key", "x-goog-api-key", "Api-Key", "Cookie")
        keys = dict.fromkeys(names, "secret")
        flow = captured(capture, headers={**keys, "user-agent": "harness"})
        assert "secret" not in flow.request.headers.values()
        assert flow.request.headers["user-agent"] == "harness"

    def test_a_harness_cannot_forge_the_headers_of_another_session(self, recorder, capture):
        names = ("X-Rolltap-Session", "x-rolltap-host", "X-ROLLTAP-SECRET", "x-rolltap-other")
        flow = request(headers=dict.fromkeys(names, "s2"))
        flow.request.headers.add("x-rolltap-session", "s3")
        flow.request.headers["host"] = "spoofed.com"
        capture.requestheaders(flow)
        ours = {}
        for name, value in flow.request.headers.items(multi=True):
            if name.lower().startswith("x-rolltap-"):
                assert name not in ours
                ours[name] = value
        assert ours == recorder.endpoint.headers("s1", "api.openai.com")
        assert ours["x-rolltap-session"] == "s1"

    async def test_the_endpoint_answers_what_was_captured_and_nothing_else(self, capture, told):
        flow = captured(capture)
        async with aiohttp.ClientSession() as client:
            for headers, status in ((dict(flow.request.headers), 400), ({}, 403)):
                post = client.post(flow.request.url, data=b"{", headers=headers)
                async with post as response:
                    assert response.status == status
        assert [event["kind"] for event in told()] == ["rejected"]

    async def test_the_system_chooses_the_port_of_a_connection_to_the_endpoint(
        self, recorder, capture
    ):
        address = ("127.0.0.1", recorder.endpoint.port)
        data = ServerConnectionHookData(Server(address=address), captured(capture).client_conn)
        await ctx.master.addons.handle_lifecycle(ServerConnectHook(data))
        assert data.server.sockname is None


async def test_nothing_is_captured_before_a_run_is_open():
    async with running({}) as recorder:
        flow = captured(Capture(recorder, no_host))
        recorder.record(Event(kind="refused"))
    assert CAPTURED not in flow.metadata
