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
_NESTED = st.builds(lambda messages: {"messages": messages}, st.lists(_OBJECTS, max_size=2))
_KEYS = st.sampled_from(["model", "tools", "messages", "é"])
_FIELDS = st.lists(st.tuples(_KEYS, _VALUES | _NESTED), max_size=2)


@st.composite
def writings(draw):
    """Draw a function from a value to a JSON text of it."""
    indent = draw(st.sampled_from([None, None, 1]))
    separators = draw(st.sampled_from([None, (",", ":"), (" ,\r\n", "\t: ")]))
    ascii_only = draw(st.booleans())
    return partial(json.dumps, indent=indent, separators=separators, ensure_ascii=ascii_only)


@st.composite
def bodies(draw, messages, write):
    """Draw a body with these messages. It may be no valid request, or no JSON."""
    fields = [(key, write(value)) for key, value in draw(_FIELDS)]
    fields.insert(draw(st.integers(0, len(fields))), ("messages", write(messages)))
    keys = [json.dumps(key) for key, _ in fields]
    if draw(st.booleans()):
        keys = [key.replace("m", "\\u006d") for key in keys]
    blank = draw(st.sampled_from(["", " ", "\n\t"]))
    pairs = []
    for key, (_, written) in zip(keys, fields, strict=True):
        pairs.append(blank.join(["", key, ":", written, ""]))
    text = f"{blank}{{{','.join(pairs)}}}{blank}".encode("utf-8", "replace")
    at = draw(st.integers(0, len(text)))
    cut, more = text[:at], text[:at] + b"," + text[at:]
    return draw(st.sampled_from([text, text, text, cut, more, text + b"1"]))


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


def whole(body):
    try:
        return parse_object(body)
    except DialectError:
        return None


@given(conversations())
@examples(300)
def test_a_body_is_read_as_if_none_had_come_before(drawn):
    recent = []
    for body in drawn:
        expected, found = whole(body), read(body, "messages", recent)
        if found is None:
            continue
        request, shared = found
        assert request["messages"][: len(shared.known)] == [None] * len(shared.known)
        request["messages"][: len(shared.known)] = shared.known
        assert (request, json.dumps(request)) == (expected, json.dumps(expected))
        recent.append(Elements(shared.text, shared.ends, expected["messages"]))


@pytest.mark.parametrize("write", [json.dumps, partial(json.dumps, ensure_ascii=False, indent=2)])
def test_only_new_elements_are_parsed(write):
    messages = [{"role": "user", "content": f"é {number}, \\"} for number in range(50)]
    before = read(write({"messages": messages[:40], "model": "a"}).encode(), "messages", [])[1]
    before.known = messages[:40]
    body = write({"model": "other", "messages": messages}).encode()
    request, after = read(body, "messages", [before])
    assert request == {"model": "other", "messages": [None] * 40 + messages[40:]}
    assert (after.known, after.nearest) == (messages[:40], before)
    changed = [*messages[:30], {"role": "user"}, *messages[31:]]
    assert len(read(write({"messages": changed}).encode(), "messages", [before])[1].known) == 30


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"messages": []}',
        b'{"messages": "a"}',
        b'{"messages": [1, 12]}',
        b'{"messages": [{}], "messages": [{}]}',
        b'{"messages": [{}][{}]}',
        b'{"a": {"messages": [{}]}, "messages": []}',
        b'{"a": {"messages": [{}]}}',
        b'[{"messages": [{}]}]',
        b'"messages": [{}]',
        b'{"messages": [{}]} {}',
        b'{"messages": [{}]',
        b'\xef\xbb\xbf{"messages": [{}]}',
        b'{"messages": [{"a": NaN}]}',
        b'{"messages": [{}], "a": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"messages": [{}], "a": ' + b"[" * 100_000,
        b'{"messages": [{}], "a": [' + b"0," * 600_000 + b"0]}",
    ],
    ids=lambda body: f"{body[:30]!r}",
)
def test_other_bodies_are_parsed_as_a_whole(body):
    assert read(body, "messages", []) is None


def body_of(*contents):
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"messages": messages}).encode()


def called(arguments, times=1):
    call = {"function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call] * times}, {"role": "user", "content": "a"}]


def small_messages(number):
    return [{"role": "user", "content": str(index)} for index in range(number)]


def calls_of_one_message(number):
    return called("{}", number)


def calls_without_arguments(number):
    calls = [{"function": {"name": "f"}}] * number
    return [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "a"}]


def empty_lists(number):
    return called("[" + "[]," * number + "0]")


def empty_objects(number):
    return called("[" + "{}," * number + "0]")


def objects_of_one_key(number):
    return called("[" + '{"a":1},' * number + "0]")


def lists_of_one_value(number):
    return called("[" + "[0]," * number + "0]")


def short_texts(number):
    return called("[" + '"é☃",' * number + "0]")


def one_emoji(number):
    return [{"role": "user", "content": "😀" + "x" * 10 * number}]


MOST_MEMORY = [
    small_messages,
    calls_of_one_message,
    calls_without_arguments,
    empty_lists,
    empty_objects,
    objects_of_one_key,
    lists_of_one_value,
    short_texts,
    one_emoji,
]
"""Conversations that take much memory for their bytes."""


def accepted(bodies, body, dialect=routes.CHAT, target="/"):
    decoded = bodies.decode(dialect, body, target)
    bodies.keep(decoded)
    return decoded.model_call


