"""A server with fixed answers in place of vLLM. Run as a program, it replaces `vllm serve`."""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

AnyServer = TypeVar("AnyServer", bound=ThreadingHTTPServer)

HEALTHY: dict[str, Any] = {
    "/health": "",
    "/version": {"version": "0.32.0"},
    "/openapi.json": {
        "paths": {"/inference/v1/generate": {}, "/weight_info": {}, "/collective_rpc": {}}
    },
}


class Answering(ThreadingHTTPServer):
    """An HTTP server. `answers` maps a path to JSON, to a status and a text, or to a function of
    method and body.

    Other paths get FastAPI's 404.
    """

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers = dict(HEALTHY)
        self.requests: list[tuple[str, Any]] = []
        """Path and parsed body of each request."""
        self.digest: str | None = None
        """The SHA-256 digest of the key that it requires, if any."""


class _Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        digest = hashlib.sha256(
            self.headers.get("authorization", "").removeprefix("Bearer ").encode()
        ).hexdigest()
        if self.path != "/health" and self.server.digest not in (None, digest):
            self.send_error(401)
            return
        path = self.path.partition("?")[0]
        sent = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.loads(sent) if sent else None
        self.server.requests.append((self.path, body))
        answer = self.server.answers.get(path, (404, '{"detail":"Not Found"}'))
        answer = answer(self.command, body) if callable(answer) else answer
        status, text = answer if isinstance(answer, tuple) else (200, json.dumps(answer))
        with suppress(ConnectionError):  # a client that gave up, or was killed
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        """Suppress the access log."""


@contextmanager
def serving(server: AnyServer) -> Iterator[AnyServer]:
    """Run an HTTP server in a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


AS_VLLM = f'exec {sys.executable} {__file__} "$@"'
"""A shell script that is this program, in place of vLLM."""

if __name__ == "__main__":
    server = Answering(int(sys.argv[sys.argv.index("--port") + 1]))
    server.digest = os.environ.get("ROLLTAP_ENGINE_KEY_SHA256")
    server.serve_forever()
