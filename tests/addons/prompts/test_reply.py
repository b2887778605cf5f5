import threading
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects.model_call import ModelCall, Reply
from rolltap.addons.prompts.rendering import ParseBudget, Rendering
from rolltap.addons.prompts.reply import GrowingReply, TextDeltas, cut_at_stop
from tests.addons.conftest import TEMPLATE
from tests.deep import examples

CALL_TEXT = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL_TEXT, "<", "</", ">"]
PLAIN = ["Hi", "é", "😀", " ", "\n\n", "a < b", "<b>", "</div>", "x << y << z", "</", '{"a": [1]}', "\uff5c{", "\ufffd"]
texts = st.lists(st.sampled_from(PLAIN) | st.text(max_size=5), max_size=12).map("".join)


def joined(parts):
    """Return the reasoning and the content of the parts that were sent. No reasoning comes after content."""
    content_begins = next((i for i, (_, content) in enumerate(parts) if content), len(parts))
    assert not any(reasoning for reasoning, _ in parts[content_begins + 1 :])
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def stream(rendering, token_ids, cuts):
    """Return the text sent for a completion that is parsed at each of `cuts`, and its reply after `finish`."""
    deltas = TextDeltas()
    parts = [deltas.feed(rendering.parse([], token_ids[:cut], [], partial=True)) for cut in cuts]
    reply = rendering.parse([], token_ids, [])
    parts.append(deltas.finish(reply))
    return *joined(parts), reply


def ids_of(pieces, encode):
    """Return the token ids of texts and ids."""
    return [i for piece in pieces for i in ([piece] if isinstance(piece, int) else encode(piece))]


@given(st.data(), texts, texts, st.booleans(), st.integers(0, 2))
@examples(300)
def test_a_well_formed_completion_is_sent_as_a_whole(rendering, encode, data, reasoning, content, thinks, calls):
    opening = f"<think>\n{reasoning}\n</think>\n\n" if thinks else ""
    token_ids = encode(opening + content + CALL_TEXT * calls + "<|im_end|>")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(token_ids)))))
    whole = rendering.parse([], token_ids, [])
    sent_reasoning, sent_content, _ = stream(rendering, token_ids, cuts)
    assert (sent_reasoning, sent_content) == (whole.reasoning, whole.content)
    assert len(whole.tool_calls) == calls


class TestFeed:
    @pytest.mark.parametrize(
        ("text", "certain"),
        [
            ("Hi there", "Hi there"),
            ("Hi  \n", "Hi"),
            ("caf\ufffd", "caf"),
            ("I look <tool_c", "I look"),
            ("I look <function=a_name_that_is_too_lo", "I look"),
            ("a <\ufffd", "a"),
            ("a <<<", "a <<"),
            ("a <b>", "a <b>"),
            ("a < b and then much more than any tag holds", "a < b and then much more than any tag holds"),
            ("a <\nb", "a <\nb"),
            ("<think", ""),
        ],
    )
    def test_a_suffix_that_the_next_token_may_change_is_held_back(self, text, certain):
        assert TextDeltas().feed(Reply(content=text)) == ("", certain)
        assert TextDeltas().feed(Reply(reasoning=text)) == (certain, "")

    @pytest.mark.parametrize("text", ["<< a " * 1000 + "x" * 40, "\n" * 100_000 + "x"], ids=["C++", "empty lines"])
    def test_long_texts_of_open_tags_or_white_space_are_sent_whole(self, text):
        assert TextDeltas().feed(Reply(content=text)) == ("", text)


@pytest.mark.parametrize(
    ("fed", "last", "rest", "whole"),
    [
        (Reply(content="a <"), Reply(content="a <"), ("", " <"), ("", "a <")),
        (Reply(content="I think"), Reply(reasoning="I think", content="Hi"), ("", ""), ("", "I think")),
        (Reply(reasoning="I think"), Reply(reasoning="Something else"), ("", ""), ("I think", "")),
    ],
    ids=["held back", "content", "reasoning"],
)
def test_at_the_end_the_rest_is_sent_and_what_was_sent_stays_though_the_last_parse_differs(fed, last, rest, whole):
    deltas = TextDeltas()
    deltas.feed(fed)
    assert deltas.finish(last) == rest
    assert (last.reasoning, last.content) == whole


@pytest.mark.parametrize(
    ("reply", "stops", "cut"),
    [
        (Reply("one STOP two"), ["STOP"], Reply("one ", stop="STOP")),
        (Reply("one END two STOP"), ["STOP", "END"], Reply("one ", stop="END")),
        (Reply("one"), ["STOP"], Reply("one")),
        (Reply("STOP"), ["STOP"], Reply("", stop="STOP")),
        (Reply("one STO"), ["STOP"], Reply("one STO")),
        (Reply("text", "I think STOP"), ["STOP"], Reply("", "I think ", stop="STOP")),
    ],
)
def test_a_reply_ends_before_the_first_stop_text(reply, stops, cut):
    cut_at_stop(reply, stops, partial=False)
    assert reply == cut


