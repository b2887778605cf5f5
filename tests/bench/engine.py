"""An engine that costs little CPU: its replies are encoded before the first request.

It serves vLLM's token-in/token-out protocol (`addons/engine/client.py` is the client). It serves Chat Completions with
the same text to clients that do not use the recorder.

    python -m tests.bench.engine REPLIES.json      prints its port
"""

import asyncio
import json
import re
import sys
import time
from pathlib import Path

FIRST_PACED = 1_000_000
"""The smallest `max_tokens` of a paced request. Its reply is sent token by token.

`max_tokens` identifies a paced request, since every proxy forwards it. `GET /times` returns when the first token of
each was written: `time.monotonic` in seconds, a clock that all processes share."""
FIRST_TOKEN_SECONDS = 0.05
CONTEXT = 1 << 30

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
_NUMBER = re.compile(rb'"max_tokens": ?(\d+)')
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Replies:
    """The encoded replies. The paced reply has all `words` and `token_ids`, one token a word. The immediate reply has
    the first `short` of them. `pace` is the time between two tokens in seconds."""

    def __init__(self, *, words: list[str], token_ids: list[int], stop_id: int, short: int, pace: float) -> None:
        self.pace = pace
        self.times: dict[int, float] = {}
        generated = _generate_events([*token_ids[:short], stop_id])
        self.generated = _response(b"".join(generated), b"text/event-stream")
        self.generated_paced = [_chunk(event) for event in _generate_events([*token_ids, stop_id])]
        self.chat = _response(_chat_body("".join(words[:short])), b"application/json")
        self.chat_paced = [_chunk(event) for event in _chat_events(words)]


class Connection(asyncio.Protocol):
    """One kept-alive HTTP/1.1 connection."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
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
        request = bytes(self._received[:size])
        del self._received[:size]
        self._answer(request.split(b" ", 2)[1], request)

    def _answer(self, path: bytes, request: bytes) -> None:
        replies, number = self._replies, _NUMBER.search(request)
        if path == b"/v1/models":
            model = {"id": "bench", "object": "model", "parent": None, "max_model_len": CONTEXT}
            self._transport.write(_response(json.dumps({"data": [model]}).encode(), b"application/json"))
        elif path == b"/times":
            self._transport.write(_response(json.dumps(replies.times).encode(), b"application/json"))
        elif number and int(number[1]) >= FIRST_PACED:
            self._transport.write(_STREAM_HEAD)
            chunks = replies.generated_paced if path.endswith(b"generate") else replies.chat_paced
            start = asyncio.get_running_loop().time() + FIRST_TOKEN_SECONDS
            self._write_paced(chunks, 0, start, int(number[1]))
        else:
            self._transport.write(replies.generated if path.endswith(b"generate") else replies.chat)

    def _write_paced(self, chunks: list[bytes], index: int, start: float, number: int) -> None:
        loop = asyncio.get_running_loop()
        while index < len(chunks) and start + index * self._replies.pace <= loop.time():
            if index == 0:
                self._replies.times[number] = time.monotonic()
            self._transport.write(chunks[index])
            index += 1
        if index < len(chunks):
            due = start + index * self._replies.pace
            self._pacing = loop.call_at(due, self._write_paced, chunks, index, start, number)
        else:
            self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _response(body: bytes, content_type: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (content_type, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _generate_events(token_ids: list[int]) -> list[bytes]:
    events = []
    for i, token_id in enumerate(token_ids):
        last = i == len(token_ids) - 1
        entry = {"token_id": token_id, "logprob": -0.125, "rank": 1, "top_logprobs": []}
        choice = {
            "index": 0,
            "finish_reason": "stop" if last else None,
            "stop_reason": None,
            "token_ids": [token_id],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": "default", "start": 0, "end": len(token_ids)}] if last else None,
            "logprobs": {"content": [entry]},
        }
        events.append(_event({"request_id": "bench", "usage": None, "output_mode": "tokens", "choices": [choice]}))
    return events


def _chat_body(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return json.dumps({"id": "bench", "object": "chat.completion", "model": "bench", "choices": [choice]}).encode()


def _chat_events(words: list[str]) -> list[bytes]:
    deltas = [{"content": word} for word in words] + [{}]
    choices = [{"index": 0, "delta": d, "finish_reason": None if d else "stop"} for d in deltas]
    fields = {"id": "bench", "object": "chat.completion.chunk", "model": "bench"}
    return [_event({**fields, "choices": [choice]}) for choice in choices]


async def _main(replies: Replies) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(replies), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(Replies(**json.loads(Path(sys.argv[1]).read_text()))))
