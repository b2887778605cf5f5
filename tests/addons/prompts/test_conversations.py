import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import (
    DialectError,
    ModelCall,
    assistant_message,
    message_tool_call,
)
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.prompts.conversations import TEXT_DROPPED, Conversations
from tests.addons.dialects.test_openai_chat import TOOL, bodies
from tests.addons.harness import user
from tests.addons.prompts.talks import (
    CALL,
    LITELLM,
    MARKUP,
    SPACED,
    THINKING,
    Session,
    answer,
    arguments,
    changed,
    check_rendered,
    named,
    result,
    said,
)
from tests.deep import examples


def test_reasoning_is_restored_from_the_call_that_the_opaque_field_names(session):
    reply = session.say([user("Hi")], "<think>\nI look.\n</think>\n\nHello.")
    echo = {**said(reply["content"]), "call_id": "0"}
    altered = [user("Hello"), echo, user("Go on")]
    prompt = session.conversations.prompt(ModelCall("m", altered, session.tools))
    whole = [user("Hello"), {**echo, "reasoning_content": "I look."}, user("Go on")]
    assert [*prompt.ids] == session.rendering.render(whole, session.tools)


@pytest.mark.parametrize("number", [0, 1])
def test_the_newest_call_that_the_renderer_cannot_continue_is_the_reason(session, number):
    messages = session.talk(*["One."] * number)
    messages += [session.ask(messages, "Two.<|im_end|>And more"), user("Go on")]
    check_rendered(session.prompt(messages), f"the renderer cannot continue call {number}")


def test_branches_continue_their_own_calls(session):
    main = [user("Hi")]
    main += [session.say(main, "I delegate."), user("Go on")]  # call 0
    agent = [{"role": "system", "content": "You are a sub-agent."}, user("Count")]
    agent += [session.say(agent, "One."), user("More")]  # call 1
    main += [session.say(main, "Still here."), user("And?")]  # call 2
    agent += [session.say(agent, "Two."), user("More")]  # call 3
    retry = [*main[:3]]
    retry += [session.say(retry, "Another way."), user("And?")]  # call 4
    assert session.kinds() == ["root", "root", "bridged", "bridged", "bridged"]
    for call, parent in ((2, 0), (3, 1), (4, 0)):
        session.check_continued(session.calls[call][0], parent)
    for messages, parent in ((main, 2), (agent, 3), (retry, 4)):
        session.check_continued(session.prompt(messages), parent)


pieces = st.lists(st.sampled_from(MARKUP) | st.integers(0, 399), max_size=8)
ends = st.sampled_from(["<|im_end|>", "<|endoftext|>", "", "😀"])
texts = st.text(max_size=5) | st.sampled_from(MARKUP)


@given(st.data())
@examples(200)
def test_a_prompt_begins_with_the_sampled_tokens_or_has_a_reason(rendering, encode, data):
    session = Session(rendering, encode)
    branches = [[user("Hi")]]
    for _ in range(data.draw(st.integers(1, 6))):
        messages = data.draw(st.sampled_from(branches))
        ids = []
        for piece in [*data.draw(pieces), data.draw(ends)]:
            ids += [piece] if isinstance(piece, int) else encode(piece)
        reply = session.ask(messages, ids[: data.draw(st.sampled_from([None, None, -1]))])
        prompt, _ = session.calls[-1]
        if prompt.kind == "bridged":
            session.check_continued(prompt, prompt.parent.call_id)
            assert len(prompt.ids) > prompt.prefix_length
        else:
            assert prompt.reason
            assert [*prompt.ids] == session.full_prompt(messages)
        branches.append([*messages, reply, answer(reply, data.draw(texts))])


@given(st.lists(st.tuples(texts, st.booleans()), min_size=1, max_size=8))
@examples(100)
def test_a_conversation_of_whole_turns_is_continued_to_its_end(rendering, encode, turns):
    session = Session(rendering, encode)
    messages = [user("Hi")]
    for number, (text, cut) in enumerate(turns):
        completion = encode(THINKING + "<|im_end|>")
        if cut:
            completion = completion[: len(text)]
        reply = session.ask(messages, completion)
        if number:
            session.check_continued(session.calls[number][0], number - 1)
        messages = [*messages, reply, answer(reply, text)]


@given(bodies)
@examples(300)
def test_every_request_that_decodes_has_a_prompt(rendering, body):
    try:
        call = routes.CHAT.decode(parse_object(body), "/")
    except DialectError:
        return
    conversations = Conversations(rendering)
    prompt = conversations.prompt(call)
    assert prompt.ids
    conversations.add("0", prompt, rendering.stop_token_ids, said(""))


