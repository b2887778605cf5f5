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
from tests.addons.prompts.talks import (
    CALL,
    LITELLM,
    MARKUP,
    SPACED,
    THINKING,
    Session,
    arguments,
    changed,
    named,
    result,
    user,
)
from tests.deep import examples


def test_reasoning_is_restored_from_the_call_that_the_opaque_field_names(session):
    reply = session.ask([user("Hi")], "<think>\nI look.\n</think>\n\nHello.<|im_end|>")
    echo = {"role": "assistant", "content": reply["content"], "call_id": "0"}
    altered = [user("Hello"), echo, user("Go on")]
    prompt = session.conversations.prompt(ModelCall("m", altered, session.tools))
    whole = [user("Hello"), {**echo, "reasoning_content": "I look."}, user("Go on")]
    assert [*prompt.ids] == session.rendering.render(whole, session.tools)


@pytest.mark.parametrize("number", [0, 1])
def test_the_newest_call_that_the_renderer_cannot_continue_is_the_reason(session, number):
    messages = session.talk(*["One."] * number)
    messages += [session.ask(messages, "Two.<|im_end|>And more"), user("Go on")]
    prompt = session.prompt(messages)
    assert (prompt.kind, prompt.reason) == (
        "rendered",
        f"the renderer cannot continue call {number}",
    )


def test_branches_continue_their_own_calls(session):
    main = [user("Hi")]
    main += [session.ask(main, "I delegate.<|im_end|>"), user("Go on")]  # call 0
    agent = [{"role": "system", "content": "You are a sub-agent."}, user("Count")]
    agent += [session.ask(agent, "One.<|im_end|>"), user("More")]  # call 1
    main += [session.ask(main, "Still here.<|im_end|>"), user("And?")]  # call 2
    agent += [session.ask(agent, "Two.<|im_end|>"), user("More")]  # call 3
    retry = [*main[:3]]
    retry += [session.ask(retry, "Another way.<|im_end|>"), user("And?")]  # call 4
    assert [call.kind for call, _ in session.calls] == [
        "root",
        "root",
        "bridged",
        "bridged",
        "bridged",
    ]
    assert [call.parent.call_id for call, _ in session.calls if call.parent] == ["0", "1", "0"]
    for messages, parent in ((main, "2"), (agent, "3"), (retry, "4")):
        prompt = session.prompt(messages)
        assert prompt.parent.call_id == parent
        assert [*prompt.ids[: prompt.prefix_length]] == session.token_ids(parent)


sampled = st.lists(st.sampled_from(MARKUP) | st.integers(0, 399), max_size=8)
said = st.text(max_size=5) | st.sampled_from(MARKUP)


@given(st.data())
@examples(200)
def test_a_prompt_begins_with_the_sampled_tokens_or_has_a_reason(rendering, encode, data):
    session = Session(rendering, encode)
    branches = [[user("Hi")]]
    for _ in range(data.draw(st.integers(1, 6))):
        messages = data.draw(st.sampled_from(branches))
        pieces = [
            *data.draw(sampled),
            *data.draw(st.sampled_from([["<|im_end|>"], ["<|endoftext|>"], [], ["😀"]])),
        ]
        ids = [
            i for piece in pieces for i in ([piece] if isinstance(piece, int) else encode(piece))
        ]
        reply = session.ask(messages, ids[: data.draw(st.sampled_from([None, None, -1]))])
        prompt, _ = session.calls[-1]
        if prompt.kind == "bridged":
            assert prompt.reason is None
            assert [*prompt.ids[: prompt.prefix_length]] == session.token_ids(prompt.parent.call_id)
            assert len(prompt.ids) > prompt.prefix_length
        else:
            assert prompt.reason
            assert [*prompt.ids] == rendering.render(
                session.decode(messages).messages, session.tools
            )
        answers = (
            [result(reply, data.draw(said))] if reply.get("tool_calls") else [user(data.draw(said))]
        )
        branches.append([*messages, reply, *answers])


@given(st.lists(st.tuples(said, st.booleans()), min_size=1, max_size=8))
@examples(100)
def test_a_conversation_of_whole_turns_is_continued_to_its_end(rendering, encode, turns):
    session = Session(rendering, encode)
    messages = [user("Hi")]
    for number, (text, cut) in enumerate(turns):
        completion = encode(THINKING + "<|im_end|>")[: len(text) if cut else None]
        reply = session.ask(messages, completion)
        prompt, _ = session.calls[number]
        assert prompt.kind == ("bridged" if number else "root")
        assert prompt.parent is None or [*prompt.ids[: prompt.prefix_length]] == session.token_ids(
            number - 1
        )
        messages = [
            *messages,
            reply,
            result(reply, text) if reply.get("tool_calls") else user(text),
        ]


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
    conversations.add("0", prompt, rendering.stop_token_ids, {"role": "assistant", "content": ""})


TWO_CALLS = f"{THINKING}\n{CALL}"


