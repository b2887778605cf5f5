import json
from array import array
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import DialectError, ModelCall, assistant_message, message_tool_call
from rolltap.addons.dialects.claude_code import normal_arguments
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.prompts import canonical
from rolltap.addons.prompts.history import TEXT_DROPPED, Conversations, History, Turn
from tests.addons.dialects.test_openai_chat import TOOL, bodies
from tests.deep import examples

ARGUMENTS = '{"at":  "caf\\u00e9", "deep": {"x": 1.0, "y": [true, null]}}'
SPACED = '{"at":"caf\u00e9",  "deep":{"y":[true,null],"x":1}}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
THINKING = f"<think>\nI look.\n</think>\n\nSo:\n{CALL}"
CONTEXT = {"role": "assistant", "content": "Job 1 has ended."}


class Session:
    """A session whose calls are answered with completions that the test provides."""

    def __init__(self, rendering, encode, tools=(TOOL,)):
        self.rendering = rendering
        self.encode = encode
        self.tools = list(tools)
        self.conversations = Conversations(rendering)
        self.calls = []
        """(prompt, completion ids) of each call. A call's id is its index."""
        self.kept = []
        """(messages in JSON, parts) of each request, as `RecentBodies` keeps them."""

    def decode(self, messages):
        """Return the decoded request with these messages. Those of earlier requests are not decoded again."""
        written = [json.dumps(message) for message in messages]
        known = []
        for earlier, parts in self.kept:
            alike = [own == other for own, other in zip(written, earlier, strict=False)]
            same = [*alike, False].index(False)
            if same > len(known):
                known = parts[:same]
        body = json.dumps({"messages": [None] * len(known) + messages[len(known) :], "tools": self.tools})
        call = routes.CHAT.decode(parse_object(body.encode()), "/", known)
        self.kept.append((written, call.parts))
        return call

    def prompt(self, messages):
        return self.conversations.prompt(self.decode(messages))

    def ask(self, messages, completion, prompt=None):
        """Record a call with `completion`, a text or token ids, and return the reply that the harness sees.

        With `prompt`, the one that its request got before calls which were recorded since.
        """
        prompt = prompt or self.prompt(messages)
        completion_ids = self.encode(completion) if isinstance(completion, str) else completion
        reply, _ = self.rendering.read(prompt.ids, completion_ids, self.tools)
        reply.issue(str(len(self.calls)))
        reply = reply.to_message()
        self.conversations.add(str(len(self.calls)), prompt, completion_ids, reply)
        self.calls.append((prompt, completion_ids))
        return reply

    def talk(self, *completions):
        """Answer a conversation with completions, after each of which the program goes on. Returns its messages."""
        messages = [user("Hi")]
        for completion in completions:
            reply = self.ask(messages, completion + "<|im_end|>")
            messages += [reply, result(reply) if reply.get("tool_calls") else user("Go on")]
        return messages

    def token_ids(self, number):
        """Return the prompt and completion ids of a call."""
        prompt, completion_ids = self.calls[int(number)]
        return [*prompt.ids, *completion_ids]


@pytest.fixture
def session(rendering, encode):
    return Session(rendering, encode)


def user(text):
    return {"role": "user", "content": text}


