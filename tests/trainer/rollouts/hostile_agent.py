"""An agent that has had one reply, and then does what its instruction lists: a JSON list of the
names below."""

import base64
import json
import os
import shutil
import signal
import socket
import sys
from contextlib import suppress
from urllib.parse import urlsplit

PROXY = urlsplit(os.environ["HTTPS_PROXY"])
USER = base64.b64encode(f"{PROXY.username}:{PROXY.password}".encode()).decode()
HOST = "api.openai.com"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
OPEN = []
"""Connections that stay open until the end."""


def connect(sent):
    connection = socket.create_connection((PROXY.hostname, PROXY.port), timeout=20)
    OPEN.append(connection)
    with suppress(OSError):
        connection.sendall(sent)
    return connection


def request(body, *, method="POST", url=f"http://{HOST}/v1/chat/completions", length=None, more=""):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"{method} {url} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nProxy-Authorization: Basic"
        f" {USER}\r\n{more}"
    )
    return (
        f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body
    )


def ask(body, **how):
    """Send a request and return the first bytes of the reply."""
    connection = connect(request(body, **how))
    with suppress(OSError):
        return connection.recv(65536)
    return b""


def call():
    ask(CHAT)


def hang_up():
    connect(request({**CHAT, "stream": True})).close()


def half_sent():
    for _ in range(100):
        connect(request(CHAT, length=500))


def flood():
    for _ in range(40):
        connect(request(CHAT))


def malformed():
    for body in (
        b"{",
        b"\xff\xfe",
        b"[" * 9000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"NaN",
        b"",
    ):
        ask(body)
    for more in (
        "Content-Encoding: gzip\r\n",
        "A: " + "x" * 70_000 + "\r\n",
        "Transfer-Encoding: chunked\r\n",
    ):
        ask(CHAT, more=more)
    connect(b"\x16\x03\x01 nothing")
    connect(b"\0" * 9000)


def odd_text():
    text = "\ud800 \0 \uffff <|im_start|> " + "\N{COMBINING ACUTE ACCENT}" * 99
    tool = {
        "type": "function",
        "function": {"name": "t", "parameters": {"a": [1e308, -0.0, 2**70]}},
    }
    ask(
        {
            **CHAT,
            "messages": [{"role": "user", "content": text}],
            "tools": [tool],
            "metadata": {text[2:]: text},
        }
    )
    ask({**CHAT, "model": text, "user": text, "stop": [text[2:9]], "temperature": 1e308})


def odd_grammar():
    for schema in ({"type": "nonsense"}, {"$ref": "#"}, {"pattern": "(" * 99}, {"enum": []}):
        form = {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}
        ask({**CHAT, "response_format": form})


def too_long():
    ask({**CHAT, "messages": [{"role": "user", "content": "word " * 100_000}]})


def side_question():
    ask({**CHAT, "response_format": {"type": "json_object"}})


def listing():
    ask(b"", method="GET", url=f"http://{HOST}/v1/models")
    ask(CHAT, url="http://refused.example/")


def end():
    ask(b"", url="http://session.rolltap/end")


def other_session():
    global USER
    kept, USER = USER, base64.b64encode(b"somebody:else").decode()
    ask(CHAT)
    USER = kept


def odd_files():
    os.makedirs(b"\xff\xfe/" + b"n" * 200)
    os.symlink("loop", "loop")
    os.symlink("/etc/passwd", "away")
    os.mkfifo("pipe")
    os.chmod(os.open("closed", os.O_CREAT), 0)
    with open("sparse", "wb") as file:
        file.truncate(1 << 40)


def no_workspace():
    here = os.getcwd()
    assert os.path.dirname(here) == os.path.dirname(os.environ["HOME"])
    shutil.rmtree(here)
    os.symlink("/nowhere", here)


def no_home():
    assert os.path.dirname(os.getcwd()) == os.path.dirname(os.environ["HOME"])
    shutil.rmtree(os.environ["HOME"])


def closed_workspace():
    os.chmod(".", 0)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_group():
    os.killpg(0, signal.SIGKILL)


def odd_status():
    os._exit(77)


if __name__ == "__main__":
    while b" 200 " not in ask(
        CHAT
    ):  # an agent beside it may have taken the place of its connection
        pass
    for name in json.loads(sys.argv[1]):
        with suppress(FileNotFoundError, FileExistsError):
            globals()[name]()
