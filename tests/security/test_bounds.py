"""An agent sends little that becomes much: compressed bytes, JSON, unfinished bodies, long names."""

import json
import os
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import brotli
import pytest

from rolltap.addons.endpoint.body import SESSION_QUOTA
from tests.recorder_process import CHAT, HELLO
from tests.security.raw import News, call, credentials, plain, read_head, recording
from tests.security.test_bodies import MEGABYTE, resident

BOMB = b'{"model":"m","messages":[' + b",".join([b"[]"] * (32 * MEGABYTE // 3 - 10)) + b"]}"
NUMBERS = b'{"model":"m","messages":[],"tools":[{"parameters":{"enum":[' + b"1," * 8_000_000 + b"1]}}]}"


@pytest.fixture(scope="module")
def recorder(tmp_path_factory, tokenizer, tokenizer_folder):
    folder = tmp_path_factory.mktemp("bounds")
    with recording(folder, tokenizer, tokenizer_folder, "rolltap_websocket=true") as recorder:
        with recorder.client() as client:
            client.post(CHAT, json=HELLO)
        yield recorder
        assert recorder.stop() == 0
        assert "Traceback" not in recorder.log()


@pytest.fixture
def peak(recorder):
    """Return a function that tells how much more memory the recorder has had than at the start of the test."""
    process = Path("/proc", str(recorder.process.pid))
    (process / "clear_refs").write_text("5")
    before = resident(process, "VmRSS")
    return lambda: resident(process, "VmHWM") - before


@pytest.mark.parametrize("body", [BOMB, NUMBERS], ids=["lists", "numbers"])
def test_json_of_millions_of_values_is_not_parsed(recorder, peak, body):
    with recorder.client() as client:
        for _ in range(3):
            refused = client.post(CHAT, content=zlib.compress(body), headers={"content-encoding": "deflate"})
            assert refused.status_code == 413
            assert "more than 500,000 values" in refused.json()["error"]["message"]
    assert peak() < 200 * MEGABYTE


def test_slow_decompression_keeps_no_other_session_waiting(recorder):
    body = brotli.compress(os.urandom(6 * MEGABYTE), quality=0)
    head = call().partition(b"Content-Length")[0] + b"Content-Encoding: br\r\n"
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        attacks = [stack.enter_context(plain(recorder)) for _ in range(7)]
        for connection in attacks:
            connection.settimeout(60)
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        ends = [threads.submit(read_head, connection) for connection in attacks]
        answered = 0
        while not all(end.done() for end in ends):
            with recorder.client(f"fresh{answered}") as other:  # its first request also reads its rows
                assert other.post(CHAT, json=HELLO).status_code == 200
            answered += 1
    assert answered > 3
    # not JSON; or, on a slow machine, no room for it in time, for the session or for all
    assert {end.result()[:12] for end in ends} <= {b"HTTP/1.1 400", b"HTTP/1.1 429", b"HTTP/1.1 503"}


def test_unfinished_bodies_of_a_session_share_a_bounded_memory(recorder, peak):
    head = call().partition(b"Content-Length")[0] + b"Content-Length: %d\r\n\r\n" % (31 * MEGABYTE)
    with ExitStack() as stack:
        for _ in range(12):
            connection = stack.enter_context(plain(recorder))
            connection.setblocking(False)
            connection.sendall(head)
            send_all_that_is_taken(connection, bytes(30 * MEGABYTE))
        with recorder.client("s2") as other:
            assert other.post(CHAT, json=HELLO).status_code == 200
        assert peak() < SESSION_QUOTA + 60 * MEGABYTE


def test_stored_answers_that_nobody_reads_share_a_bounded_memory(recorder, peak):
    url = "https://api.openai.com/v1/conversations"
    with recorder.client("s5") as client:
        created = client.post(url, json={"items": [{"role": "user", "content": "x" * (7 * MEGABYTE // 2)}]})
        assert created.status_code == 200, created.text
    target = f"GET http://api.openai.com/v1/conversations/{created.json()['id']}/items HTTP/1.1\r\n".encode()
    asked = []
    with ExitStack() as stack:
        for _ in range(60):
            connection = stack.enter_context(plain(recorder))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(target + b"Host: api.openai.com\r\n" + credentials("s5") + b"\r\n")
            asked.append(connection)
        for connection in asked:
            connection.settimeout(60)
            read_head(connection)
        assert peak() < SESSION_QUOTA + 100 * MEGABYTE


def send_all_that_is_taken(connection, data):
    """Send until the other side has read nothing for a while."""
    connection.settimeout(1)
    view = memoryview(data)
    try:
        while view:
            view = view[connection.send(view[:65536]) :]
    except TimeoutError:
        pass


def test_a_long_model_name_is_refused_and_written_nowhere(recorder):
    news = News(recorder)
    with recorder.client("s3") as client:
        refused = client.post(CHAT, json={**HELLO, "model": "M" * MEGABYTE})
        assert refused.status_code == 400
        path = "/v1beta/models/" + "m" * 60_000 + ":generateContent"
        assert client.post(f"https://generativelanguage.googleapis.com{path}", json={}).status_code == 400
    assert len(news("rejected")) == 2
    assert all(len(event["path"]) < 600 for event in recorder.rows("events"))


def test_the_conversations_of_a_websocket_do_not_grow_without_end(recorder, peak):
    handshake = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    target = b"GET http://api.openai.com/v1/responses HTTP/1.1\r\nHost: api.openai.com\r\n"
    item = {"role": "user", "content": "x" * (6 * MEGABYTE)}
    request = {"type": "response.create", "generate": False, "model": "m", "input": [item]}
    with plain(recorder) as connection:
        connection.settimeout(30)
        connection.sendall(target + credentials("s4") + handshake + key)
        assert read_head(connection).startswith(b"HTTP/1.1 101")
        previous = None
        for _ in range(12):
            connection.sendall(frame({**request, "previous_response_id": previous}))
            event = last_event(connection)
            assert event["type"] == "response.completed"
            previous = event["response"]["id"]
        # there was no room for it, or for one that it names
        connection.sendall(frame({**request, "generate": True, "previous_response_id": previous}))
        assert last_event(connection)["error"]["code"] == "previous_response_not_found"
    assert peak() < 250 * MEGABYTE


def frame(message):
    data = json.dumps(message).encode()
    return b"\x81\xff" + len(data).to_bytes(8, "big") + bytes(4) + data


def last_event(connection):
    """Return the event that ends a response."""
    while True:
        length = receive(connection, 2)[1]
        if length > 125:
            length = int.from_bytes(receive(connection, 2 if length == 126 else 8), "big")
        event = json.loads(receive(connection, length))
        if event["type"] != "response.created":
            return event


def receive(connection, size):
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        assert received
        data += received
    return data