@pytest.mark.parametrize(
    ("text", "sent"), [("one two STO", "one two "), ("one two S", "one tw"), ("one", ""), ("one STOP two", "one ")]
)
def test_the_end_that_may_begin_a_stop_text_is_held_back(text, sent):
    reply = Reply(text)
    cut_at_stop(reply, ["STOP", "x"], partial=True)
    assert reply.content == sent


TOKENS = {
    "<|%s|>": "assistant user system observation begin_of_text start_header_id end_header_id eot_id end_of_text eom_id "
    "im_system im_user im_assistant im_middle tool_calls_section_begin tool_calls_section_end tool_call_begin "
    "tool_call_end tool_call_argument_begin image_pad video_pad vision_start vision_end begin_of_image end_of_image",
    "<\uff5c%s\uff5c>": "begin▁of▁sentence end▁of▁sentence User Assistant tool▁calls▁begin tool▁calls▁end "
    "tool▁call▁begin tool▁call▁end tool▁sep tool▁outputs▁begin tool▁outputs▁end tool▁output▁begin tool▁output▁end "
    "latest_reminder action query authority domain title read_url extracted_url",
    "%s": "\uff5cDSML\uff5c <arg_key> </arg_key> <arg_value> </arg_value> <sop> [gMASK]",
}
"""Special tokens of the families, by the form that they are written in."""
ADDED = [form % name for form, names in TOKENS.items() for name in names.split()]
FAMILIES = ["default", "qwen3", "qwen3.5", "glm-4.5", "kimi-k2", "llama-3", "nemotron-3", "deepseek-v3", "deepseek-v4"]
USER = {"role": "user", "content": "Hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "é <b> {x}"}'}}
ENDLESS = "aé😀 " * 2000

words = texts.map(lambda text: text.replace("\ufffd", "").strip())


def clock(hurry):
    """Return a clock that runs so fast that every parse is allowed, or stands still."""
    return count(step=1e9 if hurry else 0).__next__


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory, save_tokenizer):
    return Rendering(save_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE.read_text(), ADDED), request.param)


def grow(rendering, ids, cuts, model_call=None, hurry=True):
    """Feed the completion up to each of `cuts`, and finish. Returns the sent reasoning and content, and the reply."""
    rendering.parse_budget = ParseBudget(clock=clock(hurry))
    growing = GrowingReply(rendering, [], model_call or ModelCall("m", [], []))
    parts = [growing.feed(ids[:cut]) for cut in cuts]
    reply, rest = growing.finish(ids)
    return *joined([*parts, rest]), reply


def sampled(rendering, reasoning, content, calls):
    """Return the completion that a renderer writes for a message."""
    message = {"role": "assistant", "content": content, "tool_calls": [CALL] * calls}
    if reasoning:
        message["reasoning_content"] = reasoning
    prompt_ids = rendering.render([USER], [])
    ids = rendering._renderer.render_ids([USER, message], tools=None, add_generation_prompt=False)
    return ids[next(n for n, token_id in enumerate(ids) if prompt_ids[n : n + 1] != [token_id]) :]


def cuts_of(data, ids):
    return sorted(data.draw(st.sets(st.integers(0, len(ids))))) if data.draw(st.booleans()) else range(len(ids) + 1)


@given(st.data(), words, words, st.booleans(), st.booleans())
@examples(60)
def test_a_message_is_sent_as_it_is_parsed_as_a_whole(family, data, reasoning, content, calls, hurry):
    ids = sampled(family, reasoning, content, calls)
    whole = family.parse([], ids, [])
    *_, each = stream(family, ids, range(len(ids)))
    reasoning, content, reply = grow(family, ids, cuts_of(data, ids), hurry=hurry)
    made = [[(call.name, call.arguments) for call in parsed.tool_calls] for parsed in (reply, whole)]
    assert made[0] == made[1]
    if (each.reasoning, each.content) == (whole.reasoning, whole.content):  # some grammars contradict themselves
        assert (reasoning, content) == (whole.reasoning, whole.content)


@given(st.data(), st.booleans())
@examples(300)
def test_the_sent_text_of_any_tokens_is_the_text_of_the_reply(family, data, hurry):
    markup = st.sampled_from([*ADDED, *TAGS, *TAGS, *PLAIN, "<|im_end|>", "</thi"])
    ids = ids_of(data.draw(st.lists(markup | texts | st.integers(0, 399), max_size=25)), family._tokenizer.encode)
    reasoning, content, reply = grow(family, ids, cuts_of(data, ids), hurry=hurry)
    assert (reasoning, content) == (reply.reasoning, reply.content)


@given(st.data(), words, words, st.lists(st.sampled_from(["b>", " ", "é", "Hi", "zz", "a <"]), max_size=3))
@examples(200)
def test_a_stop_text_ends_what_is_sent(rendering, encode, data, reasoning, content, stops):
    ids = encode(f"<think>\n{reasoning}\n</think>\n\n{content}<|im_end|>")
    whole = rendering.parse([], ids, [])
    cut_at_stop(whole, stops, partial=False)
    sent = grow(rendering, ids, cuts_of(data, ids), ModelCall("m", [], [], stop=stops))
    assert sent[:2] == (whole.reasoning, whole.content)
    assert sent[2].stop == whole.stop


