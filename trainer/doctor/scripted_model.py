"""The scripted model: a tokenizer, and turns that are a pure function of the prompt.

The turns are text with a tool call, another call, and a final answer. They work for every program,
because the model reads in the prompt which tools it has. The prompt is in Qwen's chat format, which
the `qwen3` renderer writes.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rolltap.trainer.doctor.tool_choice import (
    Tool,
    ending_call,
    ends_session,
    example,
    harmless_call,
    shell_call,
)

RENDERER = "qwen3"
"""The renderer of its conversations (`rolltap_renderer`), which needs no chat template."""
INSTRUCTION = "Run the command that prints a greeting twice, then answer. Change no file."
"""Instruction for a program that a preset starts."""
FINAL = "Both calls gave their results: the work is done."
"""The final answer."""
_TOOL_TURNS = 2
_TOOLS = re.compile(r"<tools></tools> XML tags:\n<tools>\n(.*?)\n</tools>", re.DOTALL)
_RESULT = "user\n<tool_response>\n"
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command with which mini-swe-agent ends. Its prompt asks for it."""
_END = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", _END)
_MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


class ByteTokenizer:
    """A tokenizer of bytes with the special tokens of Qwen3, which encodes every text.

    It has as much of a Transformers tokenizer as `ScriptedEngine` uses, without that package, which
    takes long to import and has words about torch. Transformers loads it from `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self.name_or_path = str(folder)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._tokenizer = Tokenizer(
            models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]),
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        )
        self._tokenizer.add_tokens(
            [AddedToken(token, special=False, normalized=False) for token in _MARKUP],
        )
        self.eos_token_id = self._tokenizer.token_to_id(_END)
        folder.mkdir(parents=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _END,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text. Special tokens in it are found; none are ever added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def next_reply(prompt: str, schema: Any = None, tool: str | None = None) -> str:
    """Return the text of the model's turn for a prompt.

    `schema` is the JSON schema that the reply must match, or None.

    `tool` is the name of the tool that is called, by default one that does no harm. After the final
    answer a program that goes on gets a call of the tool or command with which it ends, if it has
    one.
    """
    if schema is not None:
        return json.dumps(example(schema))
    tools = offered_tools(prompt)
    turns = prompt.split("<|im_start|>")
    results = sum(turn.startswith(_RESULT) for turn in turns)
    if results < _TOOL_TURNS and (call := harmless_call(tools, tool)):
        return _tool_call(*call)
    if _SUBMIT in prompt and (call := shell_call(tools, _SUBMIT)):
        return _tool_call(*call)
    answered = any(turn.startswith("assistant\n") and FINAL in turn for turn in turns)
    if answered and (call := ending_call(tools)):
        return _tool_call(*call)
    return f"<think>\nNothing is left to do.\n</think>\n\n{FINAL}"


def offered_tools(prompt: str) -> list[Tool]:
    """Return the tools of a prompt, without the wrapping of the chat format.

    Other JSON is left out.
    """
    found = _TOOLS.search(prompt)
    if found is None:
        return []
    tools = []
    for line in found[1].split("\n"):
        try:
            tool = json.loads(line)
            tool = tool.get("function") or tool
            tool["name"].strip()
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        tools.append(tool)
    return tools


def is_ending(name: str, arguments: str) -> bool:
    """Return True for a tool call with which a program ends, by its name and the JSON of its
    arguments."""
    return ends_session(name) or _SUBMIT in arguments


def _tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a turn with text and a tool call.

    Its JSON has unusual spaces: a program that writes it again differs.
    """
    call = json.dumps(
        {"name": name, "arguments": arguments},
        ensure_ascii=False,
        separators=(",  ", " : "),
    )
    return f"<think>\nI call {name}.\n</think>\n\nI try it.\n<tool_call>\n{call}\n</tool_call>"
