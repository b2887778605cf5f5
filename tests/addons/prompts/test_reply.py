import re
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers.base import RENDERER_REGISTRY, create_renderer
from renderers.configs import config_from_name
from transformers import AutoTokenizer

from rolltap.addons.dialects.call import ModelCall
from rolltap.addons.prompts.families import families
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.reply import FieldText, ReplyParser, SampledReply, is_sampled
from tests.addons.conftest import TEMPLATE
from tests.deep import examples

MODELS = Path(__file__).resolve().parents[2] / "models"
CALL_TEXT = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL_TEXT, "<", "</", ">"]
PLAIN = [
    "Hi",
    "é",
    "😀",
    " ",
    "\n\n",
    "a < b",
    "<b>",
    "</div>",
    "x << y << z",
    "</",
    '{"a": [1]}',
    "\uff5c{",
    "\ufffd",
]
texts = st.lists(st.sampled_from(PLAIN) | st.text(max_size=5), max_size=12).map("".join)


def stripped(text):
    return text.replace("\ufffd", "").strip()


words = texts.map(stripped)
QUOTED = re.compile(
    r'"(<[^"\s{}%]{1,60}>|\[[^"\s{}%,]{1,30}[\]\[]|\][^"\s{}]{1,20}[\[\]]|〈[^"\s]{1,9}〉|\uff5c[A-Z]+\uff5c)'
)
"""A special token in the source of a renderer."""


@cache
def special_tokens():
    """Return the special tokens that the renderers of `renderers` name."""
    source = ""
    for path in Path(find_spec("renderers").origin).parent.glob("*.py"):
        source += path.read_text()
    for written, meant in {
        "{_HYTK}": ":opensource",
        "\\uff5c": "\uff5c",
        "\\u2581": "\u2581",
    }.items():
        source = source.replace(written, meant)
    outputs = []
    for name in ("s\u2581begin", "s\u2581end", "\u2581begin", "\u2581end"):
        outputs.append(f"<\uff5ctool\u2581output{name}\uff5c>")
    return sorted({*QUOTED.findall(source), *outputs, "]<]video[>["})


NEEDS_A_DOWNLOAD = {"gpt-oss"}


@cache
def renderers():
    """Return the names of the renderers that write prompts without a network."""
    create_renderer(
        AutoTokenizer.from_pretrained(MODELS / "qwen3-4b"), config_from_name("default")
    )  # finds them all
    return sorted(RENDERER_REGISTRY.keys() - NEEDS_A_DOWNLOAD - {"default"})


@pytest.fixture(scope="module")
def everybodys(tmp_path_factory, save_tokenizer):
    """Return the folder of a tokenizer with the special tokens of all models."""
    return save_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), TEMPLATE.read_text(), special_tokens()
    )


@pytest.mark.parametrize("renderer", renderers())
def test_what_a_renderer_writes_is_read_by_a_family(everybodys, renderer):
    rendering = Rendering(everybodys, renderer)
    assert (rendering.unreadable, rendering.lacks) == (None, [])
    assert all(rendering.read_turns().values())


def stream(rendering, ids, cuts, **fields):
    """Return the sent reasoning and content of a completion that is fed up to each of `cuts`, and
    the reply."""
    growing = rendering.sampled_reply([], ModelCall("m", [], [], **fields))
    new = [growing.feed(ids[begin:end]) for begin, end in pairwise([0, *cuts, len(ids)])]
    reply, rest = growing.finish()
    sent_reasoning = ""
    sent_content = ""
    for reasoning, content in [*new, rest]:
        assert not (reasoning and sent_content), "reasoning after content"
        sent_reasoning += reasoning
        sent_content += content
    return sent_reasoning, sent_content, reply


def token_by_token(rendering, ids, **fields):
    return stream(rendering, ids, range(len(ids)), **fields)


def cuts_of(data, ids):
    if data.draw(st.booleans()):
        return sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    return range(len(ids) + 1)


