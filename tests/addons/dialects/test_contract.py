"""The contract of every dialect for requests and replies. The peculiarities of one are tested in
its folder."""

import contextlib
import copy
import gc
import json
import re
import sys
import tracemalloc
from dataclasses import asdict
from functools import partial

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects.call import DialectError, ModelCall, Reply, ToolCall
from rolltap.addons.dialects.json_values import parse_arguments
from tests.addons.dialects import apis
from tests.addons.dialects.apis import (
    APIS,
    ARRAY,
    CHAT,
    GEMINI,
    MESSAGES,
    RESPONSES,
    USAGE,
    every_api,
    filled,
    name_of,
    parse,
    streamed,
)
from tests.deep import examples


@every_api
@examples(2500)
@given(data=st.data())
def test_any_body_is_a_model_call_or_a_refusal(api, data):
    target = data.draw(st.sampled_from([api.target, api.count_target or api.target]))
    try:
        call = api.decode_bytes(data.draw(api.bodies), target)
    except DialectError as refusal:
        json.loads(api.dialect.encode_error(refusal))
    else:
        orjson.loads(json.dumps(asdict(call), ensure_ascii=False).encode())
        assert call.messages


def outcome(api, request, known=()):
    """Return the call that a request decodes to, or the words of its refusal."""
    try:
        return api.dialect.decode(request, api.target, known)
    except DialectError as refusal:
        return str(refusal)


@every_api
@examples(1000)
@given(data=st.data(), offered=st.booleans())
def test_parts_of_an_earlier_request_stand_for_the_elements_that_it_has_in_common(
    api, data, offered
):
    key = api.dialect.CONVERSATION
    elements = data.draw(api.conversations)
    num_common = data.draw(st.integers(0, len(elements)))
    earlier = {**api.request, key: elements[:num_common] + data.draw(api.conversations)}
    later = {**api.request, key: elements}
    if not offered:
        earlier.pop("tools")
    before = copy.deepcopy([earlier, later])
    call = outcome(api, earlier)
    decoded = copy.deepcopy(call)
    known = call.parts[:num_common] if isinstance(call, ModelCall) else ()
    absent = {**later, key: [None] * len(known) + elements[len(known) :]}
    assert outcome(api, absent, known) == outcome(api, later)
    assert [earlier, later] == before
    assert call == decoded


@every_api
def test_messages_of_known_elements_stay_the_same_objects(api):
    key = api.dialect.CONVERSATION
    first = api.decode(api.request)
    grown = {**api.request, key: [None] * len(first.parts) + api.talk[key][:1]}
    second = api.dialect.decode(grown, api.target, first.parts)
    third = api.dialect.decode(grown, api.target, second.parts[:-1])
    for later in (second, third):
        pairs = zip(first.messages, later.messages[: len(first.messages)], strict=True)
        assert all(one is other for one, other in pairs if one["role"] != "system")


@every_api
@pytest.mark.parametrize("depth", [90, 120, 300, 980, 100_000])
def test_any_depth_is_a_model_call_or_a_refusal(api, depth):
    deep = '{"items":' * depth + "1" + "}" * depth
    for key in api.request:
        body = json.dumps({**api.request, key: "DEEP"}).replace('"DEEP"', deep)
        with contextlib.suppress(DialectError):
            assert api.decode_bytes(body.encode()).messages


@every_api
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"n": ' + b"1" * 5000 + b"}",
        b'{"model": "\xed\xa0\x80"}',
        b"[]",
        b"NaN",
    ],
    ids=[
        "empty",
        "cut",
        "not UTF-8",
        "too deep",
        "too many digits",
        "a surrogate's bytes",
        "a list",
        "a number",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(api, body):
    with pytest.raises(DialectError) as refused:
        api.decode_bytes(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(("decode", "changes", "place"), apis.REFUSED)
def test_an_invalid_field_is_refused_by_its_place(decode, changes, place):
    with pytest.raises(DialectError) as refused:
        decode(**changes)
    assert place in str(refused.value)
    assert refused.value.status == 400


@pytest.mark.parametrize(("decode", "changes", "field", "value"), apis.MEANS)
def test_an_option_of_a_request_is_a_field_of_the_call(decode, changes, field, value):
    assert getattr(decode(**changes), field) == value


@every_api
@pytest.mark.parametrize("cut", ["ud83d", "udc00"])
def test_a_lone_surrogate_becomes_a_replacement_character(api, cut):
    text = json.dumps(api.request).replace("u00e9", cut)
    expected = json.dumps(api.decode(api.request).messages).replace("u00e9", "ufffd")
    assert api.decode_bytes(text.encode()).messages == json.loads(expected)


@pytest.mark.parametrize(
    ("api", "key"), [(CHAT, "messages"), (RESPONSES, "input")], ids=["chat", "responses"]
)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hi", "Hi"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}], "ab"),
    ],
)
def test_content_is_text_however_it_is_written(api, key, content, text):
    (message,) = api.decode({key: [{"role": "assistant", "content": content}]}).messages
    assert message["content"] == text


