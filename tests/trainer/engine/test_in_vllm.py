"""The middleware as vLLM's environment has it: without rolltap, in an ASGI server."""

import asyncio
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.trainer.engine import in_vllm
from rolltap.trainer.engine.in_vllm.rolltap_key import DIGEST, RequireKey
from rolltap.trainer.engine.in_vllm.rolltap_scores import HEADER, ScoresAlone

KEY = "sesame-" * 6
DIGEST_OF_KEY = hashlib.sha256(KEY.encode()).hexdigest()
FOLDER = Path(in_vllm.__file__).parent


@pytest.fixture
def ask(monkeypatch):
    """Return a function that sends a request through the middleware. It returns what the server
    gets to send."""
    monkeypatch.setenv(DIGEST, DIGEST_OF_KEY)

    async def app(scope, receive, send):
        await send({"type": "passed"})

    async def ask(path, *authorizations, kind="http", **scope):
        sent = []

        async def send(message):
            sent.append(message.get("status") or message["type"])

        headers = [(b"authorization", value.encode("latin-1")) for value in authorizations]
        await RequireKey(app)({"type": kind, "path": path, "headers": headers, **scope}, None, send)
        return sent

    return ask


@pytest.mark.parametrize(
    "path", ["/pause", "", "/", "/health/", "//health", "/health/../pause", "/HEALTH"]
)
async def test_a_route_requires_the_key(ask, path):
    for method in ("GET", "OPTIONS", "HEAD", "CONNECT"):
        assert await ask(path, method=method) == [401, "http.response.body"]
    assert await ask(path, f"Bearer {KEY}") == ["passed"]


NOT_THE_KEY = [
    KEY,
    f"Basic {KEY}",
    "Bearer ",
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY} ",
    f"Bearer {DIGEST_OF_KEY}",
]


@pytest.mark.parametrize(
    "authorizations",
    [*([one] for one in NOT_THE_KEY), ["Bearer \xff"], ["Bearer wrong", f"Bearer {KEY}"]],
)
async def test_what_is_not_the_key_is_refused(ask, authorizations):
    assert await ask("/pause", *authorizations) == [401, "http.response.body"]


async def test_a_web_socket_without_the_key_is_closed(ask):
    assert await ask("/v1/realtime", kind="websocket") == ["websocket.close"]
    assert await ask("/v1/realtime", f"Bearer {KEY}", kind="websocket") == ["passed"]
    assert await ask("/health") == await ask("", kind="lifespan") == ["passed"]  # these need none


def test_a_server_without_a_digest_does_not_start(monkeypatch):
    monkeypatch.delenv(DIGEST, raising=False)
    with pytest.raises(KeyError, match=DIGEST):
        RequireKey(None)


def test_they_are_imported_without_rolltap_and_without_other_packages():
    names = sorted(path.stem for path in FOLDER.glob("rolltap_*.py"))
    assert names == ["rolltap_key", "rolltap_owner", "rolltap_scores"]
    imports = f"import json, sys; sys.path.insert(0, {str(FOLDER)!r}); import {', '.join(names)}"
    show = f"{imports}; print(json.dumps([*sys.modules]))"
    printed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", show], capture_output=True, text=True, check=True
    )
    modules = {name.split(".")[0] for name in json.loads(printed.stdout)} - {*names, "__main__"}
    assert modules <= set(sys.stdlib_module_names) | {"_distutils_hack", "sitecustomize"}


class TestScoresAlone:
    """Each request reports that it has begun, and ends when the test lets it."""

    @pytest.fixture
    def begun(self):
        return []

    @pytest.fixture
    def request_(self, begun):
        """Return a function that starts a request, and returns it and what ends it."""
        ends = {}

        async def app(scope, receive, send):
            begun.append(scope["name"])
            await ends[scope["name"]].wait()
            if scope["name"] == "broken":
                raise OSError("the client is gone")

        middleware = ScoresAlone(app)

        async def request_(
            name, path="/inference/v1/generate", method="POST", alone=False, kind="http"
        ):
            ends[name] = asyncio.Event()
            headers = [(HEADER.encode(), b"1")] if alone else []
            scope = {"type": kind, "method": method, "path": path, "headers": headers, "name": name}
            running = asyncio.create_task(middleware(scope, None, None))
            await settled()
            return running, ends[name]

        return request_

    async def test_calls_run_beside_each_other_and_a_score_alone_in_the_order_of_arrival(
        self, request_, begun
    ):
        first = await request_("first")
        second = await request_("second", "/v1/chat/completions")
        score = await request_("score", "/v1/completions", alone=True)
        later = await request_("later")
        again = await request_("again", "/v1/completions", alone=True)
        assert begun == ["first", "second"]
        await end(first)
        assert begun == ["first", "second"]
        await end(second)
        assert begun == ["first", "second", "score"]
        await end(score)
        assert begun == ["first", "second", "score", "later"]
        await end(later)
        assert begun == ["first", "second", "score", "later", "again"]
        await end(again)

    async def test_a_call_that_fails_or_is_cancelled_keeps_nothing_waiting(self, request_, begun):
        broken = await request_("broken")
        left = await request_("left")
        waiting = await request_("waiting", alone=True)
        behind = await request_("behind")
        broken[1].set()
        with pytest.raises(OSError, match="gone"):
            await broken[0]
        for running, _ in (waiting, left):
            running.cancel()
            await settled()
        assert begun == ["broken", "left", "behind"]
        await end(behind)

    @pytest.mark.parametrize(
        ("path", "method", "kind"),
        [
            ("/pause", "POST", "http"),
            ("/v1/load_lora_adapter", "POST", "http"),
            ("/v1/models", "GET", "http"),
            ("/v1/realtime", "GET", "websocket"),
        ],
    )
    async def test_operation_does_not_wait(self, request_, begun, path, method, kind):
        score = await request_("score", alone=True)
        operation = await request_("operation", path, method, kind=kind)
        assert begun == ["score", "operation"]
        await end(operation)
        await end(score)


async def settled():
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def end(request):
    running, end = request
    end.set()
    await running
    await settled()