@given(st.data(), words, words, st.booleans(), st.integers(0, 2))
@examples(300)
def test_a_well_formed_completion_is_sent_as_a_whole(
    rendering, encode, data, reasoning, content, thinks, calls
):
    opening = f"<think>\n{reasoning}\n</think>\n\n" if thinks else ""
    ids = encode(opening + content + CALL_TEXT * calls + "<|im_end|>")
    *sent, reply = stream(rendering, ids, cuts_of(data, ids))
    assert sent == [reply.reasoning, reply.content] == [reasoning * thinks, content]
    assert [call.name for call in reply.tool_calls] == ["look"] * calls
    assert is_sampled(reply.to_message(), rendering.read([], ids, [])[0])


@pytest.fixture(
    scope="module",
    params=["qwen3", "qwen3.5", "glm-4.5", "gemma4", "kimi-k2", "deepseek-v3", "inkling"],
)
def other(request, everybodys):
    return Rendering(everybodys, request.param)


@given(st.data())
@examples(300)
def test_the_sent_text_of_any_tokens_is_the_text_of_the_reply_in_every_split(other, data):
    pieces = (
        st.sampled_from([*special_tokens(), *TAGS, *TAGS, *PLAIN, "<|im_end|>", "</thi"])
        | texts
        | st.integers(0, 399)
    )
    ids = []
    for piece in data.draw(st.lists(pieces, max_size=25)):
        ids += [piece] if isinstance(piece, int) else other.tokenizer.encode(piece)
    whole, num_reasoning = other.read([], ids, [])
    *sent, reply = stream(other, ids, cuts_of(data, ids))
    assert sent == [reply.reasoning, reply.content] == [whole.reasoning, whole.content]
    assert reply.tool_calls == whole.tool_calls
    assert num_reasoning <= len(ids)


def parser_of(family):
    return ReplyParser(families()[family], "", ModelCall("m", [], []))


class TestHeldBack:
    @pytest.mark.parametrize(
        ("text", "certain"),
        [
            ("Hi there", "Hi there"),
            ("Hi  \n", "Hi"),
            ("I look <tool_c", "I look"),
            ("I look <tool_c all", "I look <tool_c all"),
            ("a <b>", "a <b>"),
            ("<think", ""),
            ("<<< a " * 1000 + "x", "<<< a " * 1000 + "x"),
            ("\n" * 10_000 + "x", "x"),
        ],
    )
    def test_a_suffix_that_the_next_token_may_change(self, text, certain):
        assert parser_of("hermes").feed(text) == ("", certain)

    def test_a_character_whose_bytes_are_incomplete(self, rendering, encode):
        ids = encode("caf😀")
        growing = rendering.sampled_reply([], ModelCall("m", [], []))
        new = [growing.feed([token_id])[1] for token_id in ids]
        assert [text for text in new if text] == ["c", "a", "f", "😀"]

    @pytest.mark.parametrize(
        ("text", "sent", "stop"),
        [
            ("one two STO", "one two ", None),
            ("one two S", "one tw", None),
            ("one", "", None),
            ("1 STOP 2", "1 ", "STOP"),
        ],
    )
    def test_the_end_that_may_begin_a_stop_text(self, text, sent, stop):
        growing = FieldText(["STOP", "x"])
        growing.add(text)
        assert (growing.take(), growing.stop) == (sent, stop)

    def test_plain_text_is_sent_as_it_arrives(self, rendering, encode):
        growing = rendering.sampled_reply([], ModelCall("m", [], []))
        for token_id in encode("Hello there"):
            sent = "".join(growing.feed([token_id]))
            assert sent.strip() or rendering.tokenizer.decode([token_id]).isspace()


class TestStopTexts:
    @pytest.mark.parametrize(
        ("text", "stops", "reasoning", "content", "stop"),
        [
            ("one STOP two", ["STOP"], "", "one ", "STOP"),
            ("one END two STOP", ["STOP", "END"], "", "one ", "END"),
            ("one STO", ["STOP"], "", "one STO", None),
            ("STOP", ["STOP"], "", "", "STOP"),
            ("<think>I think STOP now</think>text", ["STOP"], "I think ", "", "STOP"),
            (CALL_TEXT + "one STOP", ["STOP"], "", "one ", "STOP"),
        ],
    )
    def test_a_reply_ends_before_the_first_one(
        self, rendering, encode, text, stops, reasoning, content, stop
    ):
        reply, _ = rendering.read([], encode(text), [], stops)
        assert (reply.reasoning, reply.content, reply.stop) == (reasoning, content, stop)
        assert reply.tool_calls == []

    @given(
        st.data(),
        words,
        words,
        st.lists(st.sampled_from(["b>", " ", "é", "Hi", "zz", "a <"]), max_size=3),
    )
    @examples(200)
    def test_it_ends_what_is_sent(self, rendering, encode, data, reasoning, content, stops):
        ids = encode(f"<think>\n{reasoning}\n</think>\n\n{content}<|im_end|>")
        *sent, reply = stream(rendering, ids, cuts_of(data, ids), stop=stops)
        assert sent == [reply.reasoning, reply.content]
        for text in sent:
            assert not any(stop in text for stop in stops)


