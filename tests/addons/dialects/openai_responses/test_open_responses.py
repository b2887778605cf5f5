"""The cases of Open Responses' compliance suite (openresponses.org), of 24 April 2026, against a
real endpoint.

One of its 17 cases sends no request: it says that a message may have a `phase`.
"""

import json

import pytest

from tests.addons.dialects.apis import events_of
from tests.addons.dialects.openai_responses.open_responses import AnyEvent, Compacted, Response
from tests.addons.harness import user
from tests.scripted_engine import Say

PATH = "/v1/responses"
COMPACT = "/v1/responses/compact"
WEATHER = json.loads("""
{
  "type": "function",
  "name": "get_weather",
  "description": "Get the current weather for a location",
  "parameters": {
    "type": "object",
    "properties": {"location": {"type": "string"}},
    "required": ["location"]
  }
}
""")
CALL = """<think>
I look.
</think>

<tool_call>
{"name": "get_weather", "arguments": {"location": "SF"}}
</tool_call>"""
TRIGGER = {"type": "compaction_trigger"}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def said(role, content, **fields):
    return {"type": "message", "role": role, "content": content, **fields}


ASKED = {
    "basic-response": [said("user", "Say hello in exactly 3 words.")],
    "assistant-phase": [
        said("assistant", "I should answer with the saved number.", phase="commentary"),
        said("assistant", "The number is four.", phase="final_answer"),
        said("user", "Repeat only the number."),
    ],
    "system-prompt": [said("system", "You are a pirate."), said("user", "Say hello.")],
    "image-input": [
        said(
            "user",
            [
                {"type": "input_text", "text": "What is it?"},
                {"type": "input_image", "image_url": PIXEL},
            ],
        )
    ],
    "multi-turn": [
        said("user", "I am Alice."),
        said("assistant", "Hello Alice!"),
        said("user", "What is my name?"),
    ],
}


async def post(harness, path=PATH, **body):
    status, text = await harness.send(body, path=path)
    return status, json.loads(text)


async def ask(harness, *items, **fields):
    status, body = await post(harness, model="m", input=list(items), **fields)
    assert status == 200, body
    return Response.model_validate(body)


def checked(events):
    """Return the last response of a stream, all of whose events have the shape of the
    specification."""
    for event in events:
        AnyEvent.validate_python(event)
    return Response.model_validate(events[-1]["response"])


@pytest.mark.parametrize("case", ASKED)
async def test_a_question_gets_a_whole_response(harness, case):
    response = await ask(harness, *ASKED[case])
    assert (response.status, [item.type for item in response.output]) == ("completed", ["message"])
    assert response.completed_at >= response.created_at


async def test_a_tool_is_called(harness, scripted_engine):
    scripted_engine.replies.append(Say(CALL))
    response = await ask(harness, said("user", "Is it sunny in San Francisco?"), tools=[WEATHER])
    assert [item.type for item in response.output] == ["reasoning", "function_call"]


@pytest.mark.parametrize("text", ["1, 2, 3, 4, 5", CALL])
async def test_the_events_of_a_stream_have_the_shape_of_the_specification(
    harness, scripted_engine, text
):
    scripted_engine.replies.append(Say(text))
    asked = {"model": "m", "input": ASKED["basic-response"], "tools": [WEATHER], "stream": True}
    _, stream = await harness.send(asked, path=PATH)
    assert checked(events_of(stream.encode())).status == "completed"


async def test_a_reply_that_is_not_stored_is_continued_by_its_id(harness):
    first = await ask(harness, said("user", "Remember cobalt."), store=False)
    again = await ask(
        harness, said("user", "Which word?"), store=False, previous_response_id=first.id
    )
    assert again.previous_response_id == first.id
    assert harness.calls()[-1]["kind"] == "bridged"


async def test_a_missing_response_is_not_found(harness):
    named = {"input": "Go on.", "previous_response_id": "resp_openresponses_missing_5"}
    status, body = await post(harness, model="m", **named)
    assert (status, body["error"]["code"]) == (400, "previous_response_not_found")


HISTORY = [said("user", "We launch on Tuesday."), said("assistant", "Understood.")]


async def test_a_conversation_is_compacted(harness, scripted_engine):
    scripted_engine.replies.append(Say("<think>\nWhat matters?\n</think>\n\nLaunch: Tuesday."))
    status, body = await post(
        harness, COMPACT, model="m", prompt_cache_key="compact-test", input=HISTORY
    )
    assert status == 200, body
    assert [item.type for item in Compacted.model_validate(body).output] == ["compaction"]


async def test_a_compaction_begins_a_new_chain(harness, scripted_engine):
    scripted_engine.replies.append(Say("The word is slate."))
    asked = [*HISTORY, said("user", "Compress this.")]
    _, body = await post(harness, COMPACT, model="m", input=asked)
    response = await ask(harness, *body["output"], said("user", "Go on."), store=False, tools=[])
    assert (response.status, response.previous_response_id) == ("completed", None)
    summary, last = json.loads(harness.calls()[-1]["messages"])
    assert summary["content"].endswith("The word is slate.")
    assert last["content"] == "Go on."


