"""The benches' engines, which serve vLLM's token-in/token-out protocol (`addons/engine/client.py`
is its client).

They serve Chat Completions with the same texts to clients that do not use the recorder.

    python -m tests.bench.engines KIND SETTINGS.json [PORT]      prints its port

`prepared` costs little CPU: its replies are encoded before the first request. `model` serves
`tests/bench/model.py`, token by token.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from tests.bench.model import Divergence, Model

FIRST_PACED = 1_000_000
"""The smallest `max_tokens` of a paced request. Its reply is sent token by token.

`max_tokens` identifies a paced request, since every proxy forwards it. `GET /times` returns when
the first token of each was written: `time.monotonic` in seconds, a clock that all processes share.
"""
FIRST_TOKEN_SECONDS = 0.05

CONTEXT = 1 << 30
"""Context window in tokens: no prompt is too long."""

_BURST_EVENT = 500
"""Tokens of an event of the burst."""
_INTERVAL = re.compile(rb'"stream_interval": ?(\d+)')
_NUMBER = re.compile(rb'"max_tokens": ?(\d+)')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_FACTS = {"weight_version": "default", "is_paused": False}
_MODEL = {"id": "bench", "object": "model", "parent": None, "max_model_len": CONTEXT}


class Connection(asyncio.Protocol):
    def __init__(self, engine: "Prepared | Sampling") -> None:
        self._engine = engine
        self._received = bytearray()
        self._pacing: asyncio.TimerHandle | None = None

    def connection_made(self, transport):
        self._transport = transport

    def connection_lost(self, error):
        if self._pacing is not None:
            self._pacing.cancel()

    def data_received(self, data):
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._received, 0, end)
        size = end + 4 + (int(length[1]) if length else 0)
        if len(self._received) < size:
            return
        path = bytes(self._received[:end]).split(b" ", 2)[1]
        body = bytes(self._received[end + 4 : size])
        del self._received[:size]
        self._answer(path, body)

    def _answer(self, path: bytes, body: bytes) -> None:
        tokenizer = self._engine.tokenizer
        if path == b"/v1/models":
            self.write(response({"data": [_MODEL]}))
        elif path == b"/tokenize":
            text = orjson.loads(body)["prompt"]
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            self.write(response({"count": len(ids), "tokens": ids}))
        elif path == b"/detokenize":
            ids = orjson.loads(body)["tokens"]
            text = tokenizer.decode(ids, skip_special_tokens=False)
            self.write(response({"prompt": text}))
        elif path in (b"/health", b"/version", b"/server_info", b"/weight_info", b"/is_paused"):
            self.write(response(_FACTS))
        elif not body and path != b"/times":
            self.write(response({}, status=b"404 Not Found"))
        else:
            self._engine.answer(self, path, body)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def write_stream(
        self,
        events: Sequence[bytes],
        pace: float,
        *,
        at_once: int = 0,
        delay: float = 0.0,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a stream of events: after `delay` seconds `at_once` of them, then one every
        `pace` seconds.

        Calls `started` before the first event.
        """
        loop = asyncio.get_running_loop()
        start = loop.time() + delay

        def due(index: int) -> float:
            return start + max(0, index - at_once) * pace

        def write(index: int) -> None:
            while index < len(events) and due(index) <= loop.time():
                if index == 0:
                    started()
                self.write(chunk(events[index]))
                index += 1
            if index < len(events):
                self._pacing = loop.call_at(due(index), write, index)
            else:
                self.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        self.write(_STREAM_HEAD)
        write(0)


class Prepared:
    """Encoded replies. The paced one has all `words` and `token_ids`, one token a word, every
    `pace` seconds.

    The immediate reply has the first `short` of them.
    """

    def __init__(
        self,
        tokenizer: Path,
        *,
        words: list[str],
        token_ids: list[int],
        stop_id: int,
        short: int,
        pace: float,
    ) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._pace = pace
        self._token_ids = (*token_ids, stop_id)
        self._times: dict[str, float] = {}
        events = b"".join(_events([*token_ids[:short], stop_id], 1))
        self._generated = response(events, b"text/event-stream")
        self._chat = response(chat_body("".join(words[:short])))
        self._chat_paced = [chat_event({"content": word}) for word in words]
        self._chat_paced.append(chat_event({}, "stop"))
        self._paced = cache(_events)

    def answer(self, connection: Connection, path: bytes, body: bytes) -> None:
        generates = path.endswith(b"generate")
        number = _NUMBER.search(body)
        if path == b"/times":
            connection.write(response(self._times))
        elif number and int(number[1]) >= FIRST_PACED:
            found = _INTERVAL.search(body)
            interval = int(found[1]) if found else 1
            events = self._chat_paced
            if generates:
                events = self._paced(self._token_ids, interval)

            def started() -> None:
                self._times[number[1].decode()] = time.monotonic()

            pace = self._pace * interval
            connection.write_stream(events, pace, delay=FIRST_TOKEN_SECONDS, started=started)
        else:
            connection.write(self._generated if generates else self._chat)


