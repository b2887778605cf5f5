"""The middleware as vLLM's environment has it: without rolltap, in an ASGI server."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.trainer.engine import in_vllm
from rolltap.trainer.engine.in_vllm.rolltap_key import DIGEST, RequireKey

KEY = "sesame-" * 6
DIGEST_OF_KEY = hashlib.sha256(KEY.encode()).hexdigest()
FOLDER = Path(in_vllm.__file__).parent


@pytest.fixture
def ask(monkeypatch):
    """Return a function that sends a request through the middleware. It returns what the server gets to send."""
    monkeypatch.setenv(DIGEST, DIGEST_OF_KEY)

    async def app(scope, receive, send):
        await send({"type": "passed"})

    async def ask(path, *authorizations, kind="http", **scope):
        sent = []

        async def send(message):
            sent.append(message)

        headers = [(b"authorization", value.encode("latin-1")) for value in authorizations]
        await RequireKey(app)({"type": kind, "path": path, "headers": headers, **scope}, None, send)
        return [message["type"] if kind != "http" else message.get("status", message["type"]) for message in sent]

    return ask


ROUTES = ["/pause", "/update_weights", "/v1/load_lora_adapter", "/inference/v1/generate", "/collective_rpc", "/metrics"]


@pytest.mark.parametrize("path", [*ROUTES, "", "/", "/health/", "//health", "/health/../pause", "/HEALTH"])
async def test_a_route_requires_the_key(ask, path):
    for method in ("GET", "OPTIONS", "HEAD", "CONNECT"):
        assert await ask(path, method=method) == [401, "http.response.body"]
    assert await ask(path, f"Bearer {KEY}") == ["passed"]


NOT_THE_KEY = [KEY, f"Basic {KEY}", "Bearer ", f"Bearer {KEY[:-1]}", f"Bearer {KEY} ", f"Bearer {DIGEST_OF_KEY}"]


@pytest.mark.parametrize(
    "authorizations", [*([one] for one in NOT_THE_KEY), ["Bearer \xff"], ["Bearer wrong", f"Bearer {KEY}"]]
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
    assert names == ["rolltap_key", "rolltap_owner"]
    imports = f"import json, sys; sys.path.insert(0, {str(FOLDER)!r}); import {', '.join(names)}"
    show = f"{imports}; print(json.dumps([*sys.modules]))"
    printed = subprocess.run([sys.executable, "-I", "-S", "-c", show], capture_output=True, text=True, check=True)
    modules = {name.split(".")[0] for name in json.loads(printed.stdout)} - {*names, "__main__"}
    assert modules <= set(sys.stdlib_module_names) | {"_distutils_hack", "sitecustomize"}
