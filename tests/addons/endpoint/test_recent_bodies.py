import gc
import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import DialectError, assistant_message, message_tool_call
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.openai_responses.stored import NeedsStoredState, StoredCall
from rolltap.addons.endpoint import body as bodies_of_requests
from rolltap.addons.endpoint.body import Elements, KeptTexts, RecentBodies, read
from tests.addons.dialects.openai_responses.test_request import SUMMARY
from tests.addons.harness import user
from tests.deep import examples

_TEXTS = st.sampled_from(
    ["", "a", '"', "\\", "é", "😀", "\ud83d", "\ude00", "]}", "messages", ",{", "\n", "x" * 9000],
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)
_OBJECTS = st.dictionaries(st.sampled_from(["role", "content", "é"]), _VALUES, max_size=3)
_NESTED = st.fixed_dictionaries({"messages": st.lists(_OBJECTS, max_size=2)})
_KEYS = st.sampled_from(["model", "tools", "messages", "é"])
_FIELDS = st.lists(st.tuples(_KEYS, _VALUES | _NESTED), max_size=2)


@st.composite
def writings(draw):
    """Draw a function from a value to a JSON text of it."""
    return partial(
        json.dumps,
        indent=draw(st.sampled_from([None, None, 1])),
        separators=draw(st.sampled_from([None, (",", ":"), (" ,\r\n", "\t: ")])),
        ensure_ascii=draw(st.booleans()),
    )


@st.composite
def bodies(draw, messages, write):
    """Draw a body with these messages. It may be no valid request, or no JSON."""
    fields = draw(_FIELDS)
    fields.insert(draw(st.integers(0, len(fields))), ("messages", messages))
    blank = draw(st.sampled_from(["", " ", "\n\t"]))
    escaped = draw(st.booleans())
    pairs = []
    for key, value in fields:
        name = json.dumps(key)
        if escaped:
            name = name.replace("m", "\\u006d")
        pairs.append(blank.join(["", name, ":", write(value), ""]))
    text = f"{blank}{{{','.join(pairs)}}}{blank}".encode("utf-8", "replace")
    at = draw(st.integers(0, len(text)))
    more = text[:at] + b"," + text[at:]
    return draw(st.sampled_from([text, text, text, text[:at], more, text + b"1"]))


@st.composite
def conversations(draw):
    """Draw the bodies of several requests, of which each may go on with the one before."""
    write = draw(writings())
    messages = draw(st.lists(_OBJECTS, min_size=1, max_size=4))
    drawn = [draw(bodies(messages, write))]
    for _ in range(draw(st.integers(1, 3))):
        messages = messages[: draw(st.integers(1, 5))] + draw(st.lists(_OBJECTS, max_size=3))
        write = draw(st.just(write) | writings())
        drawn.append(draw(bodies(messages, write)))
    return drawn


@given(conversations())
@examples(300)
def test_a_body_is_read_as_if_none_had_come_before(drawn):
    recent = []
    for body in drawn:
        found = read(body, "messages", recent)
        if found is None:
            continue
        expected = parse_object(body)
        request, shared = found
        num_known = len(shared.known)
        assert request["messages"][:num_known] == [None] * num_known
        request["messages"][:num_known] = shared.known
        assert request == expected
        assert json.dumps(request) == json.dumps(expected)
        recent.append(Elements(shared.text, shared.ends, expected["messages"]))


