"""The wire of the benches' engines: a small HTTP/1.1 server and the events of vLLM's token-in/token-out protocol.

`addons/engine/client.py` is the client of that protocol.
"""

import asyncio
import re
from collections.abc import Callable, Sequence

import orjson
from tokenizers import Tokenizer

CONTEXT = 1 << 30
"""Context window in tokens: no prompt is too long."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Connection(asyncio.Protocol):
    """One kept-alive connection. A subclass answers its requests. `tokenizer` is that of the recorder's model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._received = bytearray()
        self._pacing: asyncio.TimerHandle | None = None

    def answer(self, path: bytes, body: bytes) -> None:
        """Write the answer to a request other than the lookups of a client."""
        raise NotImplementedError

    def connection_made(self, transport):
        self.transport = transport

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
        path, body = bytes(self._received[:end]).split(b" ", 2)[1], bytes(self._received[end + 4 : size])
        del self._received[:size]
        if path == b"/v1/models":
            model = {"id": "bench", "object": "model", "parent": None, "max_model_len": CONTEXT}
            self.transport.write(response(orjson.dumps({"data": [model]})))
        elif path == b"/tokenize":
            text = orjson.loads(body)["prompt"]
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            self.transport.write(response(orjson.dumps({"count": len(ids), "tokens": ids})))
        elif path in (b"/health", b"/version", b"/server_info"):
            self.transport.write(response(b"{}"))
        else:
            self.answer(path, body)

    def write_stream(
        self,
        chunks: Sequence[bytes],
        pace: float,
        *,
        at_once: int = 0,
        delay: float = 0.0,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a stream of `chunks`: after `delay` seconds `at_once` of them, then one every `pace` seconds.

        Calls `started` before the first chunk.
        """
        self.transport.write(_STREAM_HEAD)
        self._write(chunks, 0, asyncio.get_running_loop().time() + delay, pace, at_once, started)

    def _write(self, chunks, index: int, start: float, pace: float, at_once: int, started) -> None:
        loop = asyncio.get_running_loop()

        def due() -> float:
            return start + max(0, index - at_once) * pace

        while index < len(chunks) and due() <= loop.time():
            if index == 0:
                started()
            self.transport.write(chunks[index])
            index += 1
        if index < len(chunks):
            self._pacing = loop.call_at(due(), self._write, chunks, index, start, pace, at_once, started)
        else:
            self.transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def serve(connection: Callable[[], Connection], port: int = 0) -> None:
    """Serve on loopback until cancelled. Prints the port."""
    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def response(body: bytes, content_type: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    """Return a response with a length."""
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, content_type, len(body))
    return head + body


def chunk(data: bytes) -> bytes:
    """Return a chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: object) -> bytes:
    """Return a server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def generate_event(
    token_ids: Sequence[int], logprobs: Sequence[float], finish_reason: str | None = None, length: int = 0
) -> bytes:
    """Return an event of newly sampled tokens. With the finish reason, `length` is that of the whole completion."""
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": token_ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "default", "start": 0, "end": length}] if finish_reason else None,
        "logprobs": {
            "content": [
                {"token_id": token_id, "logprob": logprob, "rank": 1, "top_logprobs": []}
                for token_id, logprob in zip(token_ids, logprobs, strict=True)
            ]
        },
    }
    return event({"request_id": "bench", "usage": None, "output_mode": "tokens", "choices": [choice]})


def chat_event(delta: dict, finish_reason: str | None = None) -> bytes:
    """Return an event of a Chat Completions stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return event({"id": "bench", "object": "chat.completion.chunk", "model": "bench", "choices": [choice]})


def chat_body(text: str) -> bytes:
    """Return the body of a Chat Completions reply."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return orjson.dumps({"id": "bench", "object": "chat.completion", "model": "bench", "choices": [choice]})