@pytest.mark.parametrize("api", [CHAT, RESPONSES], ids=["chat", "responses"])
def test_no_new_text_is_no_event(api):
    assert api.dialect.stream_encoder(api.context()).delta("", "") == b""


@every_api
def test_a_result_has_the_name_of_its_tool(api):
    names = dict(apis.CALLS)
    results = api.decode(api.talk).messages[-3:]
    for call_id, result in zip(apis.ANSWERED, results, strict=True):
        assert (result["role"], result["content"]) == ("tool", "x")
        assert (result["tool_call_id"], result["name"]) == (call_id, names[call_id])


@every_api
def test_tools_are_shown_when_none_may_be_called(api):
    free = api.decode(api.request)
    bound = api.decode({**api.request, **api.forbidding})
    assert (free.may_call, bound.may_call) == (True, False)
    assert (bound.tools, bound.messages) == (free.tools, free.messages)


NOT_OFFERED = {
    "openai-chat": "Tool choice 'gone' not found in 'tools' parameter.",
    "openai-responses": "Tool choice 'gone' not found in 'tools' parameter.",
    "anthropic-messages": "Tool 'gone' not found in provided tools",
    "google-generate-content": (
        "allowed_function_names[0]': it must be the name of a declared function"
    ),
}
UNKNOWN = {
    "openai-chat": "'tool_call_id' of 'gone' not found in 'tool_calls' of previous message.",
    "openai-responses": "No tool call found for function call output with call_id gone.",
    "anthropic-messages": "unexpected `tool_use_id` found in `tool_result` blocks: gone.",
}


@every_api
def test_a_choice_of_a_tool_that_is_not_offered_is_refused(api):
    request = {key: value for key, value in api.request.items() if key != "toolConfig"}
    words = re.escape(NOT_OFFERED[api.dialect.NAME])
    for fields in api.choosing:
        assert api.decode({**request, **filled(fields, "look")}).tools
        for tools in ({}, {"tools": []}):
            with pytest.raises(DialectError, match=words) as refused:
                api.decode({**request, **filled(fields, "gone"), **tools})
            assert refused.value.status == 400


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES], ids=name_of)
def test_a_result_of_no_call_before_it_is_refused(api):
    *before, after = json.dumps(api.talk).rpartition('"c2"')
    gone = json.loads(before[0] + '"gone"' + after)
    key = api.dialect.CONVERSATION
    turned = {**api.talk, key: api.talk[key][::-1]}
    for asked, tool_call_id in ((gone, "gone"), (turned, r"c\d")):
        words = UNKNOWN[api.dialect.NAME].replace("gone", tool_call_id)
        with pytest.raises(DialectError, match=words) as refused:
            api.decode(asked)
        assert refused.value.status == 400


def test_a_client_of_gemini_may_leave_out_ids_and_earlier_calls():
    answer = {"functionResponse": {"id": "gone", "name": "look", "response": {}}}
    assert GEMINI.decode({"contents": [{"parts": [answer]}]}).messages[0]["role"] == "tool"


@every_api
@pytest.mark.parametrize("stream", [None, False, "yes"])
def test_only_true_asks_for_a_stream(api, stream):
    assert not api.decode({**api.talk, "stream": stream}).stream


@every_api
def test_a_name_an_id_or_a_schema_that_is_too_long_is_refused(api):
    asked = [({**api.talk, "tools": tools}, api.target) for tools in api.tools]
    long_id = json.dumps(api.talk).replace('"c1"', json.dumps(apis.LONG))
    asked.append((json.loads(long_id), api.target))
    asked.append(({**api.talk, "model": apis.LONG}, api.target.replace("gemini-x", apis.LONG)))
    words = r"a string of at most (256|1,024) characters"
    for body, target in asked:
        with pytest.raises(DialectError, match=words) as refused:
            api.decode(body, target)
        assert len(str(refused.value)) < 300
    schema = {"type": "object", "description": "d" * (256 * 1024)}
    with pytest.raises(DialectError, match="schema of the reply is longer than 262,144 characters"):
        api.decode({**api.talk, **filled(api.schema, schema)})