class TestRecentBodies:
    def test_messages_that_came_before_are_the_same_objects(self):
        recent = RecentBodies(KeptTexts())
        first = accepted(recent, body_of("a", "b"))
        other = accepted(recent, body_of("sub-agent"))
        body = body_of("a", "b", "c")
        second = accepted(recent, body)
        assert second.messages == routes.CHAT.decode(parse_object(body), "/").messages
        assert all(a is b for a, b in zip(first.messages, second.messages, strict=False))
        later = accepted(recent, body_of("sub-agent", "d"))
        assert later.messages[0] is other.messages[0]

    def test_a_request_to_another_api_shares_nothing(self):
        recent = RecentBodies(KeptTexts())
        first = accepted(recent, body_of("a", "b"))
        body = b'{"max_tokens": 1, ' + body_of("a", "b", "c")[1:]
        other = accepted(recent, body, routes.MESSAGES, "/v1/messages")
        assert other.messages[0] is not first.messages[0]

    def test_a_conversation_before_known_elements_changes_none_of_their_messages(self):
        recent = RecentBodies(KeptTexts())
        summary = {"type": "compaction", "encrypted_content": SUMMARY}
        output = {"type": "function_call_output", "call_id": "c1", "output": "x"}
        request = {"input": [summary, output]}
        first = accepted(recent, json.dumps(request).encode(), routes.RESPONSES)
        called = assistant_message("", "", [message_tool_call("c1", "look", "{}")])
        stored = StoredCall(call_id="a", parent=None, messages=[], reply=called, asked={})
        naming = {**request, "previous_response_id": "resp_a"}
        with pytest.raises(NeedsStoredState) as named:
            recent.decode(routes.RESPONSES, json.dumps(naming).encode(), "/")
        second = named.value.complete({"a": stored}.get)
        assert second.messages[-1]["name"] == "look"
        assert second.messages[-2] is first.messages[0]
        again = accepted(recent, json.dumps(request).encode(), routes.RESPONSES)
        assert again.messages == routes.RESPONSES.decode(request, "/").messages
        assert again.messages[-1] is first.messages[-1]

    def test_an_invalid_request_is_refused_in_the_words_of_a_whole_parse_and_forgets_nothing(self):
        recent = RecentBodies(KeptTexts())
        first = accepted(recent, body_of("a"))
        for body in (
            b'{"messages": [}',
            b'{"messages": [{"role": "other"}]}',
            b'{"messages": [{}], "messages": 1}',
        ):
            with pytest.raises(DialectError) as refused:
                recent.decode(routes.CHAT, body, "/")
            with pytest.raises(DialectError) as expected:
                routes.CHAT.decode(parse_object(body), "/")
            assert str(refused.value) == str(expected.value)
        assert accepted(recent, body_of("a", "b")).messages[0] is first.messages[0]

    def test_a_request_that_was_not_accepted_is_not_kept(self):
        recent = RecentBodies(KeptTexts())
        first = recent.decode(routes.CHAT, body_of("a"), "/").model_call
        assert accepted(recent, body_of("a", "b")).messages[0] is not first.messages[0]

    def test_few_conversations_of_bounded_size_are_kept(self, monkeypatch):
        recent = RecentBodies(KeptTexts())
        each = recent.decode(routes.CHAT, body_of("conversation 0", "a" * 200), "/").elements
        monkeypatch.setattr(bodies_of_requests, "_MOST_KEPT", 2 * each.num_bytes)
        for number in range(10):
            accepted(recent, body_of(f"conversation {number}", "a" * 200))
        kept = [json.loads(kept.text + "]")[0]["content"] for _, kept in recent._recent]
        assert kept == ["conversation 8", "conversation 9"]
        accepted(recent, body_of("a" * 2500))
        assert recent._recent == []

    def test_of_all_sessions_those_that_asked_last_keep_their_texts(self):
        body = body_of("a" * 100)
        size = RecentBodies(KeptTexts()).decode(routes.CHAT, body, "/").elements.num_bytes
        texts = KeptTexts(most=2 * size)
        first, second, third = (RecentBodies(texts) for _ in range(3))

        def decode(bodies):
            return accepted(bodies, body).messages[0]

        known = {bodies: decode(bodies) for bodies in (first, second)}
        assert decode(first) is known[first]
        known[third] = decode(third)
        assert decode(third) is known[third]
        assert decode(first) is known[first]
        assert decode(second) is not known[second]

    def test_one_that_is_closed_keeps_nothing_even_if_a_request_is_accepted_later(self):
        texts = KeptTexts()
        bodies = RecentBodies(texts)
        first = accepted(bodies, body_of("a"))
        late = bodies.decode(routes.CHAT, body_of("a", "b"), "/")
        bodies.close()
        bodies.keep(late)
        assert (len(texts._sizes), texts._total) == (0, 0)
        assert accepted(bodies, body_of("a")).messages[0] is not first.messages[0]

    def test_what_many_sessions_keep_at_once_is_counted(self):
        size = RecentBodies(KeptTexts()).decode(routes.CHAT, body_of("a"), "/").elements.num_bytes
        texts = KeptTexts(most=3 * size)
        sessions = [RecentBodies(texts) for _ in range(8)]

        def ask(bodies):
            for _ in range(50):
                accepted(bodies, body_of("a"))
            if bodies in sessions[::2]:
                bodies.close()

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, sessions))
        kept = {bodies: size for bodies in sessions if bodies._recent}
        assert kept == texts._sizes
        assert texts._total == size * len(kept) <= 3 * size

    @pytest.mark.parametrize("request_of", MOST_MEMORY, ids=lambda make: make.__name__)
    def test_more_memory_is_counted_than_a_conversation_takes(self, request_of):
        body = json.dumps({"messages": request_of(20_000)}, separators=(",", ":")).encode()
        bodies = RecentBodies(KeptTexts())
        tracemalloc.start()
        try:
            bodies.keep(bodies.decode(routes.CHAT, body, "/"))
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        counted = bodies._texts._total
        assert taken < counted + 1000 < 20 * taken
