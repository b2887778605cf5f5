"""An engine that costs little CPU: its replies are encoded before the first request.

It serves vLLM's token-in/token-out protocol. It serves Chat Completions with the same text to clients that do not use
the recorder.

    python -m tests.bench.engine REPLIES.json      prints its port
"""

import asyncio
import json
import re
import sys
import time
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from tests.bench.protocol import Connection, chat_body, chat_event, chunk, generate_event, response, serve

FIRST_PACED = 1_000_000
"""The smallest `max_tokens` of a paced request. Its reply is sent token by token.

`max_tokens` identifies a paced request, since every proxy forwards it. `GET /times` returns when the first token of
each was written: `time.monotonic` in seconds, a clock that all processes share."""
FIRST_TOKEN_SECONDS = 0.05

_INTERVAL = re.compile(rb'"stream_interval": ?(\d+)')
_NUMBER = re.compile(rb'"max_tokens": ?(\d+)')


class Replies:
    """The encoded replies. The paced reply has all `words` and `token_ids`, one token a word. The immediate reply has
    the first `short` of them. `pace` is the time between two tokens in seconds."""

    def __init__(self, *, words: list[str], token_ids: list[int], stop_id: int, short: int, pace: float) -> None:
        self.pace = pace
        self.times: dict[int, float] = {}
        self._token_ids = [*token_ids, stop_id]
        generated = _generate_events([*token_ids[:short], stop_id], 1)
        self.generated = response(b"".join(generated), b"text/event-stream")
        self._paced: dict[int, list[bytes]] = {}
        self.chat = response(chat_body("".join(words[:short])))
        self.chat_paced = [chunk(chat_event({"content": word})) for word in words] + [chunk(chat_event({}, "stop"))]

    def generated_paced(self, interval: int) -> list[bytes]:
        """Return the events of the paced reply: as vLLM, `interval` tokens after the first one."""
        if interval not in self._paced:
            self._paced[interval] = [chunk(event) for event in _generate_events(self._token_ids, interval)]
        return self._paced[interval]


class PreparedConnection(Connection):
    """A connection that gets one of the encoded replies."""

    def __init__(self, replies: Replies, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._replies = replies

    def answer(self, path, body):
        replies, number = self._replies, _NUMBER.search(body)
        if path == b"/times":
            times = {str(number): seconds for number, seconds in replies.times.items()}
            self.transport.write(response(orjson.dumps(times)))
        elif number and int(number[1]) >= FIRST_PACED:
            interval = int(found[1]) if (found := _INTERVAL.search(body)) else 1
            chunks = replies.generated_paced(interval) if path.endswith(b"generate") else replies.chat_paced

            def started() -> None:
                replies.times[int(number[1])] = time.monotonic()

            self.write_stream(chunks, replies.pace * interval, delay=FIRST_TOKEN_SECONDS, started=started)
        else:
            self.transport.write(replies.generated if path.endswith(b"generate") else replies.chat)


def _generate_events(token_ids: list[int], interval: int) -> list[bytes]:
    length = len(token_ids)
    steps = [token_ids[:1], *(token_ids[first : first + interval] for first in range(1, length, interval))]
    finishes = [None] * (len(steps) - 1) + ["stop"]
    return [
        generate_event(step, [-0.125] * len(step), finish, length) for step, finish in zip(steps, finishes, strict=True)
    ]


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = Tokenizer.from_file(str(Path(settings.pop("tokenizer"), "tokenizer.json")))
    replies = Replies(**settings)
    asyncio.run(serve(lambda: PreparedConnection(replies, tokenizer)))
