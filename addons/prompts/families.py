"""Reasoning and tool calls in sampled text, by the response template of a model's family (`families.toml`).

A response template says where the parts of a reply begin and end (transformers 5.23, utils/chat_parsing). A tokenizer
may bring its own. A family is chosen by a test: it must read the turns that the model's own prompts write.
"""

import ast
import json
import re
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from rolltap.addons.dialects.model_call import (
    Message,
    Reply,
    Tool,
    ToolCall,
    assistant_message,
    message_tool_call,
    parse_json,
    well_formed,
)
from rolltap.addons.dialects.tools import as_object, function_tool
from rolltap.addons.errors import InputError

_END = "\0"
"""A character after the text, which no mark holds: the parser waits at the end of a text for more of a mark."""
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)
"""Errors of the parsers for text that they cannot read. Python's own has too little memory for deep nesting."""


class Family:
    """A family of models that write replies by one response template. Raises `ValueError` for one that is none.

    `ends` are tokens that end a turn; `past_end` is the one that a chat template may write in their place.
    """

    def __init__(self, name: str, template: Mapping[str, Any], ends: Sequence[str] = (), past_end: str = "") -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.name, self.ends, self.past_end = name, ends, past_end
        fields = {key: dict(value) for key, value in template["fields"].items()}
        calls = fields["tool_calls"]
        self._content = calls.get("content", "text")
        self._tag = calls.get("content_args", {}).get("tag_pattern")
        if self._content == "python-calls":
            calls["content"] = "text"
        self._whole = load_response_template({**template, "fields": fields})
        opening = self._whole.fields["tool_calls"].open_re
        # calls are kept as text: one that cannot be read must not end the reading of the others
        raw = {"repeats": True, "content_args": {"strip": False}, "transform": ["{opening}", "{content}"]}
        close = {key: value for key, value in calls.items() if key.startswith("close")}
        fields["tool_calls"] = {"open_pattern": f"(?P<opening>{opening.pattern})", **close, **raw}
        self._regions = load_response_template({**template, "fields": fields})

    def read(self, prompt_end: str, text: str, tools: Sequence[Tool], *, partial: bool = False) -> Reply:
        """Return the reply in `text`, which follows a prompt that ends with `prompt_end`.

        A call that cannot be read is part of its content. With `partial`, text that may begin a mark is left out, and
        so is a call that has not ended.
        """
        from transformers.utils.chat_parsing.response_parser import ResponseParser

        found = Reply()
        try:
            anchored = self._whole.start_anchor_re.search(prompt_end)
            parser = ResponseParser(self._regions, prefix=prompt_end if anchored else "")
            self._add(found, parser.feed(text), text, tools)
            if not partial:
                self._add(found, parser.feed(_END), text, tools)
                self._add(found, parser.finalize()[1], text, tools, ended=False)
        except _UNREADABLE:
            return Reply(content="" if partial else text)
        found.reasoning = found.reasoning.removesuffix(_END).strip()
        found.content = found.content.removesuffix(_END).strip()
        if self._regions.implicit is None and not (partial or found.reasoning or found.content or found.tool_calls):
            found.content = text  # outside of all parts, of a family that marks its content
        return found

    def _add(
        self, found: Reply, events: list[dict[str, Any]], text: str, tools: Sequence[Tool], *, ended: bool = True
    ) -> None:
        for event in events:
            match event["type"], event["field"]:
                case "region_close", "tool_calls":
                    raw = "".join(event["value"]).removesuffix(_END)
                    close = self._whole.fields["tool_calls"].close_re.match(text, text.rfind(raw) + len(raw))
                    raw += close.group() if close else ""
                    calls = self._read_calls(raw, event["value"][1], tools) if ended else []
                    found.tool_calls += calls
                    found.content += "" if calls else raw
                case "region_chunk", "content":
                    found.content += event["text"]
                case "region_open", part if part not in ("content", "tool_calls") and found.reasoning:
                    found.reasoning += "\n\n"
                case "region_chunk", part if part != "tool_calls":
                    found.reasoning += event["text"]

    def _read_calls(self, raw: str, content: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """Return the calls in the text of one region; none when one of them cannot be read."""
        from transformers.utils.chat_parsing.response_parser import parse_response

        # arguments that are written as plain text get the types of their tool; those in JSON have types
        typing = list(tools) if self._content == "xml-inline" else None
        try:
            if self._content == "python-calls":
                return [sampled_call(*call) for call in _python_calls(content)]
            value = parse_response(raw, self._whole, prefix="", tools=typing)["tool_calls"]
            functions = [call.get("function", call) for call in (value if isinstance(value, list) else [value])]
            calls = [(each["name"], each["arguments" if "arguments" in each else "parameters"]) for each in functions]
            if typing is not None and not re.sub(self._tag, "", content, flags=re.DOTALL).strip():
                calls = [(name, _untyped_read(arguments, typing, name)) for name, arguments in calls]
            elif typing is not None:
                return []  # a part of the call is no argument
        except _UNREADABLE:
            return []
        sound = all(name and isinstance(name, str) and isinstance(arguments, (dict, str)) for name, arguments in calls)
        return [sampled_call(*call) for call in calls] if sound else []


def _untyped_read(arguments: dict[str, Any], tools: list[Tool], name: str) -> dict[str, Any]:
    """Return arguments, read as JSON those for which the tool's schema has no type of its own: `$ref`, `allOf`."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    properties = (schemas.get(name) or {}).get("properties") or {}
    for key, text in arguments.items():
        if isinstance(text, str) and not {"type", "anyOf", "oneOf"} & properties.get(key, {"type": ""}).keys():
            with suppress(ValueError):
                arguments[key] = parse_json(text)
    return arguments


def sampled_call(name: str, arguments: Any) -> ToolCall:
    """Return a tool call with a new random id. Arguments that are text stay as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", name=well_formed(name), arguments=well_formed(text))


def _python_calls(text: str) -> list[tuple[str, Any]]:
    """Return the calls in a Python list of them. Texts may hold newlines, and JSON's names stand for its values."""
    (statement,) = ast.parse(text.strip().replace("\n", "\\n")).body
    names = {"true": True, "false": False, "null": None}

    class Names(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.Constant:
            return ast.Constant(names[node.id])

    calls = []
    for call in statement.value.elts:  # type: ignore[attr-defined]
        if call.args:
            raise ValueError("an argument without a name")
        arguments = {word.arg: ast.literal_eval(Names().visit(word.value)) for word in call.keywords}
        json.dumps(arguments)  # sets and bytes are no JSON
        calls.append((ast.unparse(call.func), arguments))
    return calls


_THINK = {"open_pattern": r"\A\s*<think>", "close_pattern": r"</think>\s*"}


@cache
def families() -> dict[str, Family]:
    """Return the families of `families.toml` by name."""
    found = {}
    for name, family in tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8")).items():
        ends, past_end, calls = family.pop("ends"), family.pop("past_end", ""), family["fields"]["tool_calls"]
        content = {"close_pattern": rf"(?:{'|'.join(map(re.escape, ends))})\s*"}
        family["fields"] = {"reasoning_content": _THINK, "content": content, **family["fields"]}
        if "(?P<name>" in calls.get("open_pattern", ""):
            calls["transform"] = {"function": {"name": "{name}", "arguments": "{content}"}}
        if "tag_pattern" in calls.get("content_args", {}):
            calls["content"] = "xml-inline"
            calls["content_args"]["value_parser"] = {"name": "text", "args": {"strip": False}}
        found[name] = Family(name, family, ends, past_end)
    return found


_SCHEMA = {name: {"type": name} for name in ("string", "integer", "boolean", "array", "object")}
_TOOLS = [function_tool(name, "Looks.", {"type": "object", "properties": _SCHEMA}) for name in ("look", "listen")]
_ONE = message_tool_call("c0", "look", {"string": "é"})
_AWKWARD = message_tool_call(
    "c1", "listen", {"string": ' "x"\n<y> {z}, 3 ', "integer": 3, "boolean": True, "array": [1, {"a": "b"}]}
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
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
        written[name] = whole[:common], whole[common:]
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


def reads(read: Callable[[str, str, list[Tool]], Reply], written: dict[str, tuple[str, str]]) -> bool:
    """Return whether `read` finds all that is written, and a call among it."""
    turns = read_turns(read, written)
    return all(turns.values()) and any("tool_calls" in TURNS[name] for name in turns)


def find_family(tokenizer: Any, written: dict[str, tuple[str, str]], name: str = "auto") -> Family | None:
    """Return the first family that `reads` what was written, None when none does; or the one with this name.

    The tokenizer's own response template comes first (`own`). Raises `InputError` for an unknown name.
    """
    if name in families():
        return families()[name]
    if name != "auto":
        raise InputError(f"there is no tool parser {name!r}: choose auto, {', '.join(families())}")
    candidates = [*families().values()]
    with suppress(*_UNREADABLE):  # most have none
        candidates.insert(0, Family("own", tokenizer.response_template))
    return next((family for family in candidates if reads(family.read, written)), None)
