import logging
import re
from contextlib import asynccontextmanager

import aiohttp
import pyarrow
import pytest
from mitmproxy import ctx, exceptions, http
from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.connection import Server
from mitmproxy.proxy.server_hooks import ServerConnectHook, ServerConnectionHookData
from mitmproxy.test import taddons, tflow

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.routes import Route
from rolltap.addons.options import NEUTRAL_SAMPLING
from rolltap.addons.proxy.capture import CAPTURED, Capture
from rolltap.addons.proxy.egress import Egress
from rolltap.addons.proxy.sessions import SESSION
from rolltap.addons.recorder import Startup
from rolltap.addons.store.metadata import RUN_FILE, read_metadata, write_metadata
from rolltap.addons.store.records import Event
from rolltap.addons.store.tables import read_rows

COMPLETIONS = "https://api.openai.com/v1/chat/completions"


@pytest.fixture
def options(tokenizer_folder, tmp_path):
    """Return the options of a recorder. No server listens at its engine's address."""
    return {
        "rolltap_out": str(tmp_path / "run"),
        "rolltap_engine": "http://127.0.0.1:1",
        "rolltap_model": str(tokenizer_folder),
        "rolltap_renderer": "qwen3",
        "rolltap_prefix": ["/my/*"],
    }


@asynccontextmanager
async def running(options, addon, *others):
    """Yield the context of an addon with these options. It is stopped at the end."""
    with taddons.context(Proxyserver(), Startup(), addon, *others) as context:
        context.configure(addon, **options)
        addon.running()
        yield context
        await addon.done()


@pytest.fixture
async def capture(options):
    """Yield the addon of a running recorder."""
    addon = Capture()
    async with running(options, addon):
        yield addon


def request(method="POST", url=COMPLETIONS, headers=()):
    flow = tflow.tflow(req=http.Request.make(method, url, headers=dict(headers)))
    flow.metadata[SESSION] = "s1"
    return flow


def captured(capture, *asked, **fields):
    """Return a request that the addon has seen."""
    flow = request(*asked, **fields)
    capture.requestheaders(flow)
    return flow


class TestHostsOfTheUser:
    """A host that the user allowed by its name is an application, not a provider."""

    @pytest.fixture
    async def capture(self, options):
        egress = Egress(lambda event: None, lambda client: "s1")
        addon = Capture(egress.is_named)
        async with running({**options, "rolltap_prefix": ["/v2"]}, addon, egress) as context:
            context.configure(egress, rolltap_allow=["app.example", "*.wild.example"])
            yield addon

    @pytest.mark.parametrize(
        ("url", "is_captured"),
        [
            ("https://app.example/api/v1/messages", False),
            ("https://app.example/api/responses", False),
            ("https://app.example/v2/chat/completions", True),
            ("https://app.example/v1/messages", True),
            ("https://app.example/openai/v1/responses", True),
            ("https://x.wild.example/api/v1/messages", True),
            ("https://openrouter.ai/api/v1/chat/completions", True),
        ],
    )
    async def test_it_keeps_paths_that_only_an_unspecific_prefix_makes_model_calls(self, capture, url, is_captured):
        assert captured(capture, url=url).metadata.get(CAPTURED, False) is is_captured