class TestTextBesideCalls:
    """Frameworks echo the tool calls of a turn without the text that the model said before them."""

    def ask(self, session, completion=THINKING):
        reply = session.ask([user("Hi")], completion + "<|im_end|>")
        assert reply["content"].strip() == "So:"
        return reply

    @named(
        "echo",
        {
            "null": changed(content=None),
            "empty": changed(content=""),
            "LiteLLM's text": changed(content=LITELLM),
            "thoughts in its place": changed(content="<think>\nI look.\n</think>\n\n"),
            "other spaces in arguments": lambda reply: {
                **arguments(SPACED)(reply),
                "content": None,
            },
        },
    )
    def test_a_dropped_text_stays_in_the_prompt_and_the_row_says_so(self, session, echo):
        reply = self.ask(session)
        messages = [user("Hi"), echo(reply), result(reply)]
        messages += [session.ask(messages, THINKING + "<|im_end|>")]
        first, second = (session.calls[1][0], session.prompt([*messages, result(messages[-1])]))
        assert (first.kind, first.parent.call_id, first.reason) == ("bridged", "0", TEXT_DROPPED)
        assert [*first.ids[: first.prefix_length]] == session.token_ids(0)
        assert (second.kind, second.parent.call_id, second.reason) == ("bridged", "1", None)
        messages[-1] = echo(messages[-1])
        assert session.prompt([*messages, result(reply)]).reason == TEXT_DROPPED

    @named(
        "body",
        {
            "Responses": lambda calls, answers: {
                "input": [user("Hi")]
                + [
                    {
                        "type": "function_call",
                        "call_id": i,
                        "name": "look",
                        "arguments": json.dumps(a),
                    }
                    for i, a in calls
                ]
                + [
                    {"type": "function_call_output", "call_id": i, "output": text}
                    for i, text in answers
                ],
                "tools": [{"type": "function", **TOOL["function"]}],
            },
            "Messages": lambda calls, answers: {
                "max_tokens": 9,
                "messages": [
                    user("Hi"),
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "tool_use", "id": i, "name": "look", "input": a}
                            for i, a in calls
                        ],
                    },
                    user(
                        [
                            {"type": "tool_result", "tool_use_id": i, "content": text}
                            for i, text in answers
                        ]
                    ),
                ],
                "tools": [],
            },
        },
    )
    def test_in_every_api(self, session, body):
        reply = self.ask(session, TWO_CALLS)
        calls = [
            (call["id"], json.loads(call["function"]["arguments"])) for call in reply["tool_calls"]
        ]
        request = body(calls, [(i, "Nothing.") for i, _ in calls])
        dialect = routes.RESPONSES if "input" in request else routes.MESSAGES
        decoded = dialect.decode({"model": "m", **request}, "/v1/messages")
        decoded.tools = session.decode([user("Hi")]).tools
        prompt = session.conversations.prompt(decoded)
        assert (prompt.kind, prompt.parent.call_id, prompt.reason) == ("bridged", "0", TEXT_DROPPED)

    @named(
        "echo",
        {
            "one of two calls": lambda reply: {**reply, "tool_calls": reply["tool_calls"][:1]},
            "another order": lambda reply: {**reply, "tool_calls": reply["tool_calls"][::-1]},
            "another id": lambda reply: {
                **reply,
                "tool_calls": [reply["tool_calls"][0], {**reply["tool_calls"][1], "id": "c"}],
            },
            "no calls": lambda reply: {**reply, "tool_calls": []},
            "other thoughts": changed(content="<think>I hear.</think>"),
            "another text": changed(content="I look."),
        },
    )
    def test_what_is_changed_besides_is_rendered(self, session, echo):
        reply = self.ask(session, TWO_CALLS)
        echoed = echo({**reply, "content": ""})
        prompt = session.prompt([user("Hi"), echoed, user("And?")])
        assert (prompt.kind, prompt.parent) == ("rendered", None)
        assert prompt.reason.startswith("message 1 is not that of call 0")

    def test_a_reply_without_text_is_found_before_one_that_lost_it(self, session, encode):
        calls = [message_tool_call("c1", "look", "{}")]
        for number, text in enumerate(("So:", "", "Or:")):
            prompt = session.prompt([user("Hi")])
            session.conversations.add(
                str(number), prompt, encode("x<|im_end|>"), assistant_message(text, "", calls)
            )
        for text, parent in (("So:", "0"), ("", "1"), ("Or:", "2")):
            echo = assistant_message(text, "", calls)
            assert session.prompt([user("Hi"), echo, result(echo)]).parent.call_id == parent

    def test_two_replies_that_differ_by_a_dropped_text_alone_are_ambiguous(self, session, encode):
        calls = [message_tool_call("c1", "look", "{}")]
        for number, text in enumerate(("So:", "Or:")):
            prompt = session.prompt([user("Hi")])
            session.conversations.add(
                str(number), prompt, encode("x<|im_end|>"), assistant_message(text, "", calls)
            )
        echo = assistant_message("", "", calls)
        assert session.prompt([user("Hi"), echo, result(echo)]).kind == "rendered"
