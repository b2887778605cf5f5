import asyncio
import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import ANY, Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.tokenizer import CachingTokenizer, TokenTexts, vocabulary_size
from tests.addons.harness import user
from tests.deep import examples

LONG = "A system prompt that many sessions share. " * 20


@pytest.mark.parametrize("text", ["assistant\n", LONG])
def test_a_text_is_tokenised_once(text):
    encode = Mock(return_value=[len(text)])
    tokenizer = CachingTokenizer(SimpleNamespace(encode=encode))
    assert tokenizer.encode(text) == tokenizer.encode(text) == [len(text)]
    encode.assert_called_once_with(text, add_special_tokens=ANY)
    tokenizer.encode(text).append(5)  # a copy
    assert tokenizer.encode(text) == [len(text)]


def test_sessions_share_the_tokens_of_their_system_prompt(tokenizer_folder):
    rendering = Rendering(str(tokenizer_folder), "qwen3")
    encode = CachingTokenizer._encode
    with patch.object(CachingTokenizer, "_encode", autospec=True, side_effect=encode) as encoded:
        for text in ("one", "two"):
            rendering.render([{"role": "system", "content": LONG}, user(text)], [])
    assert sum(LONG in call.args[1] for call in encoded.call_args_list) == 1


@given(
    st.text()
    | st.lists(st.sampled_from(["<|im_end|>", "<think>", " ", "\n", "é", "e\u0301", "Hi"])).map(
        "".join
    )
)
@examples(200)
def test_any_text_has_the_ids_and_the_text_of_the_wrapped_tokenizer(tokenizer, text):
    caching = CachingTokenizer(tokenizer)
    for one in (text, text * 100):
        ids = tokenizer.encode(one, add_special_tokens=False)
        assert caching.encode(one) == ids
        for skip in (True, False):
            decoded = tokenizer.decode(ids, skip_special_tokens=skip)
            assert caching.decode(ids, skip_special_tokens=skip) == decoded


def test_a_chat_template_has_the_tokens_of_the_wrapped_tokenizer(tokenizer):
    messages = [user(LONG)]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    ids = tokenizer.apply_chat_template(messages, **options)
    assert CachingTokenizer(tokenizer).apply_chat_template(messages, **options) == ids


def test_texts_are_not_cut_at_the_length_that_a_tokenizer_is_saved_with(tokenizer_folder, tmp_path):
    saved = AutoTokenizer.from_pretrained(tokenizer_folder)
    saved.backend_tokenizer.enable_truncation(8)
    saved.backend_tokenizer.enable_padding()
    saved.save_pretrained(tmp_path)
    cut = CachingTokenizer(AutoTokenizer.from_pretrained(tmp_path))
    whole = CachingTokenizer(AutoTokenizer.from_pretrained(tokenizer_folder))
    assert cut.encode(LONG) == whole.encode(LONG)


async def test_other_work_goes_on_while_a_long_text_is_encoded(tokenizer):
    caching = CachingTokenizer(tokenizer)
    turns = 0
    task = asyncio.create_task(asyncio.to_thread(caching.encode, LONG * 1200))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100


@pytest.mark.parametrize(
    ("texts", "length", "least", "most"),
    [(120, 800_000, 32 * 2**20, 1.1 * 64 * 2**20), (1, 8_000_000, 0, 1_000_000)],
    ids=["many texts", "a text that would fill it"],
)
def test_the_cache_of_long_texts_is_bounded_in_bytes(texts, length, least, most):
    def encode(text, add_special_tokens):
        return list(text.encode())

    caching = CachingTokenizer(SimpleNamespace(encode=encode))
    tracemalloc.start()
    for n in range(texts):
        caching.encode(f"{n}" + " " * length)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert least < kept < most


def test_threads_get_the_tokens_of_their_own_texts(tokenizer):
    caching = CachingTokenizer(tokenizer)
    texts = [f"{n} {LONG}" for n in range(400)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(caching.encode, texts * 3))
    assert found == [caching.encode(text) for text in texts] * 3


def streamed(decode, ids):
    """Return the texts of the tokens, one after the other."""
    texts = TokenTexts(decode)
    return [*map(texts.add, ids), texts.finish()]


@given(st.lists(st.integers(0, 399), max_size=40) | st.text().map(list))
@examples(300)
def test_texts_of_tokens_add_up_to_the_text_of_all_of_them(tokenizer, encode, pieces):
    ids = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else encode(piece)
    decode = CachingTokenizer(tokenizer).decode
    assert "".join(streamed(decode, ids)) == decode(ids)


def test_bytes_that_are_no_character_are_text_after_a_while(tokenizer):
    """The work for each of them is bounded: no more tokens are decoded together."""
    decoded = []
    continuation = tokenizer.encode("é", add_special_tokens=False)[-1]

    def decode(ids):
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    assert "".join(streamed(decode, [continuation] * 1000)) == "\ufffd" * 1000
    assert max(decoded) < 100


@pytest.mark.parametrize(
    "config", [None, {"vocab_size": 10**6}, {"text_config": {"vocab_size": 10**6}}, {}]
)
def test_a_model_can_sample_the_ids_of_its_embeddings_or_else_of_its_tokenizer(
    tokenizer, tmp_path, config
):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    expected = 10**6 if config else len(tokenizer)
    assert vocabulary_size(CachingTokenizer(tokenizer), str(tmp_path)) == expected