class TestModelCalls:
    @pytest.mark.parametrize(
        ("method", "url"),
        [
            ("POST", "https://api.example.com/chat/completions"),
            ("POST", COMPLETIONS + "?api-version=1"),
            ("POST", "http://127.0.0.1:9/v1/chat/completions"),
            ("POST", "https://api.anthropic.com/v1/messages?beta=true"),
            ("POST", "https://api.anthropic.com/v1/messages/count_tokens"),
            ("POST", "https://api.openai.com/v1/responses"),
            ("POST", "https://generativelanguage.googleapis.com/v1beta/models/m:streamGenerateContent?alt=sse"),
            ("GET", "https://api.openai.com/v1/models"),
            ("GET", "https://chatgpt.com/backend-api/codex/models?client_version=1"),
        ],
    )
    def test_they_go_to_the_endpoint_and_nowhere_else(self, capture, method, url):
        flow = captured(capture, method, url)
        assert (flow.metadata[CAPTURED], flow.response) == (True, None)
        assert flow.request.url == f"http://127.0.0.1:{capture.endpoint.port}{request(method, url).request.path}"

    @pytest.mark.parametrize(
        ("method", "url"),
        [
            ("GET", COMPLETIONS),
            ("PUT", COMPLETIONS),
            ("OPTIONS", COMPLETIONS),
            ("POST", COMPLETIONS + "/"),
            ("POST", COMPLETIONS + "/5"),
            ("POST", COMPLETIONS + ";x"),
            ("POST", "https://api.openai.com//v1/chat/completions"),
            ("POST", "https://api.openai.com/V1/chat/completions"),
            ("POST", "https://api.openai.com/v1/chat%2Fcompletions"),
            ("POST", "https://api.openai.com/x/../v1/chat/completions"),
            ("POST", "https://api.openai.com/v1/models"),
            ("GET", "https://api.openai.com/v1/engines/gpt-x"),
            ("GET", "https://example.com/?/v1/models"),
        ],
    )
    def test_other_requests_are_left_alone(self, capture, method, url):
        flow = request(method, url, {"authorization": "Bearer key"})
        before = flow.request.get_state()
        capture.requestheaders(flow)
        assert CAPTURED not in flow.metadata
        assert flow.request.get_state() == before

    @pytest.mark.parametrize("prefix", ["/openai/deployments/gpt", "/my/gateway"])
    def test_the_prefix_of_a_gateway_is_known_or_named_by_the_option_and_goes_apart(self, capture, prefix):
        flow = captured(capture, url=f"https://gateway.example{prefix}/chat/completions?a=b")
        assert flow.request.path == "/chat/completions?a=b"
        assert flow.request.headers["x-rolltap-prefix"] == prefix

    def test_their_headers_and_paths_become_text(self, capture):
        flow = request(url=COMPLETIONS + "?a=b%20c")
        flow.request.headers = http.Headers([(b"X-OpenAI-Subagent", b"\xff\x1b[2J\xc3\xa9")])
        flow.request.data.path += b"&d=\xff\x1b\xe9"
        capture.requestheaders(flow)
        assert flow.request.headers["x-openai-subagent"] == "\\udcff\\x1b[2Jé"
        assert flow.request.path == "/v1/chat/completions?a=b%20c&d=%FF%1B%E9"

    @pytest.mark.parametrize(
        ("path", "told"),
        [
            ("/v1/responses", ("refused", "a WebSocket, which is not served")),
            ("/", ("refused", "a WebSocket, which is not served")),
            ("/v1/realtime?model=m", ("uncaptured", "refused: OpenAI's Realtime API")),
            ("/ws/google.ai.v1.Service.BidiGenerateContent", ("uncaptured", "refused: Google's Live API")),
        ],
    )
    def test_a_websocket_is_refused_so_that_codex_falls_back_at_once(self, capture, path, told):
        flow = captured(capture, "GET", f"https://api.example{path}", {"Upgrade": "WebSocket"})
        assert (flow.response.status_code, CAPTURED in flow.metadata) == (426, False)
        (event,) = read_rows(capture.endpoint.writer.run, "events")
        assert (event["kind"], event["detail"]) == told

    def test_nothing_is_captured_without_a_session_or_after_another_answer(self, capture):
        answered, unknown = request(), request()
        answered.response = http.Response.make(407)
        capture.requestheaders(answered)
        del unknown.metadata[SESSION]
        with pytest.raises(KeyError):
            capture.requestheaders(unknown)
        assert [CAPTURED in flow.metadata for flow in (answered, unknown)] == [False, False]

    def test_the_harnesss_keys_are_removed(self, capture):
        keys = dict.fromkeys(("Authorization", "X-Api-Key", "x-goog-api-key", "Api-Key", "Cookie"), "secret")
        flow = captured(capture, headers={**keys, "user-agent": "harness"})
        assert "secret" not in flow.request.headers.values()
        assert flow.request.headers["user-agent"] == "harness"

    def test_a_harness_cannot_forge_the_headers_of_another_session(self, capture):
        forged = {"X-Rolltap-Session": "s2", "x-rolltap-host": "x", "X-ROLLTAP-SECRET": "x", "x-rolltap-route": "end"}
        flow = request(headers=forged)
        flow.request.headers.add("x-rolltap-session", "s3")
        flow.request.headers["host"] = "spoofed.com"
        capture.requestheaders(flow)
        ours = {name: value for name, value in flow.request.headers.items(multi=True) if name.startswith("x-rolltap-")}
        assert ours == capture.endpoint.headers("s1", "api.openai.com", Route(routes.CHAT, "generate"))
        assert ours["x-rolltap-session"] == "s1"

    async def test_the_endpoint_answers_what_was_captured_and_nothing_else(self, capture):
        flow = captured(capture)

        async def status(headers):
            async with (
                aiohttp.ClientSession() as client,
                client.post(flow.request.url, data=b"{", headers=headers) as response,
            ):
                return response.status

        assert await status(dict(flow.request.headers)) == 400
        assert await status({}) == 403
        assert [event["kind"] for event in read_rows(capture.endpoint.writer.run, "events")] == ["rejected"]

    async def test_the_system_chooses_the_port_of_a_connection_to_the_endpoint(self, capture):
        address = ("127.0.0.1", capture.endpoint.port)
        data = ServerConnectionHookData(Server(address=address), captured(capture).client_conn)
        await ctx.master.addons.handle_lifecycle(ServerConnectHook(data))
        assert data.server.sockname is None