async def test_a_compaction_without_a_model_is_refused(harness):
    status, body = await post(harness, COMPACT, input=HISTORY)
    assert (status, "'model'" in body["error"]["message"]) == (400, True)


ANYTHING = json.loads("""
{
  "instructions": "Be brief.",
  "metadata": {"run": "a secret of the program"},
  "tools": [
    {
      "type": "function",
      "name": "get_weather",
      "description": "Get the current weather for a location",
      "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"]
      }
    },
    {"type": "mcp", "server_label": "x", "authorization": "Bearer secret"}
  ],
  "tool_choice": {"type": "function", "name": "get_weather"},
  "temperature": 0.5,
  "top_p": 0.25,
  "presence_penalty": 1,
  "frequency_penalty": -1,
  "store": false,
  "truncation": "auto",
  "parallel_tool_calls": false,
  "max_tool_calls": 3,
  "max_output_tokens": 64,
  "reasoning": {"effort": "low"},
  "text": {"format": {"type": "text"}, "verbosity": "low"},
  "prompt_cache_key": "thread-1",
  "safety_identifier": "a secret user"
}
""")


async def test_a_response_repeats_what_was_asked_and_a_run_does_not_hold_it(harness):
    _, body = await post(harness, model="m", input="Hi", **ANYTHING)
    repeated = {key: body[key] for key in ANYTHING}
    assert repeated.pop("tools")[0] == {**WEATHER, "strict": None}
    assert repeated.pop("reasoning") == {"effort": "low", "summary": None}
    assert repeated == {key: ANYTHING[key] for key in repeated}
    for path in harness.run.glob("*.arrow"):
        assert b"secret" not in path.read_bytes()


async def test_only_the_last_event_of_a_stream_repeats_what_is_long(harness):
    asked = {**ANYTHING, "model": "m", "input": "Hi", "stream": True}
    asked["metadata"] = {"long": "x" * 10_000}
    _, stream = await harness.send(asked, path=PATH)
    *growing, last = [event for event in events_of(stream.encode()) if "response" in event]
    assert {event["type"] for event in growing} == {"response.created", "response.in_progress"}
    for event in growing:
        assert len(json.dumps(event)) < 2000
    assert last["response"]["metadata"] == asked["metadata"]
    assert len(last["response"]["tools"]) == 2


@pytest.mark.parametrize("value", ["x", True, [5], {"a": 1}, 1e9, 10**300, None])
async def test_a_value_that_the_api_does_not_have_is_not_repeated(harness, value):
    numbers = ("temperature", "top_p", "presence_penalty", "store", "max_tool_calls")
    others = {"truncation": "auto", "text": {"format": {"type": "text"}}, "reasoning": None}
    fields = dict.fromkeys([*numbers, *others], value)
    _, body = await post(harness, model="m", input="Hi", **fields)
    Response.model_validate({**body, **others})


async def test_a_compaction_is_a_call_of_its_own_that_continues(harness, scripted_engine):
    scripted_engine.replies += [Say("Hello."), Say("They greeted."), Say("They greeted again.")]
    first = await ask(harness, said("user", "Hi"), tools=[WEATHER])
    named = {"previous_response_id": first.id, "tools": [WEATHER]}
    for path in (COMPACT, f"/openai{COMPACT}"):
        assert (await post(harness, path, model="m", stream=True, **named))[0] == 200
    triggered = await ask(harness, {"type": "compaction_trigger"}, **named)
    first, *compactions = harness.calls()
    for call in compactions:
        assert (call["role"], call["kind"]) == ("compaction", "bridged")
        assert call["parent_id"] == first["call_id"]
        for column in ("messages", "stream", "prompt_tail_ids"):
            assert call[column] == compactions[0][column]
    assert len(compactions) == 3
    assert triggered.output[0].type == "compaction"


async def test_a_long_field_is_not_repeated(harness):
    _, body = await post(harness, model="m", input="Hi", metadata={"long": "x" * 600_000})
    assert body["metadata"] == {}


async def test_a_result_whose_call_a_compaction_stands_for_is_continued_by_its_id(
    harness, scripted_engine
):
    scripted_engine.replies += [Say("They greeted.")]
    asked = [user("Hi"), TRIGGER]
    _, compacted = await post(harness, model="m", input=asked)
    result = {"type": "function_call_output", "call_id": "call_before", "output": "Done."}
    status, body = await post(harness, model="m", input=[*compacted["output"], result])
    assert status == 200
    status, _ = await post(harness, model="m", input="Go on", previous_response_id=body["id"])
    assert status == 200


@pytest.mark.parametrize("given", [5, [5], [], None, [{"type": "compaction_trigger"}]])
async def test_a_compaction_of_nothing_is_refused(harness, given):
    status, body = await post(harness, COMPACT, model="m", input=given)
    assert (status, "'input" in body["error"]["message"]) == (400, True)
    assert [event["kind"] for event in harness.events("rejected")] == ["rejected"]
