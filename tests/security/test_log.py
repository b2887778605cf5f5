"""An agent tries to write secrets, control characters or much into the log and the events of the
recorder."""

import re
import socket

import pytest

from rolltap.trainer.boxes.environment import SESSION_END
from tests.recorder_process import CHAT, HELLO
from tests.security.raw import (
    ask,
    call,
    credentials,
    over_tls,
    plain,
    read,
    read_head,
    recording,
    tunnel,
)

SECRET = "sk-very-secret"


def test_a_query_reaches_neither_the_log_nor_the_events(recorder):
    with recorder.client() as client:
        for url in ("https://a.example/x", "http://a.example/x", CHAT):
            client.get(f"{url}?key={SECRET}")
            client.post(f"{url}?key={SECRET}", json=HELLO)
    ask(recorder, f"GET /x?key={SECRET} HTTP/1.1\r\n".encode() + credentials() + b"\r\n", read)
    ask(recorder, f"nonsense {SECRET}\r\n{SECRET}\r\n\r\n".encode(), read)
    assert SECRET not in recorder.log()
    for path in recorder.run.glob("events-*"):
        assert SECRET.encode() not in path.read_bytes()


def test_no_control_character_reaches_the_log(recorder):
    escape = b"\x1b]0;owned\x07\xff\r"
    head = b"GET http://a.example/" + escape[:-1] + b" HTTP/1.1\r\nX: " + escape + b"\r\n"
    ask(recorder, head + credentials() + b"\r\n")
    ask(recorder, b"POST http://a.example/ HTTP/1.1\r\n" + credentials("s\u202e1") + b"\r\n")
    with over_tls(tunnel(recorder, "a.example:443"), recorder, "a.example") as connection:
        connection.sendall(b"GET /" + escape[:-1] + b" HTTP/1.1\r\nHost: a.example\r\n\r\n")
        read_head(connection)
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", recorder.log()) is None
    assert "\\x1b]0;owned" in recorder.log()


def test_a_path_is_cut(recorder):
    with recorder.client() as client:
        client.get("http://a.example/" + "x" * 20_000)
    path = recorder.rows("events")[-1]["path"]
    assert len(path) < 600
    assert path.endswith("(20,001 characters)")
    assert "x" * 1000 not in recorder.log()


def test_refusals_without_end_are_counted(recorder, news):
    lines = recorder.log().count("\n")
    with recorder.client("loud") as client:
        for _ in range(300):
            assert client.get("http://a.example/x").status_code == 404
        assert client.post(SESSION_END).status_code == 200
    details = [detail for _, detail in news(session="loud")]
    assert details[:64] == [""] * 64
    assert details[64:] == [
        "128 refused so far, the last: ",
        "256 refused so far, the last: ",
        "300 refused in all, the last: ",
    ]
    assert recorder.log().count("\n") - lines < 80


def test_bad_requests_without_end_are_counted(tmp_path, tokenizer, tokenizer_folder):
    # a recorder of its own: after them it lists no refusal without a session, and only counts them
    with recording(tmp_path, tokenizer, tokenizer_folder) as recorder:
        for _ in range(200):
            ask(recorder, b"\x00\r\n\r\n", read)
        events = recorder.rows("events")
    details = [event["detail"] for event in events if event["session_id"] is None]
    assert len(details) < 80
    assert "128 refused so far" in details[-1]


def with_header(line):
    return call().replace(b"\r\n\r\n", b"\r\n" + line + b"\r\n\r\n")


def test_an_odd_header_is_in_the_row_of_its_call(recorder):
    with plain(recorder) as connection:
        connection.sendall(with_header(b"X-OpenAI-Subagent: \xff\x01"))
        assert read_head(connection).startswith(b"HTTP/1.1 200")
        assert connection.recv(65536)
    assert recorder.rows("calls")[-1]["role"] == "subagent"


@pytest.mark.parametrize("length", [7_000, 9_000, 60_000])
def test_a_long_header_is_no_hindrance(recorder, length):
    assert ask(recorder, with_header(b"X-Long: " + b"\xff" * length)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "more", [b"X-Long: " + b"x" * 70_000, b"\r\n".join([b"A: b"] * 200)], ids=len
)
def test_too_many_or_too_long_headers_are_refused_and_recorded(recorder, news, more):
    assert ask(recorder, with_header(more), read).startswith(b"HTTP/1.1 431")
    assert len(news()) == 1


def test_a_client_that_does_not_trust_the_certificate_is_recorded(recorder, news):
    hello = b"\x16\x03\x01\x00\x05hello"
    with tunnel(recorder, "a.example:443", hello) as connection:
        connection.shutdown(socket.SHUT_WR)
        read(connection)
    assert any(detail.startswith("TLS failed") for _, detail in news())