def result(reply, text="Nothing."):
    return {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": text}


def same(reply):
    return reply


def changed(**fields):
    return lambda reply: {**reply, **fields}


other = changed(content="Changed.")


def named(name, cases):
    """Parametrize a test by the values of a dict, with its keys as ids."""
    return pytest.mark.parametrize(name, cases.values(), ids=cases)


def arguments(text):
    def change(reply):
        (call,) = reply["tool_calls"]
        return {**reply, "tool_calls": [{**call, "function": {**call["function"], "arguments": text}}]}

    return change


class TestKind:
    def test_the_first_call_of_a_session_is_a_root(self, session):
        prompt = session.prompt([user("Hi")])
        assert (prompt.kind, prompt.reason, prompt.parent, prompt.prefix_length) == ("root", "no earlier call", None, 0)
        assert [*prompt.ids] == session.rendering.render([user("Hi")], [TOOL])
        assert prompt.new_messages == [user("Hi")]

    @named(
        "echo",
        {
            "verbatim": same,
            "as parts": changed(content=[{"type": "text", "text": "S"}, {"type": "text", "text": "o:"}]),
            "without reasoning": lambda reply: {key: reply[key] for key in reply if key != "reasoning_content"},
            "with other reasoning": changed(reasoning_content="Something else."),
            "with more fields": changed(refusal=None, annotations=[], name="me"),
            "other spaces": arguments('{"at":"café","deep":{"x":1.0,"y":[true,null]}}'),
            "another key order": arguments('{"deep": {"y": [true, null], "x": 1.0}, "at": "café"}'),
            "other escapes": arguments('{\n  "at": "caf\\u00E9",\n  "deep": {"x": 1.0, "y": [true, null]}\n}'),
            "numbers as JavaScript writes them": arguments('{"at":"café","deep":{"x":1,"y":[true,null]}}'),
        },
    )
    def test_an_echoed_reply_is_continued(self, session, echo):
        reply = session.ask([user("Hi")], THINKING + "<|im_end|>")
        prompt = session.prompt([user("Hi"), echo(reply), result(reply)])
        assert (prompt.kind, prompt.reason, prompt.parent.call_id) == ("bridged", None, "0")
        assert [*prompt.ids[: prompt.prefix_length]] == session.token_ids(0)
        assert prompt.new_messages == [{**result(reply), "name": "look"}]

    @named(
        "echo",
        {
            "other text": changed(content="So!"),
            "another id": lambda reply: {**reply, "tool_calls": [{**reply["tool_calls"][0], "id": "call_other"}]},
            "twice": lambda reply: {**reply, "tool_calls": reply["tool_calls"] * 2},
            "no calls": changed(tool_calls=[]),
            "other arguments": arguments('{"at": "cafe", "deep": {"x": 1.0, "y": [true, null]}}'),
            "1 for true": arguments('{"at": "café", "deep": {"x": 1.0, "y": [1, null]}}'),
            "no arguments": arguments("not JSON"),
        },
    )
    def test_an_altered_reply_is_not_continued(self, session, echo):
        reply = session.ask([user("Hi")], THINKING + "<|im_end|>")
        assert session.prompt([user("Hi"), reply, result(reply)]).kind == "bridged"
        altered = echo(reply)
        messages = [user("Hi"), altered, result(altered) if altered["tool_calls"] else user("Go on")]
        prompt = session.prompt(messages)
        assert (prompt.kind, prompt.parent, prompt.prefix_length) == ("rendered", None, 0)
        assert prompt.reason.startswith("message 1 is not that of call 0: ")
        assert [*prompt.ids] == session.rendering.render(session.decode(messages).messages, [TOOL])

    def test_an_altered_user_message_is_not_continued(self, session):
        reply = session.ask([user("Hi")], "Hello.<|im_end|>")
        assert session.prompt([user("Hi"), reply, user("Go on")]).kind == "bridged"
        prompt = session.prompt([user("Hi!"), reply, user("Go on")])
        assert prompt.kind == "rendered"
        assert prompt.reason == (
            'message 0 is not that of call 0: \'{"content": "Hi!", "role": "user"}\' '
            'where it had \'{"content": "Hi", "role": "user"}\''
        )

    def test_a_repeated_conversation_is_another_root(self, session):
        session.ask([user("Hi")], "Hello.<|im_end|>")
        prompt = session.prompt([user("Hi")])
        assert (prompt.kind, prompt.reason) == ("root", "it ends within the conversation of call 0")

    def test_reasoning_is_restored_from_the_call_that_the_opaque_field_names(self, session):
        reply = session.ask([user("Hi")], "<think>\nI look.\n</think>\n\nHello.<|im_end|>")
        echo = {"role": "assistant", "content": reply["content"], "call_id": "0"}
        altered = [user("Hello"), echo, user("Go on")]
        prompt = session.conversations.prompt(ModelCall("m", altered, session.tools))
        whole = [user("Hello"), {**echo, "reasoning_content": "I look."}, user("Go on")]
        assert [*prompt.ids] == session.rendering.render(whole, session.tools)

    def test_other_tools_are_another_conversation(self, session):
        reply = session.ask([user("Hi")], "Hello.<|im_end|>")
        session.tools = []
        prompt = session.prompt([user("Hi"), reply, user("Go on")])
        assert (prompt.kind, prompt.reason) == ("rendered", "its tools are not those of any earlier call")

    @pytest.mark.parametrize("number", [0, 1])
    def test_the_newest_call_that_the_renderer_cannot_continue_is_the_reason(self, session, number):
        messages = session.talk(*["One."] * number)
        messages += [session.ask(messages, "Two.<|im_end|>And more"), user("Go on")]
        prompt = session.prompt(messages)
        assert (prompt.kind, prompt.reason) == ("rendered", f"the renderer cannot continue call {number}")


class TestEchoRule:
    """A command whose echo lacks its `cd FOLDER && `, as Claude Code sends it."""

    COMMAND = '<tool_call>\n{"name": "look", "arguments": {"command": "cd a && ls"}}\n</tool_call><|im_end|>'

    @pytest.mark.parametrize(
        ("user_id", "kind"),
        [('{"device_id": "d", "session_id": "s"}', "bridged"), ("me", "rendered")],
        ids=["Claude Code", "another program"],
    )
    def test_only_claude_code_may_leave_the_folder_out(self, session, monkeypatch, user_id, kind):
        def decode(messages):
            tool = {"name": "look", "input_schema": {"type": "object"}}
            request = {"max_tokens": 9, "tools": [tool], "messages": messages, "metadata": {"user_id": user_id}}
            return routes.MESSAGES.decode(parse_object(json.dumps(request).encode()), "/v1/messages")

        monkeypatch.setattr(session, "decode", decode)
        call_id = session.ask([user("Hi")], self.COMMAND)["tool_calls"][0]["id"]
        use = {"type": "tool_use", "id": call_id, "name": "look", "input": {"command": "ls"}}
        answer = {"type": "tool_result", "tool_use_id": call_id, "content": "Nothing."}
        echo = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]
        assert session.prompt([user("Hi"), *echo]).kind == kind

    def test_calls_under_another_rule_are_not_continued(self, session):
        call = session.decode([user("Hi")])
        session.conversations.add("0", session.conversations.prompt(call), [], {"role": "assistant", "content": "A"})
        again = session.decode([user("Hi"), {"role": "assistant", "content": "A"}, user("Go on")])
        assert session.conversations.prompt(again).parent.call_id == "0"
        again.echo_rule = normal_arguments
        assert session.conversations.prompt(again).parent is None