def _events(token_ids: Sequence[int], interval: int) -> list[bytes]:
    """Return the events of a reply: as vLLM, `interval` tokens after the first one."""
    length = len(token_ids)
    found = []
    for first, last in _steps(0, 0, length, interval):
        step = token_ids[first:last]
        finish = "stop" if last == length else None
        found.append(generate_event(step, [-0.125] * len(step), finish, length))
    return found


def _steps(done: int, burst: int, end: int, interval: int) -> list[tuple[int, int]]:
    """Return the tokens of each event of a reply from `done` on, as ranges.

    The first `burst` tokens are in large events; then as vLLM, `interval` tokens after the first
    one.
    """
    steps = []
    first = done
    while first < end:
        if first < burst:
            last = min(first + _BURST_EVENT, burst, end)
        elif not steps:
            last = first + 1
        else:
            last = min(first + interval, end)
        steps.append((first, last))
        first = last
    return steps


class Sampling:
    """Samples from `tests/bench/model.py`: the first `burst` tokens at once, then one every `pace`
    seconds."""

    def __init__(
        self, tokenizer: Path, *, lengths: tuple[int, int], burst: int, pace: float
    ) -> None:
        self._model = Model(tokenizer, *lengths)
        self._burst = burst
        self._pace = pace
        self._word = cache(self._model.text)
        self.tokenizer = self._model.tokenizer

    def answer(self, connection: Connection, path: bytes, body: bytes) -> None:
        request = orjson.loads(body)
        if not path.endswith(b"generate"):
            return self._chat(connection, request)
        interval = request["sampling_params"].get("stream_interval", 1)
        try:
            completion, done = self._model.begin(request["token_ids"])
        except Divergence as error:
            print(error, file=sys.stderr, flush=True)
            refusal = {"error": {"message": str(error)}}
            return connection.write(response(refusal, status=b"400 Bad Request"))
        whole = len(completion.token_ids)
        end = min(whole, done + request["sampling_params"]["max_tokens"])
        steps = _steps(done, self._burst, end, interval)
        events = []
        for first, last in steps:
            finish = None
            if last == end:
                finish = "stop" if end == whole else "length"
            ids = completion.token_ids[first:last]
            logprobs = completion.logprobs[first:last]
            events.append(generate_event(ids, logprobs, finish, end - done))
        self._stream(connection, events, steps, interval)

    def _chat(self, connection: Connection, request: dict[str, Any]) -> None:
        ids = self._model.complete([len(request["messages"])], []).token_ids
        words = [self._word((token_id,)) for token_id in ids[: request["max_tokens"]]]
        if not request.get("stream"):
            return connection.write(response(chat_body("".join(words))))
        steps = _steps(0, self._burst, len(words), 1)
        events = [chat_event({"content": "".join(words[first:last])}) for first, last in steps]
        self._stream(connection, events, steps, 1)

    def _stream(
        self,
        connection: Connection,
        events: list[bytes],
        steps: list[tuple[int, int]],
        interval: int,
    ) -> None:
        at_once = sum(last <= self._burst for _, last in steps)
        connection.write_stream(events, self._pace * interval, at_once=at_once)


def response(
    body: Any, content_type: bytes = b"application/json", status: bytes = b"200 OK"
) -> bytes:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, content_type, len(data)) + data


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def generate_event(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None = None,
    length: int = 0,
) -> bytes:
    """Return an event of newly sampled tokens. With the finish reason, `length` is that of the
    whole completion."""
    content = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        token = {"token_id": token_id, "logprob": logprob, "rank": 1, "top_logprobs": []}
        content.append(token)
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": token_ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": {"content": content},
    }
    if finish_reason:
        choice["weight_versions"] = [{"version": "default", "start": 0, "end": length}]
    return event(
        {"request_id": "bench", "usage": None, "output_mode": "tokens", "choices": [choice]}
    )


def chat_event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    kind = "chat.completion.chunk"
    return event({"id": "bench", "object": kind, "model": "bench", "choices": [choice]})


def chat_body(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return {"id": "bench", "object": "chat.completion", "model": "bench", "choices": [choice]}


async def serve(engine: Prepared | Sampling, port: int) -> None:
    """Serve on loopback until cancelled. Prints the port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main(kind: str, file: str, port: str = "0") -> None:
    settings = json.loads(Path(file).read_text())
    tokenizer = Path(settings.pop("tokenizer"))
    made = {"prepared": Prepared, "model": Sampling}[kind](tokenizer, **settings)
    asyncio.run(serve(made, int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
