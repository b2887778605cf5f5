"""The turns of the scripted model: text and a tool call, another call, a final answer. A pure function of the prompt.

It works for every program, because it reads in the prompt which tools the model has. The prompt is in Qwen's chat
format, which the `qwen3` renderer writes.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from rolltap.trainer.doctor.example import example
from rolltap.trainer.doctor.tool_choice import Tool, ending_call, ends_session, harmless_call, shell_call

TOOL_TURNS = 2
"""Tool calls before the final answer."""
INSTRUCTION = "Run the command that prints a greeting, twice. Then answer in one sentence. Change no file."
"""Instruction for a program that a preset starts."""
FINAL = "Both calls gave their results: the work is done."
"""The final answer."""

_TOOLS = re.compile(r"<tools></tools> XML tags:\n<tools>\n(.*?)\n</tools>", re.DOTALL)
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command with which mini-swe-agent ends. Its prompt asks for it."""
_RESULT = "user\n<tool_response>\n"


def offered_tools(prompt: str) -> list[Tool]:
    """Return the tools of a prompt, without the wrapping of the chat format. One that is no JSON is left out."""
    found = _TOOLS.search(prompt)
    tools = []
    for line in found[1].split("\n") if found else []:
        try:
            tool = json.loads(line)
            tool = tool.get("function") or tool
            tool["name"].strip()
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        tools.append(tool)
    return tools


def next_reply(prompt: str, schema: Any = None) -> str:
    """Return the text of the model's turn for a prompt. `schema` is the JSON schema that the reply must match, or None.

    After the final answer a program that goes on gets a call of the tool or command with which it ends, if it has one.
    """
    if schema is not None:
        return json.dumps(example(schema))
    tools, turns = offered_tools(prompt), prompt.split("<|im_start|>")
    results = sum(turn.startswith(_RESULT) for turn in turns)
    if results < TOOL_TURNS and (call := harmless_call(tools)):
        return _tool_call(*call)
    if _SUBMIT in prompt and (call := shell_call(tools, _SUBMIT)):
        return _tool_call(*call)
    answered = any(turn.startswith("assistant\n") and FINAL in turn for turn in turns)
    if answered and (call := ending_call(tools)):
        return _tool_call(*call)
    return f"<think>\nNothing is left to do.\n</think>\n\n{FINAL}"


def is_ending(name: str, arguments: str) -> bool:
    """Return True for a tool call with which a program ends, by its name and the JSON of its arguments."""
    return ends_session(name) or _SUBMIT in arguments


def _tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a turn with text and a tool call. Its JSON has unusual spaces: a program that writes it again differs."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, separators=(",  ", " : "))
    return f"<think>\nI call {name}.\n</think>\n\nI try it.\n<tool_call>\n{call}\n</tool_call>"