TWO_CALLS = f"{THINKING}\n{CALL}"


def with_other_spaces(reply):
    return {**arguments(SPACED)(reply), "content": None}


def with_calls(reply, *calls):
    return {**reply, "tool_calls": list(calls)}


def one_of_two(reply):
    return with_calls(reply, reply["tool_calls"][0])


def in_another_order(reply):
    return with_calls(reply, *reversed(reply["tool_calls"]))


def with_another_id(reply):
    first, second = reply["tool_calls"]
    return with_calls(reply, first, {**second, "id": "c"})


def to_responses(calls):
    """Return a request of the Responses API with the calls, then their results."""
    items = [user("Hi")]
    for call in calls:
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    for call in calls:
        answered = {"type": "function_call_output", "call_id": call["id"], "output": "Nothing."}
        items.append(answered)
    return {"model": "m", "input": items, "tools": [{"type": "function", **TOOL["function"]}]}


def to_messages(calls):
    """Return a request of the Messages API with the calls, then their results."""
    uses = []
    results = []
    for call in calls:
        given = json.loads(call["function"]["arguments"])
        uses.append({"type": "tool_use", "id": call["id"], "name": "look", "input": given})
        results.append({"type": "tool_result", "tool_use_id": call["id"], "content": "Nothing."})
    return {"model": "m", "max_tokens": 9, "messages": [user("Hi"), said(uses), user(results)]}


class TestTextBesideCalls:
    """Frameworks echo the tool calls of a turn without the text that the model said before them."""

    @named(
        "echo",
        {
            "null": changed(content=None),
            "empty": changed(content=""),
            "LiteLLM's text": changed(content=LITELLM),
            "thoughts in its place": changed(content="<think>\nI look.\n</think>\n\n"),
            "other spaces in arguments": with_other_spaces,
        },
    )
    def test_a_dropped_text_stays_in_the_prompt_and_the_row_says_so(self, session, echo):
        reply = session.say([user("Hi")], THINKING)
        messages = [user("Hi"), echo(reply), result(reply)]
        second = session.say(messages, THINKING)
        session.check_continued(session.calls[1][0], 0, TEXT_DROPPED)
        session.check_continued(session.prompt([*messages, second, result(second)]), 1)
        again = session.prompt([*messages, echo(second), result(reply)])
        session.check_continued(again, 1, TEXT_DROPPED)

    @named(
        "dialect, body_of",
        {
            "Responses": (routes.RESPONSES, to_responses),
            "Messages": (routes.MESSAGES, to_messages),
        },
    )
    def test_in_every_api(self, session, dialect, body_of):
        reply = session.say([user("Hi")], TWO_CALLS)
        call = dialect.decode(body_of(reply["tool_calls"]), "/v1/messages")
        call.tools = session.decode([user("Hi")]).tools
        session.check_continued(session.conversations.prompt(call), 0, TEXT_DROPPED)

    @named(
        "echo",
        {
            "one of two calls": one_of_two,
            "another order": in_another_order,
            "another id": with_another_id,
            "no calls": with_calls,
            "other thoughts": changed(content="<think>I hear.</think>"),
            "another text": changed(content="I look."),
        },
    )
    def test_what_is_changed_besides_is_rendered(self, session, echo):
        reply = session.say([user("Hi")], TWO_CALLS)
        prompt = session.prompt([user("Hi"), echo({**reply, "content": ""}), user("And?")])
        check_rendered(prompt, "message 1 is not that of call 0")

    def test_a_reply_without_text_is_found_before_one_that_lost_it(self, session):
        texts = ("So:", "", "Or:")
        for text in texts:
            session.add([user("Hi")], assistant_message(text, "", CALLED))
        for number, text in enumerate(texts):
            echo = assistant_message(text, "", CALLED)
            prompt = session.prompt([user("Hi"), echo, result(echo)])
            assert prompt.parent.call_id == str(number)

    def test_two_replies_that_differ_by_a_dropped_text_alone_are_ambiguous(self, session):
        for text in ("So:", "Or:"):
            session.add([user("Hi")], assistant_message(text, "", CALLED))
        echo = assistant_message("", "", CALLED)
        assert session.prompt([user("Hi"), echo, result(echo)]).kind == "rendered"


CALLED = [message_tool_call("c1", "look", "{}")]
