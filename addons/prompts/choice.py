"""The choice of a model's renderer and family: by what they make of a few conversations."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from renderers.base import MODEL_RENDERER_MAP, RENDERER_REGISTRY, Renderer, create_renderer
from renderers.configs import config_from_name

from rolltap.addons.dialects.call import Message, Tool
from rolltap.addons.dialects.tools import as_object
from rolltap.addons.errors import InputError
from rolltap.addons.prompts.families import UNREADABLE, Family, families, plain
from rolltap.addons.prompts.probes import TOOLS, TURNS, USER, answered
from rolltap.addons.prompts.reply import read_text
from rolltap.addons.prompts.tokenizer import CachingTokenizer


def named_renderer(tokenizer: CachingTokenizer, name: str) -> Renderer:
    """Return the renderer of this name. It may raise anything for a tokenizer of another family."""
    config = config_from_name(name)
    if name != "default":
        # keep earlier reasoning in later prompts: removing sampled tokens would break continuity
        config = config.model_copy(update={"thinking_retention": "all"})
    return create_renderer(tokenizer, config)


def choose_renderer(tokenizer: CachingTokenizer, model: str) -> str:
    """Return the name of a model's renderer: see `Rendering`."""
    if model in MODEL_RENDERER_MAP:
        return str(MODEL_RENDERER_MAP[model])
    template = named_renderer(tokenizer, "default")  # fills RENDERER_REGISTRY
    for name in RENDERER_REGISTRY:
        if name == "default":
            continue
        # most renderers require special tokens of their own model family
        with suppress(Exception):
            probed = _probed(template, named_renderer(tokenizer, name))
            if all(tokenizer.decode(ids) == tokenizer.decode(theirs) for ids, theirs in probed):
                return str(name)
    return "default"


def splits_otherwise(tokenizer: CachingTokenizer, renderer: Renderer) -> bool:
    """Return True when a renderer writes the chat template's text in other tokens."""
    template = named_renderer(tokenizer, "default")
    with suppress(Exception):  # as above
        for ids, theirs in _probed(template, renderer):
            if ids != theirs and tokenizer.decode(ids) == tokenizer.decode(theirs):
                return True
    return False


def _probed(template: Renderer, renderer: Renderer) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of the chat template, and those of a renderer, for the probes."""
    system: Message = {"role": "system", "content": "Be brief."}
    probes: list[tuple[list[Message], Any]] = [([USER], None), ([system, USER], TOOLS)]
    for turn in TURNS.values():
        if "tool_calls" in turn:
            probes.append((answered(turn), TOOLS))
            probes.append((answered({**turn, "content": "I do."}), TOOLS))
    for messages, tools in probes:
        try:
            ids = template.render_ids(messages, tools=tools, add_generation_prompt=True)
        except Exception:
            if len(messages) == len(answered(TURNS["two calls"])):
                continue  # a template that takes one call a turn says nothing about several
            raise
        yield ids, renderer.render_ids(messages, tools=tools, add_generation_prompt=True)


WrittenTurns = dict[str, tuple[str, str]]
"""Name of one of the `TURNS` -> the prompt before it, and the turn, as text."""


def written_turns(render: Callable[[list[Message], list[Tool], bool], str]) -> WrittenTurns:
    """Return the turns that `render` takes: messages, tools, True for a generation prompt."""
    written = {}
    for name, turn in TURNS.items():
        try:
            prompt = render([USER], TOOLS, True)
            whole = render([USER, turn], TOOLS, False)
        except Exception:
            continue  # templates raise for messages that they do not support
        common = commonprefix([prompt, whole])  # noqa: RUF071 - of texts, not of paths
        begun = re.sub(r"<[^<>]*\Z", "", common)  # no cut within a tag
        written[name] = begun, whole[len(begun) :]
    return written


def read_turns(family: Family, written: WrittenTurns) -> dict[str, bool]:
    """Return whether a family reads each turn as what it is.

    Turns that were written in part are left out.
    """
    found = {}
    for name, (prompt_end, text) in written.items():
        turn = TURNS[name]
        reasoning = turn.get("reasoning_content", "")
        functions = [call["function"] for call in turn.get("tool_calls", [])]
        parts = [turn["content"], reasoning, *(function["name"] for function in functions)]
        if all(part in text for part in parts):
            reply = read_text(family, prompt_end, text, TOOLS)
            read = []
            for call in reply.tool_calls:
                read.append({"name": call.name, "arguments": as_object(call.arguments)})
            texts = reply.reasoning, reply.content
            found[name] = texts == (reasoning, turn["content"]) and read == functions
    return found


def find_family(tokenizer: Any, written: WrittenTurns, name: str) -> Family:
    """Return the first family that reads all written turns, calls among them, or else `plain()`.

    The tokenizer's own response template comes first (`own`). With another `name` than `auto`, the
    family of this name is returned. Raises `InputError` for an unknown name.
    """
    candidates = families()
    with suppress(*UNREADABLE):  # most have none
        candidates = {"own": Family("own", tokenizer.response_template), **candidates}
    if name in candidates:
        return candidates[name]
    if name != "auto":
        raise InputError(f"there is no tool parser {name!r}: choose auto, {', '.join(families())}")
    for family in candidates.values():
        turns = read_turns(family, written)
        if all(turns.values()) and any("tool_calls" in TURNS[name] for name in turns):
            return family
    return plain()
