"""An agent sends much, or little that becomes much: bodies, prompts, compressed bytes, JSON,
unfinished requests."""

import gzip
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zstandard

from rolltap.addons.endpoint.body import SESSION_QUOTA
from tests.deep import cases
from tests.recorder_process import CHAT, HELLO
from tests.security.raw import HEAD, ask, call, credentials, plain, read, read_head, request

MEGABYTE = 1 << 20
MOST_GROWTH = 100 * MEGABYTE
"""Maximum growth of the recorder's memory. A body of the limit, 32 MiB, is held about twice."""


OPTIONS = ["rolltap_allow=127.0.0.3:*"]


@pytest.fixture
def peak(recorder):
    """Return a function that tells how much more memory the recorder has had than at the start of
    the test."""
    process = Path("/proc", str(recorder.process.pid))
    (process / "clear_refs").write_text("5")  # the peak begins again at what is used now
    before = resident(process, "VmRSS")
    return lambda: resident(process, "VmHWM") - before


@pytest.fixture
def bounded(peak):
    yield
    assert peak() < MOST_GROWTH


def resident(process, name):
    status = (process / "status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


bounded_memory = pytest.mark.usefixtures("bounded")


EVIL = b"POST http://evil.example/x HTTP/1.1\r\nHost: evil.example\r\n"
HEADS = {
    "no credentials": (HEAD, 407),
    "not served": (EVIL + credentials(), 404),
    "too long": (HEAD + credentials(), 413),
}


@bounded_memory
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "length"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_body_that_is_not_wanted_is_not_kept(recorder, news, kind, chunked):
    head, status = HEADS[kind]
    piece = b"x" * MEGABYTE
    length = b"Content-Length: %d" % (300 * MEGABYTE)
    end = b""
    if chunked:
        length = b"Transfer-Encoding: chunked"
        piece = b"%x\r\n%b\r\n" % (MEGABYTE, piece)
        end = b"0\r\n\r\n"
    with plain(recorder) as connection:
        connection.sendall(head + length + b"\r\n\r\n")
        try:
            for _ in range(300):
                connection.sendall(piece)
            connection.sendall(end)
        except ConnectionError:
            assert kind == "too long"  # the endpoint has answered, and does not read the rest
        reply = read_head(connection)
    assert reply.startswith(b"HTTP/1.1 %d" % status)
    if kind == "too long":
        why = "The request body is larger than 33,554,432 bytes."
        assert news("rejected", "s1") == [("s1", why)]


@bounded_memory
def test_a_small_body_that_becomes_large_is_refused_while_others_go_on(recorder, news):
    body = zstandard.ZstdCompressor(level=3).compress(bytes(1 << 30))
    assert len(body) < 100_000
    compressed = {"content": body, "headers": {"content-encoding": "zstd"}}
    with (
        recorder.client("bomb") as client,
        recorder.client("s2") as other,
        ThreadPoolExecutor() as threads,
    ):
        attack = threads.submit(lambda: [client.post(CHAT, **compressed) for _ in range(5)])
        answered = 0
        while not attack.done():
            assert other.get("http://evil.example/").status_code == 404
            answered += 1
    assert answered > 5
    for refused in attack.result():
        assert refused.status_code == 413
        assert "larger than" in refused.json()["error"]["message"]
    assert len(news("rejected", "bomb")) == 5


@bounded_memory
def test_a_body_that_cannot_be_decompressed_is_refused_in_the_words_of_the_api(recorder, news):
    with recorder.client("odd") as client:  # another session's bodies may still be there
        url = "https://api.anthropic.com/v1/messages"
        refused = client.post(url, content=b"not zstd", headers={"content-encoding": "zstd"})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert len(news("rejected", "odd")) == 1


@bounded_memory
def test_what_waits_behind_a_request_is_bounded(recorder, news):
    chunked = EVIL + b"Transfer-Encoding: chunked\r\n\r\n5;"
    for head in (b"GET http://a.example/", chunked):
        assert ask(recorder, head + b"x" * 70_000, read).startswith(b"HTTP/1.1 431")
    assert len(news("refused")) == 2


@bounded_memory
def test_a_large_reply_of_an_allowed_host_passes_by(recorder):
    size = 300 * MEGABYTE
    with socket.create_server(("127.0.0.3", 0)) as server, plain(recorder) as connection:
        target = f"http://127.0.0.3:{server.getsockname()[1]}/"
        connection.sendall(request(target, more=credentials()))
        upstream, _ = server.accept()
        with upstream:
            read_head(upstream)
            reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
            sender = threading.Thread(target=upstream.sendall, args=[reply])
            sender.start()
            read_head(connection)
            received = 0
            while received < size:
                received += len(connection.recv(MEGABYTE))
            sender.join()


@bounded_memory
def test_events_and_uploads_pass_as_they_arrive(recorder):
    with socket.create_server(("127.0.0.3", 0)) as server, plain(recorder) as connection:
        port = server.getsockname()[1]
        target = b"http://127.0.0.3:%d/ HTTP/1.1\r\nHost: 127.0.0.3\r\n" % port
        connection.sendall(
            b"POST " + target + credentials() + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
        )
        upstream, _ = server.accept()
        with upstream:
            upstream.settimeout(60)
            read_head(upstream)
            assert upstream.recv(100) == b"5\r\nhello\r\n"  # the request is not complete
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding:"
                b" chunked\r\n\r\n"
            )
            upstream.sendall(head + b"9\r\ndata: 1\n\n\r\n")
            assert read_head(connection).startswith(b"HTTP/1.1 200")
            assert connection.recv(100) == b"9\r\ndata: 1\n\n\r\n"  # the reply is not complete


