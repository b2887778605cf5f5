"""The engine that leads the programs, whose context window fits the longest first prompt; a server for their tools."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rolltap.trainer.doctor.scripted_engine import ScriptedEngine


@pytest.fixture
def scripted_engine(tokenizer):
    with ScriptedEngine(tokenizer, max_model_len=200_000) as engine:
        yield engine


class Pong(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"pong")

    def log_message(self, *_):
        pass


@pytest.fixture
def local_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pong)
    threading.Thread(target=server.serve_forever).start()
    yield f"http://localhost:{server.server_port}/"
    server.shutdown()
    server.server_close()
