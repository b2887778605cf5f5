import pytest
from transformers import PreTrainedTokenizerFast

from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.tokenizer import CachingTokenizer

LONG = "A system prompt that many sessions share. " * 20


class Counting:
    def __init__(self):
        self.texts = []

    def encode(self, text, add_special_tokens):
        self.texts.append(text)
        return [len(text)]


@pytest.mark.parametrize("text", ["assistant\n", LONG])
def test_a_text_is_tokenised_once(text):
    inner = Counting()
    tokenizer = CachingTokenizer(inner)
    assert tokenizer.encode(text) == tokenizer.encode(text) == [len(text)]
    assert inner.texts == [text]


def test_the_returned_ids_are_a_copy():
    tokenizer = CachingTokenizer(Counting())
    tokenizer.encode(LONG).append(5)
    assert tokenizer.encode(LONG) == [len(LONG)]


def test_its_ids_are_those_of_the_wrapped_tokenizer(tokenizer_folder):
    inner = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    tokenizer = CachingTokenizer(inner)
    for text in ("Hi", LONG, "é" * 300):
        assert tokenizer.encode(text) == inner.encode(text, add_special_tokens=False)
    assert tokenizer.eos_token_id == inner.eos_token_id


def test_sessions_share_the_tokens_of_their_system_prompt(tokenizer_folder, monkeypatch):
    texts = []
    encode = PreTrainedTokenizerFast.encode
    monkeypatch.setattr(
        PreTrainedTokenizerFast, "encode", lambda self, text, **kw: (texts.append(text), encode(self, text, **kw))[1]
    )
    rendering = Rendering(str(tokenizer_folder), "qwen3")
    for text in ("one", "two"):
        rendering.render([{"role": "system", "content": LONG}, {"role": "user", "content": text}], [])
    assert sum(LONG in text for text in texts) == 1
