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

from tests.bench.protocol import Connection, chat_body, chat_event, chunk, generate_event, response, serve

FIRST_PACED = 1_000_000
"""The smallest `max_tokens` of a paced request. Its reply is sent token by token.

`max_tokens` identifies a paced request, since every proxy forwards it. `GET /times` returns when the first token of
each was written: `time.monotonic` in seconds, a clock that all processes share."""
FIRST_TOKEN_SECONDS = 0.05

_NUMBER = re.compile(rb'"max_tokens": ?(\d+)')


class Replies:
    """The encoded replies. The paced reply has all `words` and `token_ids`, one token a word. The immediate reply has
    the first `short` of them. `pace` is the time between two tokens in seconds."""

    def __init__(self, *, words: list[str], token_ids: list[int], stop_id: int, short: int, pace: float) -> None:
        self.pace = pace
        self.times: dict[int, float] = {}
        generated = _generate_events([*token_ids[:short], stop_id])
        self.generated = response(b"".join(generated), b"text/event-stream")
        self.generated_paced = [chunk(event) for event in _generate_events([*token_ids, stop_id])]
        self.chat = response(chat_body("".join(words[:short])))
        self.chat_paced = [chunk(chat_event({"content": word})) for word in words] + [chunk(chat_event({}, "stop"))]


class PreparedConnection(Connection):
    """A connection that gets one of the encoded replies."""

    def __init__(self, replies: Replies) -> None:
        super().__init__()
        self._replies = replies

    def answer(self, path, body):
        replies, number = self._replies, _NUMBER.search(body)
        if path == b"/times":
            times = {str(number): seconds for number, seconds in replies.times.items()}
            self.transport.write(response(orjson.dumps(times)))
        elif number and int(number[1]) >= FIRST_PACED:
            chunks = replies.generated_paced if path.endswith(b"generate") else replies.chat_paced

            def started() -> None:
                replies.times[int(number[1])] = time.monotonic()

            self.write_stream(chunks, replies.pace, delay=FIRST_TOKEN_SECONDS, started=started)
        else:
            self.transport.write(replies.generated if path.endswith(b"generate") else replies.chat)


def _generate_events(token_ids: list[int]) -> list[bytes]:
    last = len(token_ids) - 1
    return [
        generate_event([token_id], [-0.125], "stop" if i == last else None, len(token_ids))
        for i, token_id in enumerate(token_ids)
    ]


if __name__ == "__main__":
    replies = Replies(**json.loads(Path(sys.argv[1]).read_text()))
    asyncio.run(serve(lambda: PreparedConnection(replies)))