class TestChangedEchoes:
    """Rules that hold for every program (`issued_forms`)."""

    LITELLM = "[System: Empty message content sanitised to satisfy protocol]"

    @named(
        "completion, echo",
        {
            "thoughts": (THINKING, changed(content="<think>\nI look.\n</think>\n\nSo:")),
            "thoughts and a newline": (THINKING, changed(content="<think>I look.</think>So:\n")),
            "only thoughts": (THINKING.replace("So:", ""), changed(content="<think>\nI look.\n</think>")),
            "LiteLLM": (THINKING.replace("So:", ""), changed(content=LITELLM)),
            "newline more": (THINKING, changed(content="So:\n")),
            "newline less": ("Done.\n", changed(content="Done.")),
            "blanks": (THINKING.replace("So:", " "), changed(content="")),
        },
    )
    def test_an_echo_with_a_known_change_is_continued(self, session, completion, echo):
        reply = session.ask([user("Hi")], completion + "<|im_end|>")
        shown = {key: value for key, value in echo(reply).items() if key != "reasoning_content"}
        messages = [user("Hi"), shown, result(reply) if reply.get("tool_calls") else user("Go on")]
        session.ask(messages, "Well.<|im_end|>")
        prompt, _ = session.calls[1]
        assert (prompt.kind, prompt.reason, prompt.parent.call_id) == ("bridged", None, "0")
        messages += [{"role": "assistant", "content": "Well."}, user("Go on")]
        assert session.prompt(messages).parent.call_id == "1"

    @pytest.mark.parametrize(
        "content",
        ["<think>\nI hear.\n</think>\n\nSo:", "<think></think>So:", "So:\n\n", " So:", "<think>I look.So:"],
    )
    def test_other_changes_are_not(self, session, content):
        reply = session.ask([user("Hi")], THINKING + "<|im_end|>")
        prompt = session.prompt([user("Hi"), {**reply, "content": content}, result(reply)])
        assert (prompt.kind, prompt.parent) == ("rendered", None)

    def test_replies_that_differ_by_a_newline_stay_apart(self, session):
        replies = [{"role": "assistant", "content": text} for text in ("Hello.", "Hello.\n")]
        for number, reply in enumerate(replies):
            prompt = session.prompt([user("Hi")])
            session.conversations.add(str(number), prompt, session.encode("Hello.<|im_end|>"), reply)
        for number, reply in enumerate(replies):
            assert session.prompt([user("Hi"), reply, user("Go on")]).parent.call_id == str(number)


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
            "LiteLLM's text": changed(content=TestChangedEchoes.LITELLM),
            "thoughts in its place": changed(content="<think>\nI look.\n</think>\n\n"),
            "other spaces in arguments": lambda reply: {**arguments(SPACED)(reply), "content": None},
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
                    {"type": "function_call", "call_id": i, "name": "look", "arguments": json.dumps(a)}
                    for i, a in calls
                ]
                + [{"type": "function_call_output", "call_id": i, "output": text} for i, text in answers],
                "tools": [{"type": "function", **TOOL["function"]}],
            },
            "Messages": lambda calls, answers: {
                "max_tokens": 9,
                "messages": [
                    user("Hi"),
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": i, "name": "look", "input": a} for i, a in calls],
                    },
                    user([{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in answers]),
                ],
                "tools": [],
            },
        },
    )
    def test_in_every_api(self, session, body):
        reply = self.ask(session, TWO_CALLS)
        calls = [(call["id"], json.loads(call["function"]["arguments"])) for call in reply["tool_calls"]]
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
            session.conversations.add(str(number), prompt, encode("x<|im_end|>"), assistant_message(text, "", calls))
        for text, parent in (("So:", "0"), ("", "1"), ("Or:", "2")):
            echo = assistant_message(text, "", calls)
            assert session.prompt([user("Hi"), echo, result(echo)]).parent.call_id == parent

    def test_two_replies_that_differ_by_a_dropped_text_alone_are_ambiguous(self, session, encode):
        calls = [message_tool_call("c1", "look", "{}")]
        for number, text in enumerate(("So:", "Or:")):
            prompt = session.prompt([user("Hi")])
            session.conversations.add(str(number), prompt, encode("x<|im_end|>"), assistant_message(text, "", calls))
        echo = assistant_message("", "", calls)
        assert session.prompt([user("Hi"), echo, result(echo)]).kind == "rendered"


