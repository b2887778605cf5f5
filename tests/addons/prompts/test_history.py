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
from tests.addons.harness import user
from tests.addons.prompts.talks import (
    COMMAND,
    CONTEXT,
    END,
    LITELLM,
    THINKING,
    Session,
    answer,
    arguments,
    changed,
    check_rendered,
    named,
    other,
    result,
    said,
    same,
)

GO_ON = user("Go on")
AND = user("And?")


def without_reasoning(reply):
    shown = {**reply}
    shown.pop("reasoning_content", None)
    return shown


def with_another_id(reply):
    return {**reply, "tool_calls": [{**reply["tool_calls"][0], "id": "call_other"}]}


def with_calls_twice(reply):
    return {**reply, "tool_calls": reply["tool_calls"] * 2}


class TestKind:
    def test_the_first_call_of_a_session_is_a_root(self, session):
        prompt = session.prompt([user("Hi")])
        assert (prompt.kind, prompt.reason) == ("root", "no earlier call")
        assert (prompt.parent, prompt.prefix_length) == (None, 0)
        assert [*prompt.ids] == session.rendering.render([user("Hi")], [TOOL])
        assert prompt.new_messages == [user("Hi")]

    @named(
        "echo",
        {
            "verbatim": same,
            "as parts": changed(
                content=[{"type": "text", "text": "S"}, {"type": "text", "text": "o:"}]
            ),
            "without reasoning": without_reasoning,
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
        reply = session.say([user("Hi")], THINKING)
        prompt = session.prompt([user("Hi"), echo(reply), result(reply)])
        session.check_continued(prompt, 0)
        assert prompt.new_messages == [{**result(reply), "name": "look"}]

    @named(
        "echo",
        {
            "other text": changed(content="So!"),
            "other thoughts": changed(content="<think>\nI hear.\n</think>\n\nSo:"),
            "no thoughts": changed(content="<think></think>So:"),
            "thoughts without an end": changed(content="<think>I look.So:"),
            "two newlines more": changed(content="So:\n\n"),
            "a blank before": changed(content=" So:"),
            "another id": with_another_id,
            "twice": with_calls_twice,
            "no calls": changed(tool_calls=[]),
            "other arguments": arguments('{"at": "cafe", "deep": {"x": 1.0, "y": [true, null]}}'),
            "1 for true": arguments('{"at": "café", "deep": {"x": 1.0, "y": [1, null]}}'),
            "no arguments": arguments("not JSON"),
        },
    )
    def test_an_altered_reply_is_not_continued(self, session, echo):
        reply = session.say([user("Hi")], THINKING)
        assert session.prompt([user("Hi"), reply, result(reply)]).kind == "bridged"
        altered = echo(reply)
        messages = [user("Hi"), altered, answer(altered)]
        prompt = session.prompt(messages)
        check_rendered(prompt, "message 1 is not that of call 0: ")
        assert [*prompt.ids] == session.full_prompt(messages)

    def test_an_altered_user_message_is_not_continued(self, session):
        reply = session.say([user("Hi")], "Hello.")
        assert session.prompt([user("Hi"), reply, GO_ON]).kind == "bridged"
        reason = (
            'message 0 is not that of call 0: \'{"content": "Hi!", "role": "user"}\' '
            'where it had \'{"content": "Hi", "role": "user"}\''
        )
        check_rendered(session.prompt([user("Hi!"), reply, GO_ON]), reason)

    def test_a_repeated_conversation_is_another_root(self, session):
        session.say([user("Hi")], "Hello.")
        prompt = session.prompt([user("Hi")])
        assert (prompt.kind, prompt.reason) == ("root", "it ends within the conversation of call 0")

    def test_other_tools_are_another_conversation(self, session):
        reply = session.say([user("Hi")], "Hello.")
        session.tools = []
        prompt = session.prompt([user("Hi"), reply, GO_ON])
        check_rendered(prompt, "its tools are not those of any earlier call")


class MessagesSession(Session):
    """A session whose program speaks Anthropic's API."""

    user_id = "me"

    def decode(self, messages):
        request = {
            "max_tokens": 9,
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "messages": messages,
            "metadata": {"user_id": self.user_id},
        }
        return routes.MESSAGES.decode(parse_object(json.dumps(request).encode()), "/v1/messages")


class TestEchoRule:
    """A command whose echo lacks its `cd FOLDER && `, as Claude Code sends it."""

    @pytest.mark.parametrize(
        ("user_id", "kind"),
        [('{"device_id": "d", "session_id": "s"}', "bridged"), ("me", "rendered")],
        ids=["Claude Code", "another program"],
    )
    def test_only_claude_code_may_leave_the_folder_out(self, rendering, encode, user_id, kind):
        session = MessagesSession(rendering, encode)
        session.user_id = user_id
        call_id = session.ask([user("Hi")], COMMAND)["tool_calls"][0]["id"]
        use = {"type": "tool_use", "id": call_id, "name": "look", "input": {"command": "ls"}}
        seen = {"type": "tool_result", "tool_use_id": call_id, "content": "Nothing."}
        assert session.prompt([user("Hi"), said([use]), user([seen])]).kind == kind

    def test_calls_under_another_rule_are_not_continued(self, session):
        session.add([user("Hi")], said("A"))
        again = session.decode([user("Hi"), said("A"), GO_ON])
        assert session.conversations.prompt(again).parent.call_id == "0"
        again.echo_rule = normal_arguments
        assert session.conversations.prompt(again).parent is None


class TestChangedEchoes:
    """Rules that hold for every program (`issued_forms`)."""

    WORDLESS = THINKING.replace("So:", "")

    @named(
        "completion, content",
        {
            "thoughts": (THINKING, "<think>\nI look.\n</think>\n\nSo:"),
            "thoughts and a newline": (THINKING, "<think>I look.</think>So:\n"),
            "only thoughts": (WORDLESS, "<think>\nI look.\n</think>"),
            "LiteLLM": (WORDLESS, LITELLM),
            "newline more": (THINKING, "So:\n"),
            "newline less": ("Done.\n", "Done."),
            "blanks": (THINKING.replace("So:", " "), ""),
        },
    )
    def test_an_echo_with_a_known_change_is_continued(self, session, completion, content):
        reply = session.say([user("Hi")], completion)
        echo = {**without_reasoning(reply), "content": content}
        messages = [user("Hi"), echo, answer(reply)]
        session.say(messages, "Well.")
        session.check_continued(session.calls[1][0], 0)
        assert session.prompt([*messages, said("Well."), GO_ON]).parent.call_id == "1"

    @pytest.mark.parametrize("echo", ["Done.", "<think>\nI look.\n</think>\n\nDone."])
    def test_a_newline_at_the_end_of_a_reply_may_be_missing(self, session, echo):
        session.add([user("Hi")], assistant_message("Done.\n", "I look.", []))
        prompt = session.prompt([user("Hi"), said(echo), GO_ON])
        assert (prompt.kind, prompt.parent.call_id) == ("bridged", "0")

    def test_replies_that_differ_by_a_newline_stay_apart(self, session):
        replies = [said("Hello."), said("Hello.\n")]
        for reply in replies:
            session.add([user("Hi")], reply)
        for number, reply in enumerate(replies):
            assert session.prompt([user("Hi"), reply, GO_ON]).parent.call_id == str(number)


class TestEqualReplies:
    """Two calls with the same conversation and the same visible reply."""

    @pytest.fixture
    def replies(self, session):
        found = []
        for thought in ("One", "Two"):
            found.append(session.say([user("Hi")], f"<think>\n{thought}\n</think>\n\nHello."))
        return found

    @pytest.mark.parametrize("shown", [False, True], ids=["sent back", "shown in the text"])
    def test_their_reasoning_selects_the_call(self, session, replies, shown):
        for number, reply in enumerate(replies):
            if shown:
                reply = said(f"<think>\n{reply['reasoning_content']}\n</think>\n\nHello.")
            session.check_continued(session.prompt([user("Hi"), reply, GO_ON]), number)

    @pytest.mark.parametrize("context", [[], [CONTEXT, AND]], ids=["at the end", "before context"])
    @pytest.mark.parametrize("reasoning", ["", "Three"], ids=["none", "of neither"])
    def test_without_matching_reasoning_they_are_ambiguous(
        self, session, replies, reasoning, context
    ):
        echo = {**replies[0], "reasoning_content": reasoning}
        prompt = session.prompt([user("Hi"), echo, GO_ON, *context])
        check_rendered(prompt, "2 earlier calls fit equally well up to message 2")

    def test_calls_of_equal_tokens_are_not_ambiguous_and_the_ids_of_one_are_joined(self, session):
        for _ in range(5):
            reply = session.say([user("Hi")], "Hello.")
        joins = mock.patch.object(Turn, "prompt_ids", autospec=True, side_effect=Turn.prompt_ids)
        with joins as joined:
            prompt = session.prompt([user("Hi"), reply, GO_ON])
        assert (prompt.kind, joined.call_count) == ("bridged", 1)

    def test_calls_with_equal_text_and_different_tokens_are_ambiguous(self, session, encode):
        whole = encode("tool" + END)
        letters = []
        for letter in "tool":
            letters += encode(letter)
        assert whole[:-1] != letters
        reply = session.ask([user("Hi")], whole)
        assert session.ask([user("Hi")], letters + whole[-1:]) == reply
        assert session.prompt([user("Hi"), reply, GO_ON]).kind == "rendered"


def test_a_long_chain_of_turns_returns_its_full_prompt():
    turn = None
    for number in range(0, 20_000, 2):
        turn = Turn(str(number), turn, number, array("i", [number]), array("i", [number + 1]))
    assert [*turn.prompt_ids()] == list(range(19_999))


def test_equal_arguments_of_another_type_in_a_later_request_are_another_conversation(session):
    called = message_tool_call("c1", "look", {"deep": True})
    example = [user("Hi"), assistant_message("", "", [called]), GO_ON]
    session.conversations.prompt(ModelCall("m", example, session.tools))
    prompt = session.conversations.prompt(ModelCall("m", example, session.tools))
    session.conversations.add("0", prompt, session.encode("A." + END), said("A."))
    other = message_tool_call("c1", "look", {"deep": 1})
    for call, parent in [(called, "0"), (other, None), (called, "0")]:
        messages = [dict(example[0]), assistant_message("", "", [call]), dict(example[2])]
        messages += [said("A."), GO_ON]
        prompt = session.conversations.prompt(ModelCall("m", messages, session.tools))
        assert (prompt.parent and prompt.parent.call_id) == parent


def recent_requests(session):
    """Return the requests whose messages the history of a session holds."""
    return [*session.conversations.history._recent.values()]


def nodes_of(history):
    """Return the prefixes that a history holds."""
    return [*history._nodes.values()]


class TestMemory:
    @named("end, kind", {"continued": ("", "bridged"), "never continued": (END + "x", "rendered")})
    def test_a_session_keeps_each_token_once(self, session, end, kind):
        messages = [user("Hi")]
        for number in range(30):
            reply = session.ask(messages, f"I say {number}.{end or END}")
            messages += [reply, user(f"Go on, {number}. " * 20)]
        assert session.prompt(messages).kind == kind
        turns = session.conversations.history.turns.values()
        kept = sum(len(turn.tail_ids) + len(turn.completion_ids) for turn in turns)
        assert kept <= 1.1 * len(session.token_ids(29))
        for number, turn in enumerate(turns):
            assert turn.tail_ids.itemsize == 4
            assert turn.prompt_ids() == session.calls[number][0].ids

    def test_long_messages_are_not_kept(self, session):
        session.say([user("a" * 10_000)], "Hello.")
        prompt = session.prompt([user("a" * 9_999 + "b")])
        session.prompt([user("Hi"), user("b" * 10_000)])
        assert prompt.reason == "message 0 is not that of call 0: it differs after 400 characters"
        kept = nodes_of(session.conversations.history)
        assert sum(len(node.excerpt) for node in kept) < 500
        assert len(recent_requests(session)) == 2
        del prompt
        session.kept.clear()
        session.calls.clear()
        assert recent_requests(session) == []

    def test_leading_system_messages_are_not_kept(self, session):
        system = {"role": "system", "content": "a" * 10_000}
        for text in ("Hi", "Ho"):
            session.say([system, user(text)], "Hello.")
        (recent,) = recent_requests(session)
        assert recent.messages == [user("Ho")]

    def test_requests_that_became_no_call_leave_nothing(self):
        history = History()
        for number in range(100):
            tool = {"type": "function", "function": {"name": f"f{number}"}}
            history.read(ModelCall("m", [user("Hi")], [tool]))
        assert nodes_of(history) == []

    def test_of_a_conversation_the_last_two_requests_are_kept(self, session):
        session.talk(*["Well."] * 9)
        assert len(recent_requests(session)) == 2

    @pytest.mark.parametrize("turns", [4, 40])
    def test_a_turn_reads_only_new_messages_also_after_a_request_that_became_no_call(
        self, session, turns
    ):
        messages = session.talk(*["Well."] * turns)
        session.prompt([*messages, user("Refused.")])
        del session.kept[-1]
        with mock.patch.object(canonical, "canonical", wraps=canonical.canonical) as read:
            assert session.prompt(messages).kind == "bridged"
        assert read.call_count < 10


EXAMPLES = [user("What is 1 + 1?"), said("2")]


def rearranged(messages, places):
    """Return the messages at places: `~3` is message 3 with another text, others are themselves."""
    found = []
    for place in places:
        if not isinstance(place, int):
            found.append(place)
        elif place < 0:
            found.append(other(messages[~place]))
        else:
            found.append(messages[place])
    return found


class TestContextMessages:
    """Assistant messages that no call sampled: notifications of a program, and examples."""

    def test_it_is_written_into_the_continuation(self, session):
        second = [*session.talk("Hello."), CONTEXT, AND]
        prompt = session.prompt(second)
        session.check_continued(prompt, 0)
        assert prompt.new_messages == second[2:]
        extension = [*prompt.ids[prompt.prefix_length + 1 :]]
        assert session.full_prompt(second)[-len(extension) :] == extension

    def test_later_calls_continue_the_one_with_the_context(self, session):
        messages = [user("Hi")]
        messages += [session.say(messages, "Hello."), CONTEXT, AND]
        messages += [session.say(messages, "Well."), GO_ON]
        messages += [session.say(messages, "Done."), CONTEXT, AND]
        session.say(messages, "Well.")
        for number, (prompt, _) in enumerate(session.calls[1:]):
            session.check_continued(prompt, number)

    def test_an_invented_tool_call_is_context_too(self, session):
        reply = session.say([user("Hi")], THINKING)
        invented = assistant_message("", "", [message_tool_call("made_up", "look", "{}")])
        prompt = session.prompt([user("Hi"), reply, result(reply), invented, result(invented)])
        session.check_continued(prompt, 0)

    def test_a_request_that_is_repeated_or_whose_reply_is_dropped_continues_the_same_call(
        self, session
    ):
        messages = [*session.talk("Hello."), CONTEXT, AND]
        for text in ("One.", "Two."):
            session.say(messages, text)
        assert session.calls[1][0].ids == session.calls[2][0].ids
        session.check_continued(session.prompt([*messages, user("Again.")]), 0)

    @named(
        "places",
        {
            "the reply": [0, 1, 2, ~3, 4],
            "the message before it": [0, 1, user("Changed"), 3, 4],
            "both": [0, 1, user("Changed"), ~3, 4],
            "both, with context": [0, 1, user("More"), ~3, 4, CONTEXT, AND],
        },
    )
    def test_at_the_place_of_a_reply_there_is_no_context(self, session, places):
        messages = session.talk("One.", "Two.")
        assert session.prompt(messages).kind == "bridged"
        prompt = session.prompt(rearranged(messages, places))
        check_rendered(prompt, "message ")
        assert "is not that of call 1: " in prompt.reason

    @pytest.mark.parametrize("echo", [same, other], ids=["exact", "changed"])
    def test_a_message_that_moves_along_makes_no_reply_context(self, session, echo):
        history = [user("Hi")]
        history.append(session.say(history, "Hello."))
        for number in range(1, 4):
            question = user(f"Question {number}")
            reply = session.say([*history, user(f"State {number}"), question], f"Answer {number}.")
            history += [question, echo(reply)]
        assert session.kinds() == ["root", "bridged", "rendered", "rendered"]
        check_rendered(session.calls[2][0], "message 2 is not that of call 1: ")

    @named(
        "places",
        {
            "a message more before a tool call": [0, 1, 2, user("Remember."), 3, 4, 5, 6],
            "and the call's text changed": [0, 1, 2, user("Remember."), ~3, 4, 5, 6],
            "and nothing after it": [0, 1, 2, user("Remember."), ~3, 4],
            "a message less": [0, 1, 3, 4, 5, 6],
            "a turn less": [0, 1, 5, 6],
            "a reply once more": [0, 1, 2, 3, 4, 5, 6, said("Third.\n"), AND],
        },
    )
    def test_a_reply_at_another_place_is_no_context(self, session, places):
        messages = session.talk(THINKING, THINKING, "Third.")
        assert session.prompt(messages).kind == "bridged"
        check_rendered(session.prompt(rearranged(messages, places)), "message ")

    def test_a_message_that_names_an_earlier_call_is_no_context(self, session):
        """Some APIs give a reply an opaque field that names its call."""
        call = session.decode([*session.talk(THINKING, "Two."), said("Changed."), AND])
        assert session.conversations.prompt(call).kind == "bridged"
        call.messages[5]["call_id"] = "1"
        check_rendered(session.conversations.prompt(call), "message 5 is the reply of call 1")

    def test_a_reply_after_the_newest_call_has_its_place_as_the_reason(self, session):
        messages = session.talk("One.", "Two.")
        prompt = session.prompt([*messages, messages[1], AND])
        assert prompt.reason == "message 5 is the reply of call 0, changed or at another place"

    def test_a_reply_that_was_changed_once_is_never_context(self, session):
        history = [user("Hi")]
        history += [session.say(history, "Hello.")]
        session.say([*history, user("State 1"), user("One")], "Answer 1.")
        history += [user("One"), said("Changed.")]
        for new in ([user("State 2"), user("Two")], [user("State 2")], [user("Two")]):
            session.say([*history, *new], "Answer.")
        assert session.kinds()[2:] == ["rendered"] * 3
        reason = "message 3 is the reply of call 1, changed or at another place"
        assert session.calls[3][0].reason == reason

    def test_examples_before_a_changed_reply_stay_examples(self, session):
        messages = [*EXAMPLES, user("What is 2 + 2?")]
        session.say(messages, "4")
        session.say([*messages, said("Four."), user("What is 3 + 3?")], "6")
        assert session.kinds() == ["root", "rendered"]
        assert session.prompt([*EXAMPLES, user("What is 4 + 4?")]).kind == "root"

    def test_a_changed_reply_stays_changed_when_its_request_is_repeated(self, session):
        session.say([user("Hi")], "Hello.")
        for _ in range(2):
            session.say([user("Hi"), said("Changed."), GO_ON], "Well.")
        assert session.kinds() == ["root", "rendered", "rendered"]
        assert session.calls[1][0].reason == session.calls[2][0].reason


class TestExamples:
    @pytest.mark.parametrize("examples", [EXAMPLES, [user("2 * 1?"), said("two")]])
    def test_the_first_call_of_a_conversation_with_examples_is_a_root(self, session, examples):
        messages = [*EXAMPLES, user("What is 2 + 2?")]
        messages += [session.say(messages, "4"), user("What is 3 + 3?")]
        session.say(messages, "6")
        assert session.kinds() == ["root", "bridged"]
        session.check_continued(session.calls[1][0], 0)
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
        _, reply, following = session.talk(completion)
        prompt = session.prompt([*before, echo(reply), following])
        assert (prompt.kind, prompt.sampled_by) == ("rendered", "0")

    def test_where_nothing_can_be_read_an_assistant_message_may_be_a_reply(self, session):
        session.conversations.history.incomplete = True
        prompt = session.prompt([*EXAMPLES, user("What is 2 + 2?")])
        check_rendered(prompt, "message 1 may be the reply of a call that cannot be read")
        assert session.prompt([user("Hi")]).kind == "root"