OBJECT = {"type": "object"}


class TestStructuredOutput:
    """The template, or the model, may open the reasoning before the JSON."""

    @pytest.mark.parametrize("text", ['{"a": "' + "é" * 300, "[1, 2]", "42", '"text"'])
    def test_it_is_content(self, rendering, encode, text):
        *sent, reply = token_by_token(rendering, encode("<think>" + text), schema=OBJECT)
        assert [*sent, reply.content] == ["", text, text]

    def test_a_model_that_was_not_held_to_it_reasons_before_it(self, rendering, encode):
        ids = encode('<think>\nI make [1].\n</think>\n\n{"a": 1}<|im_end|>')
        *sent, _ = token_by_token(rendering, ids, schema=OBJECT)
        assert sent == ["I make [1].", '{"a": 1}']


class TestUnread:
    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("<tool_call>{}", "the call has not ended"),
            ("<tool_call>{</tool_call>", "the call cannot be read: json parser could not parse"),
            (
                '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
                "the name of the tool is no text",
            ),
            ("Hello.", None),
        ],
    )
    def test_a_call_that_is_text_has_a_reason(self, rendering, encode, text, why):
        reply, _ = rendering.read([], encode(text + "<|im_end|>"), [])
        assert (reply.content, reply.tool_calls) == (text, [])
        assert reply.unread is None if why is None else why in reply.unread

    def test_calls_that_may_not_be_made_are_lines_of_the_text(self, rendering, encode):
        ids = encode("So." + CALL_TEXT + "<|im_end|>")
        _, content, reply = token_by_token(rendering, ids, may_call=False)
        text = 'So.\n{"name": "look", "arguments": "{\\"at\\": \\"é\\"}"}'
        assert content == reply.content == text


@given(words, words, st.booleans())
@examples(200)
def test_the_tokens_up_to_the_end_of_the_reasoning_are_counted(
    rendering, encode, reasoning, content, ends
):
    ids = encode(f"<think>\n{reasoning}" + f"\n</think>\n\n{content}<|im_end|>" * ends)
    reply, count = rendering.read([], ids, [])
    if not reply.reasoning:
        assert count == 0
        return
    marked = f"<think>\n{reply.reasoning}"
    for length, whole in ((count, True), (count - 1, False)):
        assert rendering.tokenizer.decode(ids[:length]).rstrip("\ufffd").startswith(marked) == whole


def test_reasoning_after_content_is_counted_and_not_sent():
    def decode(ids):
        return "".join(map(chr, ids))

    growing = SampledReply(parser_of("harmony"), decode, [])
    one = "<|channel|>analysis<|message|>one"
    two = "<|channel|>analysis<|message|>two"
    text = f"{one}<|end|><|channel|>final<|message|>So.<|end|>{two}<|end|>"
    first = growing.feed(map(ord, text))
    reply, rest = growing.finish()
    assert (first, rest) == (("one", "So."), ("", ""))
    assert (reply.reasoning, reply.content) == ("one", "So.")
    assert growing.reasoning_tokens == len(one + two)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_a_tool_call_that_repeats_the_text_before_it_is_not_sent(rendering, encode, chunk):
    text = '{"name": "look"'
    ids = encode(text + f'<tool_call>{text}, "arguments": {{}}}}</tool_call>' * 2)
    _, content, reply = stream(rendering, ids, range(0, len(ids), chunk))
    assert content == text
    assert len(reply.tool_calls) == 2