class TestEqualReplies:
    """Two calls with the same conversation and the same visible reply."""

    @pytest.fixture
    def replies(self, session):
        thoughts = [f"<think>\n{thought}\n</think>\n\n" for thought in ("One", "Two")]
        return [session.ask([user("Hi")], f"{thought}Hello.<|im_end|>") for thought in thoughts]

    @pytest.mark.parametrize("shown", [False, True], ids=["sent back", "shown in the text"])
    def test_their_reasoning_selects_the_call(self, session, replies, shown):
        for number, reply in enumerate(replies):
            if shown:
                content = f"<think>\n{reply['reasoning_content']}\n</think>\n\nHello."
                reply = {"role": "assistant", "content": content}
            prompt = session.prompt([user("Hi"), reply, user("Go on")])
            assert (prompt.kind, prompt.parent.call_id) == ("bridged", str(number))
            assert [*prompt.ids[: prompt.prefix_length]] == session.token_ids(number)

    @pytest.mark.parametrize("context", [[], [CONTEXT, user("And?")]], ids=["at the end", "before context"])
    @pytest.mark.parametrize("reasoning", ["", "Three"], ids=["none", "of neither"])
    def test_without_matching_reasoning_they_are_ambiguous(self, session, replies, reasoning, context):
        prompt = session.prompt([user("Hi"), {**replies[0], "reasoning_content": reasoning}, user("Go on"), *context])
        assert (prompt.kind, prompt.reason) == ("rendered", "2 earlier calls fit equally well up to message 2")

    def test_calls_with_equal_tokens_are_not_ambiguous(self, session):
        replies = [session.ask([user("Hi")], "Hello.<|im_end|>") for _ in range(2)]
        assert session.prompt([user("Hi"), replies[1], user("Go on")]).kind == "bridged"

    def test_of_many_calls_with_equal_tokens_the_ids_of_one_prompt_are_joined(self, session):
        replies = [session.ask([user("Hi")], "Hello.<|im_end|>") for _ in range(5)]
        with mock.patch.object(Turn, "prompt_ids", autospec=True, side_effect=Turn.prompt_ids) as joined:
            prompt = session.prompt([user("Hi"), replies[0], user("Go on")])
        assert (prompt.kind, joined.call_count) == ("bridged", 1)

    def test_calls_with_equal_text_and_different_tokens_are_ambiguous(self, session, encode):
        whole, letters = encode("tool<|im_end|>"), [i for letter in "tool" for i in encode(letter)]
        assert whole[:-1] != letters
        replies = [session.ask([user("Hi")], ids) for ids in (whole, letters + whole[-1:])]
        assert replies[0] == replies[1]
        assert session.prompt([user("Hi"), replies[0], user("Go on")]).kind == "rendered"