@pytest.mark.parametrize("write", [json.dumps, partial(json.dumps, ensure_ascii=False, indent=2)])
def test_only_new_elements_are_parsed(write):
    def read_after(recent, messages):
        return read(write({"messages": messages, "model": "a"}).encode(), "messages", recent)

    messages = [user(f"é {number}, \\") for number in range(50)]
    _, before = read_after([], messages[:40])
    before.known = messages[:40]
    request, after = read_after([before], messages)
    assert request == {"model": "a", "messages": [None] * 40 + messages[40:]}
    assert after.known == messages[:40]
    assert after.nearest is before
    _, changed = read_after([before], [*messages[:30], {"role": "user"}, *messages[31:]])
    assert len(changed.known) == 30


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"messages": []}',
        '{"messages": "a"}',
        '{"messages": [1, 12]}',
        '{"messages": [{}], "messages": [{}]}',
        '{"messages": [{}][{}]}',
        '{"a": {"messages": [{}]}, "messages": []}',
        '{"a": {"messages": [{}]}}',
        '[{"messages": [{}]}]',
        '"messages": [{}]',
        '{"messages": [{}]} {}',
        '{"messages": [{}]',
        '\ufeff{"messages": [{}]}',
        '{"messages": [{"a": NaN}]}',
        '{"messages": [{}], "a": ' + "[" * 200 + "]" * 200 + "}",
        '{"messages": [{}], "a": ' + "[" * 100_000,
        '{"messages": [{}], "a": [' + "0," * 600_000 + "0]}",
    ],
    ids=lambda body: body[:30],
)
def test_other_bodies_are_parsed_as_a_whole(body):
    assert read(body.encode(), "messages", []) is None


def body_of(*contents):
    return json.dumps({"messages": [user(content) for content in contents]}).encode()


def calling(calls):
    return [{"role": "assistant", "tool_calls": calls}, user("a")]


def called(arguments, times=1):
    return calling([{"function": {"name": "f", "arguments": arguments}}] * times)


def listed(value, times):
    return called("[" + f"{value}," * times + "0]")


MANY = 20_000
MOST_MEMORY = {
    "small messages": [user(str(number)) for number in range(MANY)],
    "calls of one message": called("{}", MANY),
    "calls without arguments": calling([{"function": {"name": "f"}}] * MANY),
    "empty lists": listed("[]", MANY),
    "empty objects": listed("{}", MANY),
    "objects of one key": listed('{"a":1}', MANY),
    "lists of one value": listed("[0]", MANY),
    "short texts": listed('"é☃"', MANY),
    "one emoji": [user("😀" + "x" * 10 * MANY)],
}
"""Conversations that take much memory for their bytes."""


@pytest.fixture
def recent():
    return RecentBodies(KeptTexts())


def accepted(recent, body, dialect=routes.CHAT, target="/"):
    """Return the messages of a request that becomes a call."""
    decoded = recent.decode(dialect, body, target)
    recent.keep(decoded)
    return decoded.model_call.messages


def size_of(body):
    return RecentBodies(KeptTexts()).decode(routes.CHAT, body, "/").elements.num_bytes