def test_structured_output_in_an_open_reasoning_is_content(rendering, encode):
    ids = encode('<think>{"a": "' + "é" * 300)
    call = ModelCall("m", [], [], schema={"type": "object"})
    _, content, reply = grow(rendering, ids, range(len(ids)), call)
    assert content == reply.content == '{"a": "' + "é" * 300


class Counting:
    """A rendering that counts parses of whole completions, and their tokens."""

    def __init__(self, rendering):
        self._rendering, self.tokens, self.parses = rendering, 0, 0

    def __getattr__(self, name):
        return getattr(self._rendering, name)

    def parse(self, prompt_ids, completion_ids, tools, *, partial=False):
        self.tokens += len(completion_ids)
        self.parses += partial
        return self._rendering.parse(prompt_ids, completion_ids, tools, partial=partial)


@pytest.mark.parametrize(
    "text",
    [
        ENDLESS,
        "<think>\n" + ENDLESS,
        "<think>\nHm.\n</think>\n\n" + ENDLESS,
        "<div>a</div>\n" * 800,
        "if a < b: x <<= 1\n" * 500,
        '<tool_call>\n{"name": "write", "arguments": {"text": "' + ENDLESS,
        "<tool_call>\n" * 5000,
        "\n" * 10_000,
    ],
    ids=["content", "reasoning", "both", "HTML", "code", "an open tool call", "tool calls", "empty lines"],
)
def test_a_long_completion_is_parsed_a_few_times_its_length(rendering, encode, text):
    rendering.parse_budget = ParseBudget(clock=clock(False))
    ids = encode(text)
    assert len(ids) >= 5000
    counting = Counting(rendering)
    growing = GrowingReply(counting, [], ModelCall("m", [], []))
    for cut in range(0, len(ids), 3):
        growing.feed(ids[:cut])
    assert counting.tokens <= 12 * len(ids)


@pytest.mark.parametrize(
    "text", [ENDLESS, "<think>\n" + ENDLESS, "<div>a</div>\n" * 800], ids=["text", "think", "HTML"]
)
def test_plain_text_is_sent_as_it_arrives(rendering, encode, text):
    rendering.parse_budget = ParseBudget(clock=clock(True))
    ids = encode(text)
    counting = Counting(rendering)
    growing, deltas, sent, expected = GrowingReply(counting, [], ModelCall("m", [], [])), TextDeltas(), "", ""
    for cut in range(0, len(ids), 50):
        sent += "".join(growing.feed(ids[:cut]))
        expected += "".join(deltas.feed(rendering.parse([], ids[:cut], [], partial=True)))
        assert sent == expected
    assert counting.parses <= 4


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_a_tool_call_that_repeats_the_text_before_it_is_not_sent(rendering, encode, chunk):
    text = '{"name": "look"'
    ids = encode(text + f'<tool_call>{text}, "arguments": {{}}}}</tool_call>' * 2)
    _, content, reply = grow(rendering, ids, range(0, len(ids), chunk))
    assert content == text
    assert len(reply.tool_calls) == 2


@pytest.mark.parametrize("calls", [1, 2])
def test_a_tool_call_that_repeats_text_which_arrives_with_it_is_not_sent(rendering, encode, calls):
    before, repeated, rest = encode("I say "), encode('{"name": "look"'), encode(', "arguments": {}}</tool_call>')
    call = [*encode("<tool_call>"), *repeated, *rest]
    ids = [*before, *repeated, *call * calls]
    seen = [len(before), len(ids) - len(call)][:calls]
    _, content, reply = grow(rendering, ids, [*seen, *range(len(ids) - len(rest), len(ids))])
    assert (content, len(reply.tool_calls)) == ('I say {"name": "look"', calls)


def test_nothing_is_sent_after_the_end_begins(rendering, encode, monkeypatch):
    ids = encode("Hi there <b")
    growing = GrowingReply(rendering, [], ModelCall("m", [], []))
    during = []
    parse, caller = Rendering.parse, threading.current_thread()

    def parse_and_feed(self, prompt_ids, completion_ids, tools, *, partial=False):
        if not partial:
            during.append(growing.feed(ids) if threading.current_thread() is not caller else None)
        return parse(self, prompt_ids, completion_ids, tools, partial=partial)

    assert growing.feed(ids[:2]) != ("", "")
    monkeypatch.setattr(Rendering, "parse", parse_and_feed)
    ended = []
    thread = threading.Thread(target=lambda: ended.append(growing.finish(ids)))
    thread.start()
    thread.join()
    assert during == [("", "")]
    assert growing.feed([*ids, *ids]) == ("", "")
    assert ended[0][0] == Reply(content="Hi there <b")