def test_branches_continue_their_own_calls(session):
    main = [user("Hi")]
    main += [session.ask(main, "I delegate.<|im_end|>"), user("Go on")]  # call 0
    agent = [{"role": "system", "content": "You are a sub-agent."}, user("Count")]
    agent += [session.ask(agent, "One.<|im_end|>"), user("More")]  # call 1
    main += [session.ask(main, "Still here.<|im_end|>"), user("And?")]  # call 2
    agent += [session.ask(agent, "Two.<|im_end|>"), user("More")]  # call 3
    retry = [*main[:3]]
    retry += [session.ask(retry, "Another way.<|im_end|>"), user("And?")]  # call 4
    assert [call.kind for call, _ in session.calls] == ["root", "root", "bridged", "bridged", "bridged"]
    assert [call.parent.call_id for call, _ in session.calls if call.parent] == ["0", "1", "0"]
    for messages, parent in ((main, "2"), (agent, "3"), (retry, "4")):
        prompt = session.prompt(messages)
        assert prompt.parent.call_id == parent
        assert [*prompt.ids[: prompt.prefix_length]] == session.token_ids(parent)


MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", THINKING, "Hi", "😀", "  \n", "<|im_start|>"]
sampled = st.lists(st.sampled_from(MARKUP) | st.integers(0, 399), max_size=8)
said = st.text(max_size=5) | st.sampled_from(MARKUP)


@given(st.data())
@examples(200)
def test_a_prompt_begins_with_the_sampled_tokens_or_has_a_reason(rendering, encode, data):
    session = Session(rendering, encode)
    branches = [[user("Hi")]]
    for _ in range(data.draw(st.integers(1, 6))):
        messages = data.draw(st.sampled_from(branches))
        pieces = [*data.draw(sampled), *data.draw(st.sampled_from([["<|im_end|>"], ["<|endoftext|>"], [], ["😀"]]))]
        ids = [i for piece in pieces for i in ([piece] if isinstance(piece, int) else encode(piece))]
        reply = session.ask(messages, ids[: data.draw(st.sampled_from([None, None, -1]))])
        prompt, _ = session.calls[-1]
        if prompt.kind == "bridged":
            assert prompt.reason is None
            assert [*prompt.ids[: prompt.prefix_length]] == session.token_ids(prompt.parent.call_id)
            assert len(prompt.ids) > prompt.prefix_length
        else:
            assert prompt.reason
            assert [*prompt.ids] == rendering.render(session.decode(messages).messages, session.tools)
        answers = [result(reply, data.draw(said))] if reply.get("tool_calls") else [user(data.draw(said))]
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
        assert prompt.parent is None or [*prompt.ids[: prompt.prefix_length]] == session.token_ids(number - 1)
        messages = [*messages, reply, result(reply, text) if reply.get("tool_calls") else user(text)]


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


def test_a_long_chain_of_turns_returns_its_full_prompt():
    turn = None
    for number in range(0, 20_000, 2):
        turn = Turn(str(number), turn, number, array("i", [number]), array("i", [number + 1]))
    assert [*turn.prompt_ids()] == list(range(19_999))


