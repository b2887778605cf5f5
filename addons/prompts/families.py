"""Families of models: how they write reasoning and tool calls in a reply (`families.toml`), and a model's choice.

A response template says where the parts of a reply begin and end (transformers 5.23, utils/chat_parsing). A tokenizer
may bring its own. A family is chosen by a test: it must read the turns that the model's own prompts write.
"""

import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from rolltap.addons.dialects.call import Message, Reply, Tool, assistant_message, message_tool_call
from rolltap.addons.dialects.tools import as_object, function_tool
from rolltap.addons.errors import InputError
from rolltap.addons.prompts.calls import UNREADABLE, Family
from rolltap.addons.prompts.reply import read_text

_THINK = {"open_pattern": r"\A\s{0,99}(?:<think>|(?=</think>))", "close_pattern": r"</think>\s{0,99}"}
"""The end alone is that of empty reasoning, which some prompts open."""


@cache
def families() -> dict[str, Family]:
    """Return the families of `families.toml` by name."""
    found = {}
    for name, family in tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8")).items():
        ends, past_end, calls = family.pop("ends"), family.pop("past_end", ""), family["fields"]["tool_calls"]
        content = {"close_pattern": rf"(?:{'|'.join(map(re.escape, ends))})\s{{0,99}}"}
        family["fields"] = {"reasoning_content": _THINK, "content": content, **family["fields"]}
        if "(?P<name>" in calls.get("open_pattern", ""):
            calls["transform"] = {"function": {"name": "{name}", "arguments": "{content}"}}
        if "tag_pattern" in calls.get("content_args", {}):
            calls["content"] = "xml-inline"
            calls["content_args"]["value_parser"] = {"name": "text", "args": {"strip": False}}
        found[name] = Family(name, family, ends, past_end)
    return found


@cache
def plain() -> Family:
    """Return the family whose replies are text, with reasoning that the prompt or the model opens."""
    fields = {"reasoning_content": _THINK, "content": {}, "tool_calls": {"open_pattern": "(?!)"}}
    return Family("plain", {"start_anchor_pattern": r"(?=<think>\s*\Z)", "fields": fields})


_SCHEMA = {name: {"type": name} for name in ("string", "integer", "boolean", "array", "object")}
_TOOLS = [function_tool(name, "Looks.", {"type": "object", "properties": _SCHEMA}) for name in ("look", "listen")]
_ONE = message_tool_call("functions.look:0", "look", {"string": "é"})
_AWKWARD = message_tool_call(
    "functions.listen:1",
    "listen",
    {"string": ' "x"\n<y> {z}, 3 ', "integer": 3, "boolean": True, "array": [1, {"a": "b"}]},
)
_ASKED: list[Message] = [{"role": "user", "content": "Look."}]
TURNS: dict[str, Message] = {
    "one call": assistant_message("", "", [_ONE]),
    "awkward arguments": assistant_message("", "", [_AWKWARD]),
    "two calls": assistant_message("", "", [_ONE, _AWKWARD]),
    "text": assistant_message("Nothing there.", "", []),
    "reasoning": assistant_message("Nothing there.", "I look around.", []),
    "reasoning and a call": assistant_message("", "I look around.", [_ONE]),
}
"""Turns that a family must read as the chat template writes them."""


def written_turns(render: Callable[[list[Message], list[Tool], bool], str]) -> dict[str, tuple[str, str]]:
    """Return the prompt and the reply of those `TURNS` that `render` takes: messages, tools, whether it is a prompt."""
    written = {}
    for name, turn in TURNS.items():
        try:
            prompt, whole = render(_ASKED, _TOOLS, True), render([*_ASKED, turn], _TOOLS, False)
        except Exception:
            continue  # templates raise for messages that they do not support
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
        begun = re.sub(r"<[^<>]*\Z", "", prompt[:length])  # no cut within a tag
        written[name] = begun, whole[len(begun) :]
    return written


def read_turns(read: Callable[[str, str, list[Tool]], Reply], written: dict[str, tuple[str, str]]) -> dict[str, bool]:
    """Return whether `read` finds what is in each written turn. Those that the template writes in part are left out."""
    found = {}
    for name, (prompt_end, text) in written.items():
        turn = TURNS[name]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in turn.get("tool_calls", [])]
        reasoning = turn.get("reasoning_content", "")
        if all(part in text for part in (turn["content"], reasoning, *(call[0] for call in calls))):
            reply = read(prompt_end, text, _TOOLS)
            read_calls = [(call.name, as_object(call.arguments)) for call in reply.tool_calls]
            found[name] = (reply.reasoning, reply.content, read_calls) == (reasoning, turn["content"], calls)
    return found


def find_family(tokenizer: Any, written: dict[str, tuple[str, str]], name: str = "auto") -> Family | None:
    """Return the first family that reads all that was written, calls among it; or the one with this name.

    The tokenizer's own response template comes first (`own`). Raises `InputError` for an unknown name.
    """
    if name in families():
        return families()[name]
    if name != "auto":
        raise InputError(f"there is no tool parser {name!r}: choose auto, {', '.join(families())}")
    candidates = [*families().values()]
    with suppress(*UNREADABLE):  # most have none
        candidates.insert(0, Family("own", tokenizer.response_template))
    for family in candidates:
        turns = read_turns(partial(read_text, family), written)
        if all(turns.values()) and any("tool_calls" in TURNS[name] for name in turns):
            return family
    return None
