"""A session that remembers the last requests as a state machine: it decodes each request, and makes
each prompt, as one that remembers none."""

import json
import zlib
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rolltap.addons.dialects.call import DialectError, Reply, ReplyContext, ToolCall, tool_call_id
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.openai_responses.stored import NeedsStoredState, StoredCall
from rolltap.addons.endpoint.body import KeptTexts, RecentBodies
from rolltap.addons.prompts.conversations import Conversations
from tests.addons.dialects.apis import APIS, CHAT, MESSAGES, RESPONSES, USAGE
from tests.addons.dialects.openai_responses.test_request import SUMMARY
from tests.deep import examples

NUMBERS = st.sampled_from([0, 1, 1, 2, 3])
COMPACTION = {"type": "compaction", "encrypted_content": SUMMARY}
REPLIES = st.builds(
    Reply,
    st.sampled_from(["", "Done.", "Hm.\n"]),
    st.sampled_from(["", "I look."]),
    st.lists(
        st.builds(ToolCall, st.just(""), st.sampled_from(["look", "go"]), st.just('{"a": 1}')),
        max_size=2,
    ),
)


class HashRendering:
    """A rendering of which each message is one token."""

    refusal = None

    def render(self, messages, tools):
        return [
            zlib.crc32(json.dumps([message, tools], sort_keys=True).encode()) & 0xFFFF
            for message in messages
        ]

    def extension(self, prompt_ids, completion_ids, messages, tools):
        return self.render(messages, tools) if messages else None


def result(api, call_id):
    """Return the element of a conversation with the result of a call."""
    if api is CHAT:
        return {"role": "tool", "tool_call_id": call_id, "content": "x"}
    if api is RESPONSES:
        return {"type": "function_call_output", "call_id": call_id, "output": "x"}
    if api is MESSAGES:
        return {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "x"}],
        }
    response = {"id": call_id, "name": "look", "response": {"output": "x"}}
    return {"role": "user", "parts": [{"functionResponse": response}]}


class Recorder:
    """A session of which the requests and replies are those of the test. With `bodies`, it
    remembers the last ones."""

    def __init__(self, bodies=None):
        self.bodies = bodies
        self.conversations = Conversations(HashRendering())
        self.stored = {}
        self.running = {}
        """Id of a call -> its prompt."""

    def decode(self, api, body, target):
        """Return the decoded request, or the words of its refusal."""
        try:
            try:
                return self._decode(api, body, target)
            except NeedsStoredState as named:
                return named.complete(self.stored.get)
        except DialectError as refusal:
            return str(refusal)

    def _decode(self, api, body, target):
        if self.bodies is None:
            self.conversations.history._recent.clear()
            return api.dialect.decode(parse_object(body), target)
        decoded = self.bodies.decode(api.dialect, body, target)
        if target == api.target:
            self.bodies.keep(decoded)
        return decoded.model_call

    def prompt(self, call_id, model_call):
        """Return all that a row has of a call's prompt."""
        prompt = self.running[call_id] = self.conversations.prompt(model_call)
        found = (
            [*prompt.ids],
            prompt.digest(),
            prompt.kind,
            prompt.reason,
            prompt.sampled_by,
            prompt.opening,
        )
        return (
            *found,
            prompt.prefix_length,
            prompt.parent and prompt.parent.call_id,
            prompt.new_messages,
        )

    def complete(self, call_id, api, reply):
        """Record the reply to a call."""
        prompt = self.running.pop(call_id)
        message = reply.to_message()
        self.conversations.add(call_id, prompt, [1, 2], message)
        parent = self.stored.get(prompt.parent.call_id) if prompt.parent else None
        if api is RESPONSES:
            self.stored[call_id] = StoredCall(
                call_id=call_id,
                parent=parent,
                messages=prompt.model_call.messages if parent is None else prompt.new_messages,
                reply=message,
                asked=prompt.model_call.requested_sampling,
            )