def test_equal_arguments_of_another_type_in_a_later_request_are_another_conversation(session):
    called = message_tool_call("c1", "look", {"deep": True})
    example = [user("Hi"), assistant_message("", "", [called]), user("Go on")]
    session.conversations.prompt(ModelCall("m", example, session.tools))
    prompt = session.conversations.prompt(ModelCall("m", example, session.tools))
    session.conversations.add("0", prompt, session.encode("A.<|im_end|>"), assistant_message("A.", "", []))
    other = message_tool_call("c1", "look", {"deep": 1})
    for call, parent in [(called, "0"), (other, None), (called, "0")]:
        messages = [dict(example[0]), assistant_message("", "", [call]), dict(example[2])]
        messages += [assistant_message("A.", "", []), user("Go on")]
        prompt = session.conversations.prompt(ModelCall("m", messages, session.tools))
        assert (prompt.parent and prompt.parent.call_id) == parent


class TestMemory:
    @pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>And more"], ids=["continued", "never continued"])
    def test_a_session_keeps_each_token_once(self, session, end):
        messages = [user("Hi")]
        for number in range(30):
            messages += [session.ask(messages, f"I say {number}.{end}"), user(f"Go on, {number}. " * 20)]
        assert session.prompt(messages).kind == ("bridged" if end == "<|im_end|>" else "rendered")
        turns = session.conversations.history.turns.values()
        kept = sum(len(turn.tail_ids) + len(turn.completion_ids) for turn in turns)
        assert kept <= 1.1 * len(session.token_ids(29))
        assert {turn.tail_ids.itemsize for turn in turns} == {4}
        for number, turn in enumerate(turns):
            assert turn.prompt_ids() == session.calls[number][0].ids

    def test_long_messages_are_not_kept(self, session):
        session.ask([user("a" * 10_000)], "Hello.<|im_end|>")
        prompt = session.prompt([user("a" * 9_999 + "b")])
        session.prompt([user("Hi"), user("b" * 10_000)])
        assert prompt.reason == "message 0 is not that of call 0: it differs after 400 characters"
        history = session.conversations.history
        assert sum(len(node.excerpt) for node in history._nodes.values()) < 500
        assert len(history._recent) == 2
        del prompt
        session.kept.clear()
        session.calls.clear()
        assert [*history._recent.values()] == []

    def test_leading_system_messages_are_not_kept(self, session):
        system = {"role": "system", "content": "a" * 10_000}
        for text in ("Hi", "Ho"):
            session.ask([system, user(text)], "Hello.<|im_end|>")
        recent = [*session.conversations.history._recent.values()]
        assert [message["content"] for each in recent for message in each.messages] == ["Ho"]

    def test_requests_that_became_no_call_leave_nothing(self):
        history = History()
        for number in range(100):
            tool = {"type": "function", "function": {"name": f"f{number}"}}
            history.read(ModelCall("m", [user("Hi")], [tool]))
        assert history._nodes == {}

    def test_of_a_conversation_the_last_two_requests_are_kept(self, session):
        session.talk(*["Well."] * 9)
        assert len(session.conversations.history._recent) == 2

    @pytest.mark.parametrize("turns", [4, 40])
    def test_a_turn_reads_only_new_messages_also_after_a_request_that_became_no_call(self, session, turns, monkeypatch):
        messages = session.talk(*["Well."] * turns)
        session.prompt([*messages, user("Refused.")])
        del session.kept[-1]
        read = []
        monkeypatch.setattr(
            canonical,
            "canonical",
            lambda message, call, form=canonical.canonical: read.append(message) or form(message, call),
        )
        assert session.prompt(messages).kind == "bridged"
        assert len(read) < 10


EXAMPLES = [user("What is 1 + 1?"), {"role": "assistant", "content": "2"}]