@pytest.mark.parametrize("api", [CHAT, MESSAGES, GEMINI], ids=name_of)
def test_stop_texts_are_few_and_short(api):
    most = ["x" * 64] * 64
    assert api.decode({**api.talk, **filled(api.stop, most)}).stop == most
    for texts in (["x"] * 65, ["x" * 200_000]):
        with pytest.raises(DialectError, match="at most 64 texts of 4096 characters in total"):
            api.decode({**api.talk, **filled(api.stop, texts)})


def containers(inner):
    lists = st.lists(inner, max_size=3)
    return lists | st.dictionaries(st.text(max_size=5), inner, max_size=3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    containers,
    max_leaves=8,
)
ODD = [
    "",
    "{",
    '{"INVALID_JSON": "x"}',
    '{"INVALID_JSON": {}}',
    '{"INVALID_JSON": "x", "b": 1}',
    '{"n": 1e400}',
    '{"n": NaN}',
    '{"n": 1e22}',
    '{"a": "\\ud83d"}',
    "9" * 5000,
    "[" * 100_000,
]
ODD += ['{"a":' * depth + "{}" + "}" * depth for depth in (60, 500)]
ARGUMENTS = (
    st.dictionaries(st.text(max_size=5) | st.just("INVALID_JSON"), JSON, max_size=3).map(json.dumps)
    | JSON.map(partial(json.dumps, ensure_ascii=False, indent=1))
    | st.text()
    | st.sampled_from(ODD)
)
INPUT = st.fixed_dictionaries({"input": st.text()}).map(json.dumps)
PATCHES = st.tuples(st.sampled_from(["patch", "agents__exec"]), INPUT)


def made(calls):
    return [ToolCall(f"call_{index}", *call) for index, call in enumerate(calls)]


REPLIES = st.builds(
    Reply,
    content=st.text(max_size=12),
    reasoning=st.text(max_size=12),
    tool_calls=st.lists(st.tuples(st.text(min_size=1), ARGUMENTS) | PATCHES, max_size=3).map(made),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls"]),
)


def text_of(value):
    """Return a text of JSON by which NaN equals NaN."""
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("api", [*APIS, ARRAY], ids=[*map(name_of, APIS), "an array of Gemini's"])
@examples(1000)
@given(reply=REPLIES, piece=st.integers(1, 12), keep_alive=st.booleans())
def test_a_stream_adds_up_to_the_whole_reply_whose_echo_is_the_reply(api, reply, piece, keep_alive):
    context = api.context()
    whole = parse(api.dialect.encode_reply(context, reply, USAGE))
    stream = streamed(api, context, reply, piece, keep_alive)
    assert text_of(api.assembled(stream)) == text_of(whole)
    issued = reply.to_message()
    if api.issues(reply):
        issued["call_id"] = "c9"
    for call in issued.get("tool_calls", ()):
        call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
    assert text_of(api.echo(whole)) == text_of(issued)


def cost(function):
    """Return the number of calls of Python and C functions that a function makes, and the memory
    that it has at most."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # a collection calls functions too
    sys.setprofile(count)
    function()
    sys.setprofile(None)
    gc.enable()
    tracemalloc.start()
    function()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return calls, most


@every_api
@pytest.mark.parametrize("field", ["reasoning", "content"])
def test_the_work_of_a_delta_does_not_grow_with_the_reply(api, field):
    """An encoder that went through its text with each delta would make more calls, or have a copy
    of the text."""
    encoder = api.dialect.stream_encoder(api.context())
    delta = partial(encoder.delta, **{"reasoning": "", "content": "", field: "x" * 1000})
    lengths = [len(delta()) for _ in range(10)]
    early = cost(delta)
    lengths += [len(delta()) for _ in range(1000)]
    late = cost(delta)
    assert max(lengths[1:]) < min(lengths[1:]) + 8  # the digits of a number
    assert late[0] == early[0]
    assert late[1] < early[1] + 100_000
    whole = len(encoder.finish(Reply(**{field: "x" * 1_000_000}), USAGE))
    assert whole < 5 * 1_000_000


@every_api
def test_a_lone_surrogate_does_not_break_a_reply(api):
    assert b"half ?" in api.dialect.encode_reply(api.context(), Reply("half \ud83d"), USAGE)