class TestRecentBodies:
    def test_messages_that_came_before_are_the_same_objects(self, recent):
        first = accepted(recent, body_of("a", "b"))
        other = accepted(recent, body_of("sub-agent"))
        body = body_of("a", "b", "c")
        second = accepted(recent, body)
        assert second == routes.CHAT.decode(parse_object(body), "/").messages
        assert second[0] is first[0]
        assert second[1] is first[1]
        assert accepted(recent, body_of("sub-agent", "d"))[0] is other[0]

    def test_a_request_to_another_api_shares_nothing(self, recent):
        first = accepted(recent, body_of("a", "b"))
        body = b'{"max_tokens": 1, ' + body_of("a", "b", "c")[1:]
        assert accepted(recent, body, routes.MESSAGES, "/v1/messages")[0] is not first[0]

    def test_a_conversation_before_known_elements_changes_none_of_their_messages(self, recent):
        summary = {"type": "compaction", "encrypted_content": SUMMARY}
        output = {"type": "function_call_output", "call_id": "c1", "output": "x"}
        request = {"input": [summary, output]}
        first = accepted(recent, json.dumps(request).encode(), routes.RESPONSES)
        called = assistant_message("", "", [message_tool_call("c1", "look", "{}")])
        stored = StoredCall(call_id="a", parent=None, messages=[], reply=called, asked={})
        naming = {**request, "previous_response_id": "resp_a"}
        with pytest.raises(NeedsStoredState) as named:
            recent.decode(routes.RESPONSES, json.dumps(naming).encode(), "/")
        second = named.value.complete({"a": stored}.get).messages
        assert second[-1]["name"] == "look"
        assert second[-2] is first[0]
        again = accepted(recent, json.dumps(request).encode(), routes.RESPONSES)
        assert again == routes.RESPONSES.decode(request, "/").messages
        assert again[-1] is first[-1]

    @pytest.mark.parametrize(
        "body",
        [
            b'{"messages": [}',
            b'{"messages": [{"role": "other"}]}',
            b'{"messages": [{}], "messages": 1}',
        ],
    )
    def test_an_invalid_request_is_refused_in_the_words_of_a_whole_parse_and_forgets_nothing(
        self, recent, body
    ):
        first = accepted(recent, body_of("a"))
        with pytest.raises(DialectError) as refused:
            recent.decode(routes.CHAT, body, "/")
        with pytest.raises(DialectError) as expected:
            routes.CHAT.decode(parse_object(body), "/")
        assert str(refused.value) == str(expected.value)
        assert accepted(recent, body_of("a", "b"))[0] is first[0]

    def test_a_request_that_was_not_accepted_is_not_kept(self, recent):
        first = recent.decode(routes.CHAT, body_of("a"), "/").model_call.messages
        assert accepted(recent, body_of("a", "b"))[0] is not first[0]

    def test_few_conversations_of_bounded_size_are_kept(self, recent, monkeypatch):
        begun = [body_of(f"conversation {number}", "a" * 200) for number in range(3)]
        monkeypatch.setattr(bodies_of_requests, "_MOST_KEPT", 2 * size_of(begun[0]))
        first, second, third = [accepted(recent, body) for body in begun]
        assert accepted(recent, begun[2])[0] is third[0]
        assert accepted(recent, begun[1])[0] is second[0]
        assert accepted(recent, begun[0])[0] is not first[0]
        accepted(recent, body_of("a" * 2500))
        assert accepted(recent, begun[1])[0] is not second[0]

    def test_of_all_sessions_those_that_asked_last_keep_their_texts(self):
        body = body_of("a" * 100)
        texts = KeptTexts(most=2 * size_of(body))
        first, second, third = [RecentBodies(texts) for _ in range(3)]
        known = accepted(first, body)[0]
        forgotten = accepted(second, body)[0]
        assert accepted(first, body)[0] is known
        newest = accepted(third, body)[0]
        assert accepted(third, body)[0] is newest
        assert accepted(first, body)[0] is known
        assert accepted(second, body)[0] is not forgotten

    def test_one_that_is_closed_keeps_nothing_even_if_a_request_is_accepted_later(self):
        texts = KeptTexts()
        recent = RecentBodies(texts)
        first = accepted(recent, body_of("a"))
        late = recent.decode(routes.CHAT, body_of("a", "b"), "/")
        recent.close()
        recent.keep(late)
        assert texts._total == 0
        assert accepted(recent, body_of("a"))[0] is not first[0]

    def test_what_many_sessions_keep_at_once_is_counted(self):
        size = size_of(body_of("a"))
        texts = KeptTexts(most=3 * size)
        sessions = [RecentBodies(texts) for _ in range(8)]

        def ask(recent):
            for _ in range(50):
                accepted(recent, body_of("a"))
            if recent in sessions[::2]:
                recent.close()

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, sessions))
        kept = {recent: size for recent in sessions if recent._recent}
        assert kept == texts._sizes
        assert texts._total == size * len(kept) <= 3 * size

    @pytest.mark.parametrize("messages", MOST_MEMORY.values(), ids=MOST_MEMORY)
    def test_more_memory_is_counted_than_a_conversation_takes(self, messages):
        body = json.dumps({"messages": messages}, separators=(",", ":")).encode()
        texts = KeptTexts()
        recent = RecentBodies(texts)
        tracemalloc.start()
        try:
            recent.keep(recent.decode(routes.CHAT, body, "/"))
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert taken < texts._total + 1000 < 20 * taken