class TestContextMessages:
    """Assistant messages that no call sampled: notifications of a program, and examples."""

    def test_it_is_written_into_the_continuation(self, session):
        second = [*session.talk("Hello."), CONTEXT, user("And?")]
        prompt = session.prompt(second)
        assert (prompt.kind, prompt.reason, prompt.parent.call_id) == ("bridged", None, "0")
        assert [*prompt.ids[: prompt.prefix_length]] == session.token_ids(0)
        assert prompt.new_messages == second[2:]
        whole = session.rendering.render(session.decode(second).messages, session.tools)
        assert whole[-(len(prompt.ids) - prompt.prefix_length) + 1 :] == [*prompt.ids[prompt.prefix_length + 1 :]]

    def test_later_calls_continue_the_one_with_the_context(self, session):
        messages = [user("Hi")]
        messages += [session.ask(messages, "Hello.<|im_end|>"), CONTEXT, user("And?")]
        messages += [session.ask(messages, "Well.<|im_end|>"), user("Go on")]
        messages += [session.ask(messages, "Done.<|im_end|>"), CONTEXT, user("And?")]
        session.ask(messages, "Well.<|im_end|>")
        assert [call.kind for call, _ in session.calls] == ["root", "bridged", "bridged", "bridged"]
        for number, (prompt, _) in enumerate(session.calls[1:]):
            assert [*prompt.ids[: prompt.prefix_length]] == session.token_ids(number)

    def test_an_invented_tool_call_is_context_too(self, session):
        reply = session.ask([user("Hi")], THINKING + "<|im_end|>")
        invented = assistant_message("", "", [message_tool_call("made_up", "look", "{}")])
        answer = {"role": "tool", "tool_call_id": "made_up", "content": "It has ended."}
        prompt = session.prompt([user("Hi"), reply, result(reply), invented, answer])
        assert (prompt.kind, prompt.parent.call_id) == ("bridged", "0")

    def test_a_request_that_is_repeated_or_whose_reply_is_dropped_continues_the_same_call(self, session):
        messages = [*session.talk("Hello."), CONTEXT, user("And?")]
        for completion in ("One.<|im_end|>", "Two.<|im_end|>"):
            session.ask(messages, completion)
        assert session.calls[1][0].ids == session.calls[2][0].ids
        prompt = session.prompt([*messages, user("Again.")])
        assert (prompt.kind, prompt.parent.call_id) == ("bridged", "0")

    @named(
        "change",
        {
            "the reply": lambda m: [*m[:3], other(m[3]), m[4]],
            "the message before it": lambda m: [*m[:2], user("Changed"), m[3], m[4]],
            "both": lambda m: [*m[:2], user("Changed"), other(m[3]), m[4]],
            "both, with context": lambda m: [*m[:2], user("More"), other(m[3]), m[4], CONTEXT, user("And?")],
        },
    )
    def test_at_the_place_of_a_reply_there_is_no_context(self, session, change):
        messages = session.talk("One.", "Two.")
        assert session.prompt(messages).kind == "bridged"
        prompt = session.prompt(change(messages))
        assert (prompt.kind, prompt.parent) == ("rendered", None)
        assert "is not that of call 1: " in prompt.reason

    @pytest.mark.parametrize("echo", [same, other], ids=["exact", "changed"])
    def test_a_message_that_moves_along_makes_no_reply_context(self, session, echo):
        history = [user("Hi")]
        history.append(session.ask(history, "Hello.<|im_end|>"))
        for number in range(1, 4):
            question = user(f"Question {number}")
            reply = session.ask([*history, user(f"State {number}"), question], f"Answer {number}.<|im_end|>")
            history += [question, echo(reply)]
        assert [call.kind for call, _ in session.calls] == ["root", "bridged", "rendered", "rendered"]
        assert session.calls[2][0].reason.startswith("message 2 is not that of call 1: ")

    @named(
        "change",
        {
            "a message more before a tool call": lambda m: [*m[:3], user("Remember."), *m[3:]],
            "and the call's text changed": lambda m: [*m[:3], user("Remember."), other(m[3]), *m[4:]],
            "and nothing after it": lambda m: [*m[:3], user("Remember."), other(m[3]), m[4]],
            "a message less": lambda m: [*m[:2], *m[3:]],
            "a turn less": lambda m: [*m[:2], m[5], m[6]],
            "a tool call of another call": lambda m: [*m, changed(tool_calls=[], call_id="1")(m[3]), user("And?")],
            "a reply once more": lambda m: [*m, {**m[5], "content": "Third.\n"}, user("And?")],
        },
    )
    def test_a_reply_at_another_place_is_no_context(self, session, change):
        messages = session.talk(THINKING, THINKING, "Third.")
        assert session.prompt(messages).kind == "bridged"
        call = session.decode(change(messages))
        for message, ours in zip(call.messages, change(messages), strict=True):
            message |= {key: value for key, value in ours.items() if key == "call_id"}
        prompt = session.conversations.prompt(call)
        assert (prompt.kind, prompt.parent) == ("rendered", None)
        assert prompt.reason.startswith("message ")

    def test_a_reply_after_the_newest_call_has_its_place_as_the_reason(self, session):
        messages = session.talk("One.", "Two.")
        prompt = session.prompt([*messages, messages[1], user("And?")])
        assert prompt.reason == "message 5 is the reply of call 0, changed or at another place"

    def test_a_reply_that_was_changed_once_is_never_context(self, session):
        history = [user("Hi")]
        history += [session.ask(history, "Hello.<|im_end|>")]
        session.ask([*history, user("State 1"), user("One")], "Answer 1.<|im_end|>")
        history += [user("One"), {"role": "assistant", "content": "Changed."}]
        for new in ([user("State 2"), user("Two")], [user("State 2")], [user("Two")]):
            session.ask([*history, *new], "Answer.<|im_end|>")
        assert [call.kind for call, _ in session.calls[2:]] == ["rendered"] * 3
        assert session.calls[3][0].reason == "message 3 is the reply of call 1, changed or at another place"

    def test_examples_before_a_changed_reply_stay_examples(self, session):
        messages = [*EXAMPLES, user("What is 2 + 2?")]
        reply = session.ask(messages, "4<|im_end|>")
        session.ask([*messages, {**reply, "content": "Four."}, user("What is 3 + 3?")], "6<|im_end|>")
        assert session.calls[1][0].kind == "rendered"
        assert session.prompt([*EXAMPLES, user("What is 4 + 4?")]).kind == "root"

    def test_a_changed_reply_stays_changed_when_its_request_is_repeated(self, session):
        reply = session.ask([user("Hi")], "Hello.<|im_end|>")
        changed = [user("Hi"), {**reply, "content": "Changed."}, user("Go on")]
        for _ in range(2):
            session.ask(changed, "Well.<|im_end|>")
        assert [call.kind for call, _ in session.calls] == ["root", "rendered", "rendered"]
        assert len({call.reason for call, _ in session.calls[1:]}) == 1


