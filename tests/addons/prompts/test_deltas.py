import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects.model_call import Reply
from rolltap.addons.prompts.reply import TextDeltas, cut_at_stop
from tests.deep import examples

PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "\n",
    "  ",
    "<",
    "</",
    ">",
    "é",
    "😀",
    "Hi there",
    "\ufffd",
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'

texts = st.lists(
    st.sampled_from(["Hi", "é", "😀", " ", "\n\n", "a < b", "<b>", "x << y << z", "</", "\ufffd", "{"])
    | st.text(max_size=5),
    max_size=8,
).map("".join)


def stream(rendering, token_ids, cuts):
    """Return the text sent for a completion that is parsed at each of `cuts`, and its reply after `finish`."""
    deltas = TextDeltas()
    parts = [deltas.feed(rendering.parse([], token_ids[:cut], [], partial=True)) for cut in cuts]
    reply = rendering.parse([], token_ids, [])
    parts.append(deltas.finish(reply))
    content_begins = next((i for i, (_, content) in enumerate(parts) if content), len(parts))
    assert not any(reasoning for reasoning, _ in parts[content_begins + 1 :])
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts), reply


@st.composite
def completions(draw, encode):
    """Draw token ids of markup, text and parts of characters."""
    pieces = draw(st.lists(st.sampled_from([*PIECES, CALL]) | st.integers(0, 399), max_size=25))
    return [i for piece in pieces for i in ([piece] if isinstance(piece, int) else encode(piece))]


@given(st.data())
@examples(300)
def test_the_sent_text_is_the_text_of_the_reply(rendering, encode, data):
    token_ids = data.draw(completions(encode))
    reasoning, content, reply = stream(rendering, token_ids, range(len(token_ids) + 1))
    assert (reasoning, content) == (reply.reasoning, reply.content)


@given(st.data(), texts, texts, st.booleans(), st.integers(0, 2))
@examples(300)
def test_a_well_formed_completion_is_sent_as_a_whole(rendering, encode, data, reasoning, content, thinks, calls):
    opening = f"<think>\n{reasoning}\n</think>\n\n" if thinks else ""
    token_ids = encode(opening + content + CALL * calls + "<|im_end|>")
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

    def test_reasoning_is_complete_when_content_begins(self):
        deltas = TextDeltas()
        assert deltas.feed(Reply(reasoning="a <b")) == ("a", "")
        assert deltas.feed(Reply(reasoning="a <b", content="Hi")) == (" <b", "Hi")

    @pytest.mark.parametrize("text", ["<< a " * 1000 + "x" * 40, "\n" * 100_000 + "x"], ids=["C++", "empty lines"])
    def test_long_texts_of_open_tags_or_white_space_are_sent_whole(self, text):
        assert TextDeltas().feed(Reply(content=text)) == ("", text)

    def test_each_part_is_sent_once(self):
        deltas = TextDeltas()
        grown = [Reply(content="Hi"), Reply(content="Hi "), Reply(content="Hi there"), Reply(content="Hi there")]
        assert [deltas.feed(reply)[1] for reply in grown] == ["Hi", "", " there", ""]


class TestFinish:
    def test_held_back_text_is_sent_at_the_end(self):
        deltas = TextDeltas()
        deltas.feed(Reply(content="a <"))
        assert deltas.finish(Reply(content="a <")) == ("", " <")

    def test_a_reply_whose_last_parse_differs_is_set_to_the_sent_text(self):
        deltas = TextDeltas()
        deltas.feed(Reply(content="I think"))
        reply = Reply(reasoning="I think", content="Hi")
        assert deltas.finish(reply) == ("", "")
        assert (reply.reasoning, reply.content) == ("", "I think")

    def test_reasoning_that_was_sent_stays(self):
        deltas = TextDeltas()
        deltas.feed(Reply(reasoning="I think"))
        reply = Reply(reasoning="Something else")
        assert deltas.finish(reply) == ("", "")
        assert reply.reasoning == "I think"


@pytest.mark.parametrize(
    ("text", "stops", "cut", "stop"),
    [
        ("one STOP two", ["STOP"], "one ", "STOP"),
        ("one END two STOP", ["STOP", "END"], "one ", "END"),
        ("one", ["STOP"], "one", None),
        ("STOP", ["STOP"], "", "STOP"),
        ("one STO", ["STOP"], "one STO", None),
    ],
)
def test_a_reply_ends_before_the_first_stop_text(text, stops, cut, stop):
    reply = Reply(text)
    cut_at_stop(reply, stops, partial=False)
    assert (reply.content, reply.stop) == (cut, stop)


@pytest.mark.parametrize(
    ("text", "sent"), [("one two STO", "one two "), ("one two S", "one tw"), ("one", ""), ("one STOP two", "one ")]
)
def test_the_end_that_may_begin_a_stop_text_is_held_back(text, sent):
    reply = Reply(text)
    cut_at_stop(reply, ["STOP", "x"], partial=True)
    assert reply.content == sent


def test_a_stop_text_in_the_reasoning_removes_the_content():
    reply = Reply("text", "I think STOP")
    cut_at_stop(reply, ["STOP"], partial=False)
    assert (reply.reasoning, reply.content, reply.stop) == ("I think ", "", "STOP")
