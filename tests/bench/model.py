"""A model whose replies can be computed again: that of a prompt follows from the prompt and two
sampled words.

The two words are drawn at random, so that two samples of one prompt differ. Every other token and
every log-probability follows from them. So the rows of a run tell what the engine must have sent,
and an engine that is restarted continues a reply that another process began.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
from tokenizers import Tokenizer

_DRAWN = 2
"""Number of words of a reply that are drawn at random."""
_ODD = [" a < b", " <div>", "</div>", "\n\n", " x << 2", " (y<z)", "`<T>`"]
_ODD_EVERY = 16
"""Words after which a text has something else, most of it with a `<`."""


class Divergence(Exception):
    """A request to continue a reply from tokens that this model does not sample."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply: its tokens with the end-of-turn token, and their log-probabilities, which
    float32 holds."""

    token_ids: list[int]
    logprobs: list[float]


class Model:
    """Replies of `shortest` to about `longest` tokens in the chat format of the quickstart's model.

    Half of them begin with reasoning. Half end with a tool call, which is a quarter of their
    tokens.
    """

    def __init__(self, tokenizer: Path, shortest: int, longest: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._lengths = (shortest, longest)
        self._words = []
        for token, number in self.tokenizer.get_vocab().items():
            if re.fullmatch("Ġ[a-z]{3,}", token):
                self._words.append(number)
        self._words.sort()
        self._stop = self._encode("<|im_end|>")
        self._start = self._encode("<|im_start|>assistant\n")
        self._odd = [self._encode(text) for text in _ODD]
        self._think = self._encode("<think>\n")
        self._answer = self._encode("\n</think>\n\n")
        self._call = self._encode('\n<tool_call>\n{"name": "bash", "arguments": {"command": "')
        self._call_end = self._encode('"}}\n</tool_call>')

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def begin(self, token_ids: list[int]) -> tuple[Completion, int]:
        """Return a reply to a request of the engine, and how many of its tokens end the request.

        Raises `Divergence` when those are not the reply's.
        """
        if self._start[0] not in token_ids:
            raise Divergence("the prompt has no turn of the assistant")
        last = len(token_ids) - 1 - token_ids[::-1].index(self._start[0])
        start = last + len(self._start)
        done = token_ids[start:]
        completion = self.complete(token_ids[:start], done)
        if completion.token_ids[: len(done)] != done:
            raise Divergence(f"{len(done)} tokens to continue are not the model's: {done[:20]}")
        return completion, len(done)

    def complete(self, prompt_ids: Sequence[int], sampled: Sequence[int]) -> Completion:
        """Return the reply to a prompt that begins with `sampled`. Words that it lacks are
        drawn."""
        prompt = crc32(np.asarray(prompt_ids, np.int32).tobytes())
        opening = self._think if prompt & 1 else []
        drawn = list(sampled[len(opening) : len(opening) + _DRAWN])
        drawn += random.choices(self._words, k=_DRAWN - len(drawn))
        rng = random.Random(crc32(np.asarray(drawn, np.int32).tobytes(), prompt))
        quarter = rng.randint(*self._lengths) // 4
        ids = opening + drawn + self._prose(rng, quarter)
        if opening:
            ids += self._answer
        ids += self._prose(rng, 2 * quarter)
        if rng.random() < 0.5:
            ids += self._call + rng.choices(self._words, k=quarter) + self._call_end
        else:
            ids += self._prose(rng, quarter)
        ids += self._stop
        # of the prompt alone: a reply may be interrupted between the drawn words
        logprobs = ((np.arange(len(ids)) * 40503 + prompt) % 4096) / -1024.0
        return Completion(ids, logprobs.tolist())

    def _prose(self, rng: random.Random, length: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < length:
            ids += rng.choices(self._words, k=min(_ODD_EVERY, length - len(ids)))
            ids += rng.choice(self._odd)
        return ids
