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
        path, body = (
            bytes(self._received[:end]).split(b" ", 2)[1],
            bytes(self._received[end + 4 : size]),
        )
        del self._received[:size]
        if path == b"/v1/models":
            model = {"id": "bench", "object": "model", "parent": None, "max_model_len": CONTEXT}
            self.write(response(orjson.dumps({"data": [model]})))
        elif path == b"/tokenize":
            ids = self._engine.tokenizer.encode(
                orjson.loads(body)["prompt"], add_special_tokens=False
            ).ids
            self.write(response(orjson.dumps({"count": len(ids), "tokens": ids})))
        elif path == b"/detokenize":
            text = self._engine.tokenizer.decode(
                orjson.loads(body)["tokens"], skip_special_tokens=False
            )
            self.write(response(orjson.dumps({"prompt": text})))
        elif path in (b"/health", b"/version", b"/server_info", b"/weight_info", b"/is_paused"):
            self.write(response(b'{"weight_version": "default", "is_paused": false}'))
        elif not body and path != b"/times":
            self.write(response(b"{}", status=b"404 Not Found"))
        else:
            self._engine.answer(self, path, body)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def write_stream(
        self,
        chunks: Sequence[bytes],
        pace: float,
        *,
        at_once: int = 0,
        delay: float = 0.0,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a stream of `chunks`: after `delay` seconds `at_once` of them, then one every
        `pace` seconds.

        Calls `started` before the first chunk.
        """
        loop = asyncio.get_running_loop()
        start = loop.time() + delay

        def due(index: int) -> float:
            return start + max(0, index - at_once) * pace

        def write(index: int) -> None:
            while index < len(chunks) and due(index) <= loop.time():
                if index == 0:
                    started()
                self.write(chunks[index])
                index += 1
            if index < len(chunks):
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
        self._pace, self._token_ids = pace, [*token_ids, stop_id]
        self._times: dict[str, float] = {}
        self._generated = response(
            b"".join(_events([*token_ids[:short], stop_id], 1)), b"text/event-stream"
        )
        self._chat = response(chat_body("".join(words[:short])))
        self._chat_paced = [chunk(chat_event({"content": word})) for word in words] + [
            chunk(chat_event({}, "stop"))
        ]
        self._paced = cache(
            lambda interval: [chunk(event) for event in _events(self._token_ids, interval)]
        )

    def answer(self, connection: Connection, path: bytes, body: bytes) -> None:
        number = _NUMBER.search(body)
        if path == b"/times":
            connection.write(response(orjson.dumps(self._times)))
        elif number and int(number[1]) >= FIRST_PACED:
            interval = int(found[1]) if (found := _INTERVAL.search(body)) else 1
            chunks = self._paced(interval) if path.endswith(b"generate") else self._chat_paced

            def started() -> None:
                self._times[number[1].decode()] = time.monotonic()

            connection.write_stream(
                chunks, self._pace * interval, delay=FIRST_TOKEN_SECONDS, started=started
            )
        else:
            connection.write(self._generated if path.endswith(b"generate") else self._chat)


def _events(token_ids: list[int], interval: int) -> list[bytes]:
    """Return the events of a reply: as vLLM, `interval` tokens after the first one."""
    length = len(token_ids)
    steps = [
        token_ids[:1],
        *(token_ids[first : first + interval] for first in range(1, length, interval)),
    ]
    finishes = [None] * (len(steps) - 1) + ["stop"]
    return [
        generate_event(step, [-0.125] * len(step), finish, length)
        for step, finish in zip(steps, finishes, strict=True)
    ]


class Sampling:
    """Samples from `tests/bench/model.py`: the first `burst` tokens at once, then one every `pace`
    seconds."""

    def __init__(
        self, tokenizer: Path, *, lengths: tuple[int, int], burst: int, pace: float
    ) -> None:
        self._model, self._burst, self._pace = Model(tokenizer, *lengths), burst, pace
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
            refusal = orjson.dumps({"error": {"message": str(error)}})
            return connection.write(response(refusal, status=b"400 Bad Request"))
        end = min(len(completion.token_ids), done + request["sampling_params"]["max_tokens"])
        events = []
        for first, last in self._steps(done, end, interval):
            finish = (
                None if last < end else "stop" if end == len(completion.token_ids) else "length"
            )
            steps = completion.token_ids[first:last], completion.logprobs[first:last]
            events.append(generate_event(*steps, finish, end - done))
        self._stream(connection, events, done, end, interval)

    def _chat(self, connection: Connection, request: dict[str, Any]) -> None:
        ids = self._model.complete([len(request["messages"])], []).token_ids[
            : request["max_tokens"]
        ]
        word = cache(lambda token_id: self._model.text([token_id]))
        if not request.get("stream"):
            return connection.write(response(chat_body("".join(map(word, ids)))))
        texts = ["".join(map(word, ids[first:last])) for first, last in self._steps(0, len(ids), 1)]
        self._stream(connection, [chat_event({"content": text}) for text in texts], 0, len(ids), 1)

    def _steps(self, done: int, end: int, interval: int) -> list[tuple[int, int]]:
        """Return the tokens of each event of a reply, as ranges: as vLLM, `interval` tokens after
        the first one."""
        burst_end = max(done, min(end, self._burst))
        burst = [
            (first, min(first + _BURST_EVENT, burst_end))
            for first in range(done, burst_end, _BURST_EVENT)
        ]
        first = [] if burst or burst_end == end else [(burst_end, burst_end + 1)]
        paced = range(burst_end + len(first), end, interval)
        return burst + first + [(token, min(token + interval, end)) for token in paced]

    def _stream(
        self, connection: Connection, events: list[bytes], done: int, end: int, interval: int
    ) -> None:
        at_once = sum(last <= self._burst for _, last in self._steps(done, end, interval))
        connection.write_stream(list(map(chunk, events)), self._pace * interval, at_once=at_once)


def response(
    body: bytes, content_type: bytes = b"application/json", status: bytes = b"200 OK"
) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (
        status,
        content_type,
        len(body),
    )
    return head + body


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
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": token_ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "default", "start": 0, "end": length}]
        if finish_reason
        else None,
        "logprobs": {
            "content": [
                {"token_id": token_id, "logprob": logprob, "rank": 1, "top_logprobs": []}
                for token_id, logprob in zip(token_ids, logprobs, strict=True)
            ]
        },
    }
    return event(
        {"request_id": "bench", "usage": None, "output_mode": "tokens", "choices": [choice]}
    )


def chat_event(delta: dict, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return event(
        {"id": "bench", "object": "chat.completion.chunk", "model": "bench", "choices": [choice]}
    )


def chat_body(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return orjson.dumps(
        {"id": "bench", "object": "chat.completion", "model": "bench", "choices": [choice]}
    )


async def serve(engine: Prepared | Sampling, port: int) -> None:
    """Serve on loopback until cancelled. Prints the port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[2]).read_text())
    tokenizer = Path(settings.pop("tokenizer"))
    kind = {"prepared": Prepared, "model": Sampling}[sys.argv[1]]
    asyncio.run(serve(kind(tokenizer, **settings), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