@bounded_memory
def test_a_model_call_in_chunks_is_answered(recorder):
    body = json.dumps(HELLO).encode()
    with recorder.client() as client:
        answered = client.post(
            CHAT, content=iter([body[:7], body[7:]]), headers={"content-type": "application/json"}
        )
    assert answered.json()["choices"][0]["message"]["content"] == "Hi."


BOMB = b'{"model":"m","messages":[' + b",".join([b"[]"] * (32 * MEGABYTE // 3 - 10)) + b"]}"
NUMBERS = (
    b'{"model":"m","messages":[],"tools":[{"parameters":{"enum":[' + b"1," * 8_000_000 + b"1]}}]}"
)


@pytest.mark.parametrize("body", [BOMB, NUMBERS], ids=["lists", "numbers"])
def test_json_of_millions_of_values_is_not_parsed(recorder, peak, body):
    with recorder.client() as client:
        for _ in range(3):
            refused = client.post(
                CHAT, content=gzip.compress(body), headers={"content-encoding": "gzip"}
            )
            assert refused.status_code == 413
            assert "more than 500,000 values" in refused.json()["error"]["message"]
    assert peak() < 200 * MEGABYTE


@pytest.mark.deep  # a small body that becomes large keeps no other session waiting either
def test_slow_decompression_keeps_no_other_session_waiting(recorder):
    body = gzip.compress(bytes(31 * MEGABYTE))
    head = call(user="slow").partition(b"Content-Length")[0] + b"Content-Encoding: gzip\r\n"
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        attacks = [stack.enter_context(plain(recorder)) for _ in range(7)]
        for connection in attacks:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        ends = [threads.submit(read_head, connection) for connection in attacks]
        answered = 0
        while not all(end.done() for end in ends):
            with recorder.client(
                f"fresh{answered}"
            ) as other:  # its first request also reads its rows
                assert other.post(CHAT, json=HELLO).status_code == 200
            answered += 1
    assert answered > 3
    # not JSON; or, on a slow machine, no room for it in time, for the session or for all
    assert {end.result()[:12] for end in ends} <= {
        b"HTTP/1.1 400",
        b"HTTP/1.1 429",
        b"HTTP/1.1 503",
    }


def test_unfinished_bodies_of_a_session_share_a_bounded_memory(recorder, peak):
    head = call(user="unfinished").partition(b"Content-Length")[0]
    head += b"Content-Length: %d\r\n\r\n" % (31 * MEGABYTE)
    with ExitStack() as stack, ThreadPoolExecutor(12) as threads:
        connections = [stack.enter_context(plain(recorder)) for _ in range(12)]
        for connection in connections:
            connection.sendall(head)
        body = bytes(30 * MEGABYTE)
        list(threads.map(lambda connection: send_all_that_is_taken(connection, body), connections))
        with recorder.client("s2") as other:
            assert other.post(CHAT, json=HELLO).status_code == 200
        assert peak() < SESSION_QUOTA + 60 * MEGABYTE


def send_all_that_is_taken(connection, data):
    """Send until the other side has read nothing for a while."""
    connection.settimeout(1)
    view = memoryview(data)
    with suppress(TimeoutError):
        while view:
            view = view[connection.send(view[:65536]) :]


def test_a_long_model_name_is_refused_and_written_nowhere(recorder, news):
    with recorder.client("s3") as client:
        refused = client.post(CHAT, json={**HELLO, "model": "M" * MEGABYTE})
        assert refused.status_code == 400
        host = "https://generativelanguage.googleapis.com"
        url = f"{host}/v1beta/models/{'m' * 60_000}:generateContent"
        assert client.post(url, json={}).status_code == 400
    assert len(news("rejected")) == 2
    assert all(len(event["path"]) < 600 for event in recorder.rows("events"))


LONG = {
    "words": "The quick brown fox jumps over the lazy dog. " * 180_000,
    "one word": "abcdefghij" * 800_000,
    "characters of several code points": "a" + "\u0301\u0323" * 1_000_000,
    "special tokens": "<|im_end|>" * 800_000,
    "messages": "",
}


@pytest.mark.parametrize("kind", cases(LONG, 0, 3, 4))
def test_a_long_prompt_is_refused_while_other_sessions_are_answered(recorder, kind):
    messages = [{"role": "user", "content": LONG[kind]}]
    if kind == "messages":
        messages *= 200_000
    long = {"model": "m", "messages": messages}
    with (
        recorder.client("long") as attacker,
        recorder.client("s2") as other,
        ThreadPoolExecutor() as threads,
    ):
        attacks = [threads.submit(attacker.post, CHAT, json=long) for _ in range(3)]
        while not all(attack.done() for attack in attacks):
            assert other.post(CHAT, json=HELLO).status_code == 200
        assert other.post(CHAT, json=HELLO).status_code == 200
    assert {attack.result().status_code for attack in attacks} <= {400, 413}
    assert all(call["session_id"] != "long" for call in recorder.rows("calls"))


NEVER = """
import asyncio

async def server_connect(data):
    await asyncio.Event().wait()
"""


def test_a_body_that_comes_before_its_connection_is_bounded(start, tmp_path):
    script = tmp_path / "never.py"
    script.write_text(NEVER)
    recorder = start(scripts=["-s", script])
    piece = b"x" * (1 << 20)
    with plain(recorder) as connection, suppress(ConnectionError):
        connection.sendall(
            call().partition(b"Content-Length")[0] + b"Content-Length: %d\r\n\r\n" % (100 << 20)
        )
        for _ in range(100):
            connection.sendall(piece)
    recorder.stop()
    refused = [event["detail"] for event in recorder.rows("events") if event["kind"] == "refused"]
    assert any("bytes of a body that nobody reads yet" in detail for detail in refused)
