import json
from array import array
from unittest import mock

import pytest

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import ModelCall, assistant_message, message_tool_call
from rolltap.addons.dialects.claude_code import normal_arguments
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.prompts import canonical
from rolltap.addons.prompts.history import History, Turn
from tests.addons.dialects.test_openai_chat import TOOL
from tests.addons.prompts.talks import (
    COMMAND,
    CONTEXT,
    LITELLM,
    THINKING,
    arguments,
    changed,
    named,
    other,
    result,
    same,
    user,
)


class TestKind:
    def test_the_first_call_of_a_session_is_a_root(self, session):
        prompt = session.prompt([user("Hi")])
        assert (prompt.kind, prompt.reason, prompt.parent, prompt.prefix_length) == (
            "root",
            "no earlier call",
            None,
            0,
        )
        assert [*prompt.ids] == session.rendering.render([user("Hi")], [TOOL])
        assert prompt.new_messages == [user("Hi")]

    @named(
        "echo",
        {
            "verbatim": same,
            "as parts": changed(
                content=[{"type": "text", "text": "S"}, {"type": "text", "text": "o:"}]
            ),
            "without reasoning": lambda reply: {
                key: reply[key] for key in reply if key != "reasoning_content"
            },
            "with other reasoning": changed(reasoning_content="Something else."),
            "with more fields": changed(refusal=None, annotations=[], name="me"),
            "other spaces": arguments('{"at":"café","deep":{"x":1.0,"y":[true,null]}}'),
            "another key order": arguments('{"deep": {"y": [true, null], "x": 1.0}, "at": "café"}'),
            "other escapes": arguments(
                '{\n  "at": "caf\\u00E9",\n  "deep": {"x": 1.0, "y": [true, null]}\n}'
            ),
            "numbers as JavaScript writes them": arguments(
                '{"at":"café","deep":{"x":1,"y":[true,null]}}'
            ),
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
            "another id": lambda reply: {
                **reply,
                "tool_calls": [{**reply["tool_calls"][0], "id": "call_other"}],
            },
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
        messages = [
            user("Hi"),
            altered,
            result(altered) if altered["tool_calls"] else user("Go on"),
        ]
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

    def test_other_tools_are_another_conversation(self, session):
        reply = session.ask([user("Hi")], "Hello.<|im_end|>")
        session.tools = []
        prompt = session.prompt([user("Hi"), reply, user("Go on")])
        assert (prompt.kind, prompt.reason) == (
            "rendered",
            "its tools are not those of any earlier call",
        )


class TestEchoRule:
    """A command whose echo lacks its `cd FOLDER && `, as Claude Code sends it."""

    @pytest.mark.parametrize(
        ("user_id", "kind"),
        [('{"device_id": "d", "session_id": "s"}', "bridged"), ("me", "rendered")],
        ids=["Claude Code", "another program"],
    )
    def test_only_claude_code_may_leave_the_folder_out(self, session, monkeypatch, user_id, kind):
        def decode(messages):
            tool = {"name": "look", "input_schema": {"type": "object"}}
            request = {
                "max_tokens": 9,
                "tools": [tool],
                "messages": messages,
                "metadata": {"user_id": user_id},
            }
            return routes.MESSAGES.decode(
                parse_object(json.dumps(request).encode()), "/v1/messages"
            )

        monkeypatch.setattr(session, "decode", decode)
        call_id = session.ask([user("Hi")], COMMAND)["tool_calls"][0]["id"]
        use = {"type": "tool_use", "id": call_id, "name": "look", "input": {"command": "ls"}}
        answer = {"type": "tool_result", "tool_use_id": call_id, "content": "Nothing."}
        echo = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]
        assert session.prompt([user("Hi"), *echo]).kind == kind

    def test_calls_under_another_rule_are_not_continued(self, session):
        call = session.decode([user("Hi")])
        session.conversations.add(
            "0", session.conversations.prompt(call), [], {"role": "assistant", "content": "A"}
        )
        again = session.decode([user("Hi"), {"role": "assistant", "content": "A"}, user("Go on")])
        assert session.conversations.prompt(again).parent.call_id == "0"
        again.echo_rule = normal_arguments
        assert session.conversations.prompt(again).parent is None


class TestChangedEchoes:
    """Rules that hold for every program (`issued_forms`)."""

    @named(
        "completion, echo",
        {
            "thoughts": (THINKING, changed(content="<think>\nI look.\n</think>\n\nSo:")),
            "thoughts and a newline": (THINKING, changed(content="<think>I look.</think>So:\n")),
            "only thoughts": (
                THINKING.replace("So:", ""),
                changed(content="<think>\nI look.\n</think>"),
            ),
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
        [
            "<think>\nI hear.\n</think>\n\nSo:",
            "<think></think>So:",
            "So:\n\n",
            " So:",
            "<think>I look.So:",
        ],
    )
    def test_other_changes_are_not(self, session, content):
        reply = session.ask([user("Hi")], THINKING + "<|im_end|>")
        prompt = session.prompt([user("Hi"), {**reply, "content": content}, result(reply)])
        assert (prompt.kind, prompt.parent) == ("rendered", None)

    def test_replies_that_differ_by_a_newline_stay_apart(self, session):
        replies = [{"role": "assistant", "content": text} for text in ("Hello.", "Hello.\n")]
        for number, reply in enumerate(replies):
            prompt = session.prompt([user("Hi")])
            session.conversations.add(
                str(number), prompt, session.encode("Hello.<|im_end|>"), reply
            )
        for number, reply in enumerate(replies):
            assert session.prompt([user("Hi"), reply, user("Go on")]).parent.call_id == str(number)


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

    @pytest.mark.parametrize(
        "context", [[], [CONTEXT, user("And?")]], ids=["at the end", "before context"]
    )
    @pytest.mark.parametrize("reasoning", ["", "Three"], ids=["none", "of neither"])
    def test_without_matching_reasoning_they_are_ambiguous(
        self, session, replies, reasoning, context
    ):
        prompt = session.prompt(
            [user("Hi"), {**replies[0], "reasoning_content": reasoning}, user("Go on"), *context]
        )
        assert (prompt.kind, prompt.reason) == (
            "rendered",
            "2 earlier calls fit equally well up to message 2",
        )

    def test_calls_with_equal_tokens_are_not_ambiguous(self, session):
        replies = [session.ask([user("Hi")], "Hello.<|im_end|>") for _ in range(2)]
        assert session.prompt([user("Hi"), replies[1], user("Go on")]).kind == "bridged"

    def test_of_many_calls_with_equal_tokens_the_ids_of_one_prompt_are_joined(self, session):
        replies = [session.ask([user("Hi")], "Hello.<|im_end|>") for _ in range(5)]
        with mock.patch.object(
            Turn, "prompt_ids", autospec=True, side_effect=Turn.prompt_ids
        ) as joined:
            prompt = session.prompt([user("Hi"), replies[0], user("Go on")])
        assert (prompt.kind, joined.call_count) == ("bridged", 1)

    def test_calls_with_equal_text_and_different_tokens_are_ambiguous(self, session, encode):
        whole, letters = encode("tool<|im_end|>"), [i for letter in "tool" for i in encode(letter)]
        assert whole[:-1] != letters
        replies = [session.ask([user("Hi")], ids) for ids in (whole, letters + whole[-1:])]
        assert replies[0] == replies[1]
        assert session.prompt([user("Hi"), replies[0], user("Go on")]).kind == "rendered"


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
    session.conversations.add(
        "0", prompt, session.encode("A.<|im_end|>"), assistant_message("A.", "", [])
    )
    other = message_tool_call("c1", "look", {"deep": 1})
    for call, parent in [(called, "0"), (other, None), (called, "0")]:
        messages = [dict(example[0]), assistant_message("", "", [call]), dict(example[2])]
        messages += [assistant_message("A.", "", []), user("Go on")]
        prompt = session.conversations.prompt(ModelCall("m", messages, session.tools))
        assert (prompt.parent and prompt.parent.call_id) == parent


class TestMemory:
    @pytest.mark.parametrize(
        "end", ["<|im_end|>", "<|im_end|>And more"], ids=["continued", "never continued"]
    )
    def test_a_session_keeps_each_token_once(self, session, end):
        messages = [user("Hi")]
        for number in range(30):
            messages += [
                session.ask(messages, f"I say {number}.{end}"),
                user(f"Go on, {number}. " * 20),
            ]
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
    def test_a_turn_reads_only_new_messages_also_after_a_request_that_became_no_call(
        self, session, turns, monkeypatch
    ):
        messages = session.talk(*["Well."] * turns)
        session.prompt([*messages, user("Refused.")])
        del session.kept[-1]
        read = []
        monkeypatch.setattr(
            canonical,
            "canonical",
            lambda message, call, form=canonical.canonical: (
                read.append(message) or form(message, call)
            ),
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
        assert whole[-(len(prompt.ids) - prompt.prefix_length) + 1 :] == [
            *prompt.ids[prompt.prefix_length + 1 :]
        ]

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

    def test_a_request_that_is_repeated_or_whose_reply_is_dropped_continues_the_same_call(
        self, session
    ):
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
            "both, with context": lambda m: [
                *m[:2],
                user("More"),
                other(m[3]),
                m[4],
                CONTEXT,
                user("And?"),
            ],
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
            reply = session.ask(
                [*history, user(f"State {number}"), question], f"Answer {number}.<|im_end|>"
            )
            history += [question, echo(reply)]
        assert [call.kind for call, _ in session.calls] == [
            "root",
            "bridged",
            "rendered",
            "rendered",
        ]
        assert session.calls[2][0].reason.startswith("message 2 is not that of call 1: ")

    @named(
        "change",
        {
            "a message more before a tool call": lambda m: [*m[:3], user("Remember."), *m[3:]],
            "and the call's text changed": lambda m: [
                *m[:3],
                user("Remember."),
                other(m[3]),
                *m[4:],
            ],
            "and nothing after it": lambda m: [*m[:3], user("Remember."), other(m[3]), m[4]],
            "a message less": lambda m: [*m[:2], *m[3:]],
            "a turn less": lambda m: [*m[:2], m[5], m[6]],
            "a tool call of another call": lambda m: [
                *m,
                changed(tool_calls=[], call_id="1")(m[3]),
                user("And?"),
            ],
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
        assert (
            session.calls[3][0].reason
            == "message 3 is the reply of call 1, changed or at another place"
        )

    def test_examples_before_a_changed_reply_stay_examples(self, session):
        messages = [*EXAMPLES, user("What is 2 + 2?")]
        reply = session.ask(messages, "4<|im_end|>")
        session.ask(
            [*messages, {**reply, "content": "Four."}, user("What is 3 + 3?")], "6<|im_end|>"
        )
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
    @pytest.mark.parametrize(
        "examples", [EXAMPLES, [user("2 * 1?"), {"role": "assistant", "content": "two"}]]
    )
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
            "thoughts in front": (
                "Hello.",
                [user("Ho")],
                changed(content="<think>I greet.</think>Hello."),
            ),
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
        assert (prompt.kind, prompt.reason) == (
            "rendered",
            "message 1 may be the reply of a call that cannot be read",
        )
        assert session.prompt([user("Hi")]).kind == "root"
