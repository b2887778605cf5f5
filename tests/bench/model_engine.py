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
        super().__init__()
        self._model, self._burst, self._pace = model, burst, pace

    def answer(self, path, body):
        request = orjson.loads(body)
        if not path.endswith(b"generate"):
            return self._chat(request)
        try:
            completion, done = self._model.begin(request["token_ids"])
        except Divergence as error:
            print(error, file=sys.stderr, flush=True)
            refusal = orjson.dumps({"error": {"message": str(error)}})
            return self.transport.write(response(refusal, status=b"400 Bad Request"))
        end = min(len(completion.token_ids), done + request["sampling_params"]["max_tokens"])
        events = []
        for first, last in self._steps(done, end):
            finish = None if last < end else "stop" if end == len(completion.token_ids) else "length"
            steps = completion.token_ids[first:last], completion.logprobs[first:last]
            events.append(chunk(generate_event(*steps, finish, end - done)))
        self._stream(events, done, end)

    def _chat(self, request: dict) -> None:
        completion: Completion = self._model.complete([len(request["messages"])], [])
        ids = completion.token_ids[: request["max_tokens"]]
        word = cache(lambda token_id: self._model.text([token_id]))
        if not request.get("stream"):
            return self.transport.write(response(chat_body("".join(map(word, ids)))))
        texts = ["".join(map(word, ids[first:last])) for first, last in self._steps(0, len(ids))]
        self._stream([chunk(chat_event({"content": text})) for text in texts], 0, len(ids))

    def _steps(self, done: int, end: int) -> list[tuple[int, int]]:
        """Return the tokens of each event of a reply, as ranges."""
        burst_end = max(done, min(end, self._burst))
        burst = [(first, min(first + _BURST_EVENT, burst_end)) for first in range(done, burst_end, _BURST_EVENT)]
        return burst + [(token, token + 1) for token in range(burst_end, end)]

    def _stream(self, chunks: list[bytes], done: int, end: int) -> None:
        at_once = sum(last <= self._burst for _, last in self._steps(done, end))
        self.write_stream(chunks, self._pace, at_once=at_once)


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text())
    model = Model(Path(settings["tokenizer"]), *settings["lengths"])
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    asyncio.run(serve(lambda: ModelConnection(model, settings["burst"], settings["pace"]), port))
