"""An agent sends a body that would fill or freeze the recorder, or a host sends one."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest
import zstandard

from tests.recorder_process import CHAT, HELLO
from tests.security.raw import News, call, credentials, plain, read, read_head, recording

MEGABYTE = 1 << 20
ROOM = 100 * MEGABYTE
"""Maximum growth of the recorder's memory. A body of the limit, 32 MiB, is held about twice."""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory, tokenizer, tokenizer_folder):
    folder = tmp_path_factory.mktemp("bodies")
    with recording(folder, tokenizer, tokenizer_folder, "rolltap_allow=127.0.0.3:*") as recorder:
        with recorder.client() as client:
            client.post(CHAT, json=HELLO)
        yield recorder
        assert recorder.stop() == 0
        assert "Traceback" not in recorder.log()
        assert "bug of rolltap" not in recorder.log()


@pytest.fixture(autouse=True)
def memory(recorder):
    """Check that the recorder's greatest memory in the test is bounded."""
    process = Path("/proc", str(recorder.process.pid))
    (process / "clear_refs").write_text("5")  # the peak begins again at what is used now
    before = resident(process, "VmRSS")
    yield
    assert resident(process, "VmHWM") - before < ROOM


def resident(process, name):
    (line,) = [line for line in (process / "status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


@pytest.fixture
def rejections(recorder):
    return News(recorder)


HEADS = {
    "no credentials": (b"POST http://api.openai.com/v1/chat/completions HTTP/1.1\r\nHost: api.openai.com\r\n", 407),
    "not served": (b"POST http://evil.example/x HTTP/1.1\r\nHost: evil.example\r\n" + credentials(), 404),
    "too long": (call().partition(b"Content-Length")[0], 413),
}


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "length"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_body_that_is_not_wanted_is_not_kept(recorder, rejections, kind, chunked):
    head, status = HEADS[kind]
    size, piece = 300, b"x" * MEGABYTE
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % (size * MEGABYTE)
    with plain(recorder) as connection:
        connection.settimeout(30)
        connection.sendall(head + length + b"\r\n\r\n")
        try:
            for _ in range(size):
                connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            connection.sendall(b"0\r\n\r\n" if chunked else b"")
        except ConnectionError:
            assert kind == "too long"  # the endpoint has answered, and does not read the rest
        reply = read_head(connection)
    assert reply.startswith(b"HTTP/1.1 %d" % status)
    if kind == "too long":
        assert rejections("rejected") == [("s1", "The request body is larger than 33,554,432 bytes.")]


def test_a_small_body_that_becomes_large_is_refused_while_others_go_on(recorder, rejections):
    bomb = zstandard.ZstdCompressor(level=3)
    body = bomb.compress(bytes(1 << 30))
    assert len(body) < 100_000
    lag = []
    done = threading.Event()

    def ask():
        with recorder.client("s2") as client:
            while not done.is_set():
                begin = time.monotonic()
                assert client.get("http://evil.example/").status_code == 404
                lag.append(time.monotonic() - begin)

    other = threading.Thread(target=ask)
    other.start()
    try:
        with recorder.client() as client:
            for _ in range(5):
                refused = client.post(CHAT, content=body, headers={"content-encoding": "zstd"})
                assert refused.status_code == 413
                assert "larger than" in refused.json()["error"]["message"]
    finally:
        done.set()
        other.join()
    assert len(lag) > 5
    assert len(rejections("rejected")) == 5


def test_a_body_that_cannot_be_decompressed_is_refused_in_the_words_of_the_api(recorder, rejections):
    with recorder.client() as client:
        url = "https://api.anthropic.com/v1/messages"
        refused = client.post(url, content=b"not zstd", headers={"content-encoding": "zstd"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert len(rejections("rejected")) == 1


def test_what_waits_behind_a_request_is_bounded(recorder, rejections):
    with plain(recorder) as connection:
        connection.sendall(b"GET http://a.example/" + b"x" * 70_000)
        assert read(connection).startswith(b"HTTP/1.1 431")
    with plain(recorder) as connection:
        connection.sendall(b"POST http://a.example/ HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"5;" + b"x" * 70_000)
        assert read(connection).startswith(b"HTTP/1.1 431")
    assert len(rejections("refused")) == 2


def test_a_large_reply_of_an_allowed_host_passes_by(recorder):
    size = 300
    with socket.create_server(("127.0.0.3", 0)) as server, plain(recorder) as connection:
        connection.settimeout(30)
        port = server.getsockname()[1]
        target = b"http://127.0.0.3:%d/ HTTP/1.1\r\nHost: 127.0.0.3\r\nConnection: close\r\n" % port
        connection.sendall(b"GET " + target + credentials() + b"\r\n")
        upstream, _ = server.accept()
        with upstream:
            read_head(upstream)

            def send():
                upstream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (size * MEGABYTE))
                for _ in range(size):
                    upstream.sendall(bytes(MEGABYTE))

            sender = threading.Thread(target=send)
            sender.start()
            read_head(connection)
            received = 0
            while received < size * MEGABYTE:
                received += len(connection.recv(MEGABYTE))
            sender.join()


def test_events_and_uploads_pass_as_they_arrive(recorder):
    with socket.create_server(("127.0.0.3", 0)) as server, plain(recorder) as connection:
        port = server.getsockname()[1]
        target = b"http://127.0.0.3:%d/ HTTP/1.1\r\nHost: 127.0.0.3\r\n" % port
        connection.sendall(b"POST " + target + credentials() + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        upstream, _ = server.accept()
        with upstream:
            upstream.settimeout(10)
            read_head(upstream)
            assert upstream.recv(100) == b"5\r\nhello\r\n"  # the request is not complete
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            upstream.sendall(head + b"9\r\ndata: 1\n\n\r\n")
            assert read_head(connection).startswith(b"HTTP/1.1 200")
            assert connection.recv(100) == b"9\r\ndata: 1\n\n\r\n"  # the reply is not complete


def test_a_model_call_in_chunks_is_answered(recorder):
    body = json.dumps(HELLO).encode()
    with recorder.client() as client:
        answered = client.post(CHAT, content=iter([body[:7], body[7:]]), headers={"content-type": "application/json"})
    assert answered.json()["choices"][0]["message"]["content"] == "Hi."