class TestOptions:
    """Options are checked at start-up. mitmdump exits when an error is logged then."""

    @pytest.fixture
    async def configure(self, options):
        capture = Capture()
        with taddons.context(Proxyserver(), Startup(), capture) as context:
            yield lambda **changes: context.configure(capture, **{**options, **changes})
            capture.running()
            await capture.done()

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("rolltap_out", "", r"rolltap_out is not set: add --set rolltap_out="),
            ("rolltap_model", "", r"rolltap_model is not set: add --set rolltap_model="),
            ("rolltap_engine", "http://", r"rolltap_engine is 'http://': give a URL such as http://"),
            (
                "rolltap_model",
                "{tmp}",
                r"rolltap_model, rolltap_renderer, rolltap_tool_parser: the folder .* is no model: it has no tokenizer",
            ),
            ("rolltap_renderer", "gpt-oss", r"rolltap_renderer, .*: cannot use the renderer 'gpt-oss' with"),
            ("rolltap_tool_parser", "gpt", r"rolltap_tool_parser: there is no tool parser 'gpt': choose auto, hermes"),
            ("rolltap_sampling", "{", r"rolltap_sampling is not JSON"),
            ("rolltap_sampling", "[1]", r"rolltap_sampling is '\[1\]': give a JSON object"),
            ("rolltap_sampling", '{"temp": 1}', r"unknown key 'temp': use .*temperature"),
            ("rolltap_sampling", '{"top_p": "1"}', r"rolltap_sampling has top_p = '1': give a number"),
            ("rolltap_sampling", '{"top_k": true}', r"rolltap_sampling has top_k = True: give a number"),
            ("rolltap_out", "{tmp}/file", r"rolltap_out: .*file"),
            ("rolltap_max_sampled_tokens", -1, r"rolltap_max_sampled_tokens is -1: give 0 or more"),
            ("rolltap_images", "show", r"rolltap_images is 'show': choose hide, refuse"),
            ("rolltap_prefix", ["my/gateway"], r"rolltap_prefix is 'my/gateway': give the start of a path, such as"),
            ("rolltap_prefix", ["/v", "/my/"], r"rolltap_prefix is '/my/': give"),
        ],
    )
    def test_a_refusal_names_the_option_its_value_and_what_to_do(self, configure, caplog, tmp_path, name, value, words):
        (tmp_path / "file").touch()
        configure(**{name: value.replace("{tmp}", str(tmp_path)) if isinstance(value, str) else value})
        (refusal,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert re.search(words, refusal.message)
        assert not (tmp_path / "run").exists()

    def test_the_run_of_another_model_is_refused(self, configure, caplog, tmp_path):
        write_metadata(tmp_path / "run", {"tokenizer_sha256": "other"})
        configure()
        assert re.search(r"rolltap_out: .* another tokenizer: choose a new folder", caplog.text)

    def test_they_cannot_change_while_a_run_is_recorded_and_others_can(self, capture, caplog):
        ctx.options.update(stream_large_bodies="1m")
        assert caplog.text == ""
        with pytest.raises(exceptions.OptionsError, match="cannot change while a run is recorded"):
            ctx.options.update(rolltap_sampling='{"temperature": 0.5}')
        assert ctx.options.rolltap_sampling == "{}"

    def test_a_template_that_no_renderer_knows_is_warned_of(self, configure, caplog, tmp_path, save_tokenizer):
        save_tokenizer(tmp_path / "model", "{% for message in messages %}{{ message.content }}{% endfor %}")
        configure(rolltap_model=str(tmp_path / "model"), rolltap_renderer="auto")
        assert "rolltap_tool_parser" in caplog.text
        assert "rolltap_renderer" in caplog.text


class TestRun:
    def test_its_metadata_says_how_it_was_recorded(self, capture, options, rendering):
        metadata = read_metadata(capture.endpoint.writer.run)
        digest = rendering.digests["tokenizer_sha256"]
        expected = {"model": options["rolltap_model"], "renderer": "qwen3", "tokenizer_sha256": digest}
        assert expected.items() <= metadata.items()
        (recorder,) = metadata["recorders"]
        assert (recorder["engines"], recorder["sampling"]) == (["http://127.0.0.1:1"], NEUTRAL_SAMPLING)
        assert recorder["versions"]["pyarrow"] == pyarrow.__version__

    def test_a_run_that_cannot_be_written_to_is_logged(self, capture, tmp_path, caplog):
        run = capture.endpoint.writer.run
        (run / RUN_FILE).unlink()
        run.rmdir()
        capture.record(Event(kind="refused"))
        assert f"cannot write to {run}" in caplog.text


async def test_what_differs_from_the_defaults_is_recorded(options):
    sampling = '{"temperature": 0.7, "max_tokens": 64}'
    changes = {"rolltap_sampling": sampling, "rolltap_keep_adapter": False, "rolltap_max_sampled_tokens": 500}
    capture = Capture()
    async with running({**options, **changes}, capture):
        pass
    (recorder,) = read_metadata(capture.endpoint.writer.run)["recorders"]
    assert recorder["sampling"] == {**NEUTRAL_SAMPLING, "temperature": 0.7, "max_tokens": 64}
    assert (recorder["keep_adapter"], recorder["accept_rewards"]) == (False, False)
    assert (recorder["limits"]["max_sampled_tokens"], recorder["limits"]["max_calls"]) == (500, 0)


async def test_nothing_is_captured_before_a_run_is_open():
    capture = Capture()
    async with running({}, capture):
        flow = captured(capture)
        capture.record(Event(kind="refused"))
    assert CAPTURED not in flow.metadata