class TestExamples:
    @pytest.mark.parametrize("examples", [EXAMPLES, [user("2 * 1?"), {"role": "assistant", "content": "two"}]])
    def test_the_first_call_of_a_conversation_with_examples_is_a_root(self, session, examples):
        messages = [*EXAMPLES, user("What is 2 + 2?")]
        messages += [session.ask(messages, "4<|im_end|>"), user("What is 3 + 3?")]
        session.ask(messages, "6<|im_end|>")
        assert [call.kind for call, _ in session.calls] == ["root", "bridged"]
        assert session.calls[1][0].prefix_length == len(session.token_ids(0))
        assert session.prompt([*examples, user("What is 4 + 4?")]).kind == "root"

    @named(
        "completion, before, echo",
        {
            "verbatim": (THINKING, [user("One"), user("Two")], same),
            "with the id of its tool call": (THINKING, [user("One"), user("Two")], other),
            "a newline more": ("Hello.", [user("Ho")], changed(content="Hello.\n")),
            "thoughts in front": ("Hello.", [user("Ho")], changed(content="<think>I greet.</think>Hello.")),
            "changed at its place": ("Hello.", [user("Hi")], other),
        },
    )
    def test_a_reply_in_another_conversation_is_no_example(self, session, completion, before, echo):
        reply, answer = session.talk(completion)[1:]
        prompt = session.prompt([*before, echo(reply), answer])
        assert (prompt.kind, prompt.sampled_by) == ("rendered", "0")

    def test_where_nothing_can_be_read_an_assistant_message_may_be_a_reply(self, session):
        session.conversations.history.incomplete = True
        prompt = session.prompt([*EXAMPLES, user("What is 2 + 2?")])
        assert (prompt.kind, prompt.reason) == ("rendered", "message 1 may be the reply of a call that cannot be read")
        assert session.prompt([user("Hi")]).kind == "root"
