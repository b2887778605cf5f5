import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from rolltap.addons.prompts.tokenizer import CachingTokenizer, Markup


@pytest.fixture
def markup(tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_tokens([AddedToken("\n\n\n", special=False, normalized=False)])
    return Markup(CachingTokenizer(tokenizer))


@pytest.mark.parametrize("text", ["a<think>", "</think>", "<|im_end|>b", "<tool_call>", "<\uff5cDSML\uff5ctool_calls>"])
def test_texts_that_renderers_interpret_are_markup(markup, text):
    assert markup.in_text(text)


@pytest.mark.parametrize("text", ["", "thinking", "a < b", "<div>", "\n\n\n", "{}"])
def test_other_texts_are_not(markup, encode, text):
    assert not markup.in_text(text)
    assert not markup.in_tokens(encode(text))


def test_added_tokens_are_markup_and_runs_of_white_space_are_not(markup, encode):
    assert markup.in_tokens(encode("a<tool_call>"))
    assert not markup.in_tokens(markup._tokenizer.encode("a\n\n\nb"))


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("Hi", "", "Hi"),
        ("<think>I", "", "I"),
        ("a<think>b</think>c", "a<think>b", "c"),
        ("a<tool_call>", "a", ""),
        ("a \uff5c b", "a ", " b"),
    ],
)
def test_the_texts_around_the_last_markup_are_found(markup, encode, text, before, after):
    assert markup.around_last(encode(text)) == (before, after)