class SessionMemory(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.plain = Recorder()
        self.remembering = Recorder(RecentBodies(KeptTexts()))
        self.talks = []
        """(API, elements) of the conversations, also of those that are refused."""
        self.running = {}
        """Id of a call that runs -> (API, elements, its context)."""
        self.completed, self.calling = [], []
        """Ids of the completed calls of the API that can name them, and of those among them that
        call tools."""
        self.count = 0

    def draw_talk(self, data):
        return data.draw(st.sampled_from(self.talks[::-1]))

    @initialize(number=NUMBERS, data=st.data())
    def first(self, number, data):
        self.begin(number, data)

    @precondition(lambda self: len(self.talks) < 5)
    @rule(number=NUMBERS, data=st.data())
    def begin(self, number, data):
        api = APIS[number]
        self.talks.append((api, data.draw(api.conversations)))
        self.ask(*self.talks[-1], data)

    @precondition(lambda self: self.calling)
    @rule(data=st.data())
    def begin_after_a_summary(self, data):
        """Send the result of a tool call that is before it in another conversation, or in none."""
        answered = data.draw(st.sampled_from(self.calling))
        elements = [COMPACTION, result(RESPONSES, tool_call_id(answered, 0))]
        self.talks.append((RESPONSES, elements))
        for previous in ("", answered, ""):
            self.ask(RESPONSES, elements, data, previous)

    @rule(data=st.data())
    def repeat(self, data):
        self.ask(*self.draw_talk(data), data)

    @rule(data=st.data(), cut=st.integers(0, 2))
    def go_on(self, data, cut):
        api, elements = self.draw_talk(data)
        (user, *_) = api.talk[api.dialect.CONVERSATION]
        more = data.draw(
            st.lists(st.sampled_from([user, result(api, "c1"), *api.elements]), max_size=2)
        )
        self.talks.append((api, [*elements[: len(elements) - cut], *more, user]))
        self.ask(*self.talks[-1], data)

    @rule(data=st.data(), reply=REPLIES)
    def take_a_turn(self, data, reply):
        self.repeat(data)
        if self.running:
            self.complete(data, reply)
            self.ask(*self.talks[data.draw(st.integers(-2, -1))], data)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reply=REPLIES)
    def complete(self, data, reply):
        """Complete a call. Programs send its reply as it is, and changed."""
        call_id = data.draw(st.sampled_from([*self.running][::-1]))
        api, elements, context = self.running.pop(call_id)
        reply.issue(call_id)
        for recorder in (self.plain, self.remembering):
            recorder.complete(call_id, api, reply)
        if api is RESPONSES:
            self.completed.append(call_id)
            self.calling += [call_id] if reply.tool_calls else []
        calls = [replace(call, arguments='{"a": true}') for call in reply.tool_calls]
        changed = replace(reply, tool_calls=calls, content=reply.content if calls else "Changed.")
        key = api.dialect.CONVERSATION
        (user, *_) = api.talk[key]
        for shown in (changed, reply):
            _, *echo = api.echoing(json.loads(api.dialect.encode_reply(context, shown, USAGE)))[key]
            results = [result(api, call.id) for call in calls]
            self.talks.append((api, [*elements, *echo, *results, user]))

    def ask(self, api, elements, data, previous=None):
        """Send a request with a conversation to both sessions, after that of the call `previous`,
        if any."""
        request = {**api.request, api.dialect.CONVERSATION: elements}
        if not data.draw(st.integers(0, 3)):
            del request["tools"]
        target = api.target
        if previous is None:
            target = data.draw(
                st.sampled_from([api.target, api.target, api.count_target or api.target])
            )
            previous = data.draw(st.sampled_from(["", *self.completed]))
        if previous and api is RESPONSES:
            request["previous_response_id"] = f"resp_{previous}"
        body = json.dumps(request).encode()
        expected = self.plain.decode(api, body, target)
        found = self.remembering.decode(api, body, target)
        assert repr(found) == repr(expected)
        if isinstance(expected, str) or target != api.target:
            return
        call_id = f"a{self.count}"
        self.count += 1
        self.running[call_id] = api, elements, ReplyContext(call_id, 5, target, expected)
        assert self.remembering.prompt(call_id, found) == self.plain.prompt(call_id, expected)


TestSessionMemory = SessionMemory.TestCase
TestSessionMemory.settings = examples(1000, stateful_step_count=15)
