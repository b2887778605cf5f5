"""Conversations of a session, whose calls are answered with what a test provides."""

import json

import pytest

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.prompts.conversations import Conversations
from tests.addons.dialects.test_openai_chat import TOOL
from tests.addons.harness import user

ARGUMENTS = '{"at":  "caf\\u00e9", "deep": {"x": 1.0, "y": [true, null]}}'
SPACED = '{"at":"caf\u00e9",  "deep":{"y":[true,null],"x":1}}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
THINKING = f"<think>\nI look.\n</think>\n\nSo:\n{CALL}"
END = "<|im_end|>"
MARKUP = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    THINKING,
    "Hi",
    "😀",
    "  \n",
    "<|im_start|>",
]
COMMAND = (
    '<tool_call>\n{"name": "look", "arguments": {"command": "cd a && ls"}}\n</tool_call><|im_end|>'
)
"""A command whose echo lacks its `cd FOLDER && `, as Claude Code sends it."""
CONTEXT = {"role": "assistant", "content": "Job 1 has ended."}
LITELLM = "[System: Empty message content sanitised to satisfy protocol]"


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
        """Return the decoded request with these messages. Those of earlier requests are not decoded
        again."""
        written = [json.dumps(message) for message in messages]
        known = []
        for earlier, parts in self.kept:
            alike = [own == other for own, other in zip(written, earlier, strict=False)]
            same = [*alike, False].index(False)
            if same > len(known):
                known = parts[:same]
        body = json.dumps(
            {"messages": [None] * len(known) + messages[len(known) :], "tools": self.tools}
        )
        call = routes.CHAT.decode(parse_object(body.encode()), "/", known)
        self.kept.append((written, call.parts))
        return call

    def prompt(self, messages):
        return self.conversations.prompt(self.decode(messages))

    def full_prompt(self, messages):
        """Return the ids of a prompt that continues nothing."""
        return self.rendering.render(self.decode(messages).messages, self.tools)

    def ask(self, messages, completion, prompt=None):
        """Record a call with `completion`, a text or token ids, and return the reply that the
        harness sees.

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

    def say(self, messages, text):
        """Record a call whose completion is a whole turn of this text, and return the reply."""
        return self.ask(messages, text + END)

    def add(self, messages, reply):
        """Record a call of a reply that no text gives. Its tokens are always the same."""
        number = str(len(self.conversations.history.turns))
        self.conversations.add(number, self.prompt(messages), self.encode("x" + END), reply)

    def talk(self, *completions):
        """Answer a conversation with completions, after each of which the program goes on. Returns
        its messages."""
        messages = [user("Hi")]
        for completion in completions:
            reply = self.say(messages, completion)
            messages += [reply, answer(reply)]
        return messages

    def token_ids(self, number):
        """Return the prompt and completion ids of a call."""
        prompt, completion_ids = self.calls[int(number)]
        return [*prompt.ids, *completion_ids]

    def kinds(self):
        return [prompt.kind for prompt, _ in self.calls]

    def check_continued(self, prompt, number, reason=None):
        """Assert that a prompt continues a call with each of its tokens."""
        assert prompt.kind == "bridged"
        assert prompt.reason == reason
        assert prompt.parent.call_id == str(number)
        assert [*prompt.ids[: prompt.prefix_length]] == self.token_ids(number)


def check_rendered(prompt, reason):
    """Assert that a prompt with a reply in it continues nothing, for a reason that begins so."""
    assert prompt.kind == "rendered"
    assert prompt.parent is None
    assert prompt.prefix_length == 0
    assert prompt.reason.startswith(reason)


def result(reply, text="Nothing."):
    return {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": text}


def answer(reply, text="Go on"):
    """Return the message of a program after a reply: the result of its call, or a user's."""
    return result(reply, text) if reply.get("tool_calls") else user(text)


def said(text):
    return {"role": "assistant", "content": text}


def same(reply):
    return reply


def changed(**fields):
    def change(reply):
        return {**reply, **fields}

    return change


other = changed(content="Changed.")


def named(name, cases):
    """Parametrize a test by the values of a dict, with its keys as ids."""
    return pytest.mark.parametrize(name, cases.values(), ids=cases)


def arguments(text):
    def change(reply):
        (call,) = reply["tool_calls"]
        function = {**call["function"], "arguments": text}
        return {**reply, "tool_calls": [{**call, "function": function}]}

    return change


def continued(rendering, prompt_ids, completion_ids, messages, tools=()):
    """Return the prompt that continues a call, or None. It begins with the call's tokens."""
    sampled = prompt_ids + completion_ids
    extension = rendering.extension(prompt_ids, completion_ids, messages, list(tools))
    return None if extension is None else sampled + extension
