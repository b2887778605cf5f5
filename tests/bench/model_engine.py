"""An engine that serves `tests/bench/model.py`, token by token.

It serves vLLM's token-in/token-out protocol, and Chat Completions with the same texts to clients that do not use the
recorder.

    python -m tests.bench.model_engine SETTINGS.json [PORT]      prints its port
"""

import asyncio
import json
import sys
from functools import cache
from pathlib import Path

import orjson

from tests.bench.model import Completion, Divergence, Model
from tests.bench.protocol import Connection, chat_body, chat_event, chunk, generate_event, response, serve

_BURST_EVENT = 500
"""Tokens of an event of the burst."""


class ModelConnection(Connection):
    """A connection that samples from `model`: the first `burst` tokens at once, then one every `pace` seconds."""

    def __init__(self, model: Model, burst: int, pace: float) -> None:
        super().__init__(model.tokenizer)
        self._model, self._burst, self._pace = model, burst, pace

    def answer(self, path, body):
        request = orjson.loads(body)
        if not path.endswith(b"generate"):
            return self._chat(request)
        interval = request["sampling_params"].get("stream_interval", 1)
        try:
            completion, done = self._model.begin(request["token_ids"])
        except Divergence as error:
            print(error, file=sys.stderr, flush=True)
            refusal = orjson.dumps({"error": {"message": str(error)}})
            return self.transport.write(response(refusal, status=b"400 Bad Request"))
        end = min(len(completion.token_ids), done + request["sampling_params"]["max_tokens"])
        events = []
        for first, last in self._steps(done, end, interval):
            finish = None if last < end else "stop" if end == len(completion.token_ids) else "length"
            steps = completion.token_ids[first:last], completion.logprobs[first:last]
            events.append(chunk(generate_event(*steps, finish, end - done)))
        self._stream(events, done, end, interval)

    def _chat(self, request: dict) -> None:
        completion: Completion = self._model.complete([len(request["messages"])], [])
        ids = completion.token_ids[: request["max_tokens"]]
        word = cache(lambda token_id: self._model.text([token_id]))
        if not request.get("stream"):
            return self.transport.write(response(chat_body("".join(map(word, ids)))))
        texts = ["".join(map(word, ids[first:last])) for first, last in self._steps(0, len(ids), 1)]
        self._stream([chunk(chat_event({"content": text})) for text in texts], 0, len(ids), 1)

    def _steps(self, done: int, end: int, interval: int) -> list[tuple[int, int]]:
        """Return the tokens of each event of a reply, as ranges: as vLLM, `interval` tokens after the first one."""
        burst_end = max(done, min(end, self._burst))
        burst = [(first, min(first + _BURST_EVENT, burst_end)) for first in range(done, burst_end, _BURST_EVENT)]
        first = [] if burst or burst_end == end else [(burst_end, burst_end + 1)]
        paced = range(burst_end + len(first), end, interval)
        return burst + first + [(token, min(token + interval, end)) for token in paced]

    def _stream(self, chunks: list[bytes], done: int, end: int, interval: int) -> None:
        at_once = sum(last <= self._burst for _, last in self._steps(done, end, interval))
        self.write_stream(chunks, self._pace * interval, at_once=at_once)


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text())
    model = Model(Path(settings["tokenizer"]), *settings["lengths"])
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    asyncio.run(serve(lambda: ModelConnection(model, settings["burst"], settings["pace"]), port))
