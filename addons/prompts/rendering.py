"""Conversation to token ids and back with the `renderers` library, and the choice of a model's renderer."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from renderers.base import (
    MODEL_RENDERER_MAP,
    RENDERER_REGISTRY,
    Renderer,
    create_renderer,
    load_tokenizer,
)
from renderers.configs import config_from_name

from rolltap.addons.dialects.call import Message, ModelCall, Reply, Tool
from rolltap.addons.errors import InputError
from rolltap.addons.prompts.calls import Family
from rolltap.addons.prompts.controls import ControlTokens
from rolltap.addons.prompts.families import families, find_family, plain, read_turns, written_turns
from rolltap.addons.prompts.reply import ReplyParser, SampledReply
from rolltap.addons.prompts.template import (
    PARALLEL_PROBE,
    PLACEHOLDER,
    PROBE,
    PROBE_TOOLS,
    USER,
    TemplateContinuation,
    tokens_of_turns,
)
from rolltap.addons.prompts.tokenizer import CachingTokenizer, require_findable, vocabulary_size
from rolltap.addons.store.metadata import tokenizer_digests

_PROBES: list[tuple[list[Message], list[Tool] | None]] = [
    ([{"role": "user", "content": "Hello"}], None),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}], PROBE_TOOLS),
    ([PROBE[0], {**PROBE[1], "content": "I do.", "reasoning_content": "I look."}, PROBE[2]], PROBE_TOOLS),
    (PARALLEL_PROBE, PROBE_TOOLS),
]
_READS_ONE_TURN = frozenset(
    ["nemotron-3", "nemotron-3-ultra", "prime-qwen3", "qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"]
)
"""Renderers whose `bridge_to_next_turn` does not depend on the prompt before its last stop token.

They are given only the suffix from that token on, so that their work does not grow with the conversation.
"""

_SYSTEM_LATER: list[Message] = [{"role": "user", "content": "Hello"}, {"role": "system", "content": "Be brief."}]
"""A probe that fails for templates which take a system message only at the beginning."""


_LONG_PROMPT = 8
"""Characters per token of the context window. Texts have fewer: a longer prompt is counted before it is rendered."""
_PIECE, _PIECE_SLACK = 65_536, 16
"""Characters that are counted together, and tokens that a cut between two pieces may add."""
_PROMPT_END = 64
"""Tokens of a prompt in which its last turn begins: a generation prompt, with reasoning that it may open."""


class Rendering:
    """A model's tokenizer and renderer.

    `model` is a folder or a name from which `transformers` can load a tokenizer. `renderer` is a name of the
    `renderers` library, or `auto`. `auto` tries in this order:

    1. the renderer registered for the model's name;
    2. the first renderer that gives the text of the model's own chat template on all probe conversations;
    3. the chat template itself (`default`).

    Replies are read by the family that reads all turns that the prompts write (`find_family`), or by the one that
    `tool_parser` names.

    Raises `InputError` when the tokenizer cannot be loaded, the renderer cannot be created, and for an unknown tool
    parser.
    """

    def __init__(self, model: str, renderer: str = "auto", tool_parser: str = "auto") -> None:
        require_findable(model, ask_hub=True)
        try:
            self._tokenizer = CachingTokenizer(load_tokenizer(model))
        except Exception as error:
            folder = Path(model)
            if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("*vocab*")):
                lacks = "it has no tokenizer, such as tokenizer.json"
                raise InputError(f"the folder {model} is no model: {lacks}") from error
            raise InputError(f"cannot load a tokenizer from {model!r}: {str(error).splitlines()[0]}") from error
        if not self._tokenizer.chat_template and renderer in ("auto", "default") and model not in MODEL_RENDERER_MAP:
            raise InputError(
                f"the model {model} has no chat template, so no conversation can be written as its prompt: use its "
                "instruct version, lay chat_template.jinja into its folder, or name a renderer (rolltap_renderer)"
            )
        self.model = model
        """As it was given."""
        self.vocabulary = vocabulary_size(self._tokenizer, model)
        self._splits_alike = True
        """False when the renderer gives other tokens than the chat template for the same text."""
        self.name = self._choose_renderer(model) if renderer == "auto" else renderer
        try:
            self._renderer = _create(self._tokenizer, self.name)
        except Exception as error:
            raise InputError(f"cannot use the renderer {self.name!r} with {model!r}: {error}") from error
        written = written_turns(self._write)
        self.family: Family | None = find_family(self._tokenizer, written, tool_parser)
        """The one that reads replies, None when none does: they are text."""
        self.unreadable: str | None = None
        """Why tool calls in replies cannot be found, and the settings that help; None when they can."""
        if self.family is None:
            self.unreadable = (
                f"the tool calls of {self.model} cannot be read: no tool parser reads what its prompts write. "
                f"Name the parser of its family (rolltap_tool_parser: {', '.join(families())}); "
                "rolltap_renderer=default leaves them as text"
            )
        self.refuses_tools = self.unreadable is not None and renderer != "default"
        """True when calls with tools are refused: that they stay text was not chosen by hand."""
        self._system_anywhere = self._renders(_SYSTEM_LATER)
        self.controls = ControlTokens(self._tokenizer, self._render, self.stop_token_ids())
        self._template: TemplateContinuation | None = None
        if self.name == "default":
            past_end = self._ids([self.family.past_end] if self.family else [])
            self._template = TemplateContinuation(self._tokenizer, self.stop_token_ids(), *past_end)
        self.digests = tokenizer_digests(self._tokenizer.get_vocab(), self._tokenizer.chat_template)
        """The entries of `run.json` that name the tokenizer and the chat template."""

    @property
    def refusal(self) -> str | None:
        """The reason for which this model's conversations are never continued, or None.

        A single `extension` may still be None.
        """
        return self._template.refusal if self._template is not None else None

    @property
    def lacks(self) -> list[str]:
        """Things that this model's rollouts will lack, each with the setting that helps."""
        rendered = self.refusal and (
            f"the conversations of {self.model} cannot be continued token for token, each call is rendered: "
            f"{self.refusal}. Name the renderer of its family (rolltap_renderer), if there is one"
        )
        return [text for text in (self.unreadable, rendered) if text]

    @property
    def notes(self) -> list[str]:
        """Other things to know of this model's runs: a text each."""
        if self.name == "default" or self._splits_alike:
            return []
        return [
            f"the chat template of {self.model} and the renderer {self.name} write the same text in different tokens: "
            "prompts that continue no call may be split otherwise than elsewhere; sampled tokens stay as they are"
        ]

    def _choose_renderer(self, model: str) -> str:
        if model in MODEL_RENDERER_MAP:
            return str(MODEL_RENDERER_MAP[model])
        create_renderer(self._tokenizer, config_from_name("default"))  # fills RENDERER_REGISTRY
        for name in RENDERER_REGISTRY:
            if name != "default" and self._matches_template(name):
                return str(name)
        return "default"

    def _matches_template(self, name: str) -> bool:
        try:
            renderer = _create(self._tokenizer, name)
            self._splits_alike = True
            return all(self._agrees(renderer, messages, tools) for messages, tools in _PROBES)
        except Exception:
            # most renderers require special tokens of their own model family
            return False

    def _agrees(self, renderer: Renderer, messages: list[Message], tools: list[Tool] | None) -> bool:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False
            )
        except Exception:
            if messages is PARALLEL_PROBE:
                return True  # a template that takes one call a turn says nothing about several
            raise
        ids = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
        # a text can be split into tokens in several ways: what was sampled stays as it is
        self._splits_alike = self._splits_alike and ids == self.encode(text)
        return text == self._tokenizer.decode(ids)

    def _renders(self, messages: list[Message]) -> bool:
        try:
            self._renderer.render_ids(messages, tools=None, add_generation_prompt=True)
        except Exception:
            return False  # templates raise for messages that they do not support
        return True

    def read_turns(self) -> dict[str, bool]:
        """Return whether replies are read as the renderer or the chat template writes them, by `families.TURNS`."""
        return read_turns(self._read_written, written_turns(self._write))

    def _write(self, messages: list[Message], tools: list[Tool], generation: bool) -> str:
        return self._tokenizer.decode(self._render(messages, tools, generation))

    def _render(self, messages: list[Message], tools: list[Tool], generation: bool) -> list[int]:
        ids: list[int] = self._renderer.render_ids(messages, tools=tools or None, add_generation_prompt=generation)
        return ids

    def _read_written(self, prompt_end: str, text: str, tools: list[Tool]) -> Reply:
        """Return what is read in a turn that was written, up to the token that ends it."""
        stop_ids = self.stop_token_ids()
        ids = [*takewhile(lambda token_id: token_id not in stop_ids, self.encode(text))]
        return self.parse(self.encode(prompt_end), ids + stop_ids[:1], tools)

    @property
    def tokenizer(self) -> CachingTokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`. Special tokens in it are found, none are added."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the tokens, with the texts of special ones."""
        return self._tokenizer.decode(token_ids)

    def least_tokens(self, messages: list[Message], tools: list[Tool], limit: int) -> int:
        """Return a lower bound of the number of prompt tokens, without rendering the prompt. Thread-safe.

        It is rough for prompts that are likely to have fewer tokens than `limit`, and cheap for those that have many
        more: counting ends beyond `limit`.
        """
        count = len(messages)
        # a chat template may leave out earlier reasoning
        texts = list(_texts(messages, tools, reasoning=self.name != "default")) if count <= limit else []
        if sum(map(len, texts)) <= _LONG_PROMPT * limit:
            return count
        for text in texts:
            for start in range(0, len(text), _PIECE):
                count += max(0, self._tokenizer.count(text[start : start + _PIECE]) - _PIECE_SLACK)
                if count > limit:
                    return count
        return count

    def render(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        """Return the prompt token ids of a whole conversation, including the generation prompt."""
        return self._render(self._adapt(messages), self.controls.broken(tools), True)

    def extension(
        self, prompt_ids: Sequence[int], completion_ids: list[int], messages: list[Message], tools: list[Tool]
    ) -> list[int] | None:
        """Return the ids of the new `messages` and the generation prompt, after `prompt_ids + completion_ids`.

        The messages may include assistant messages that no call sampled (`tokens_of_turns`). Returns None when the
        renderer cannot continue the conversation, or would change its tokens.
        """
        new_messages, turn = self._adapt(messages, later=True), (prompt_ids, completion_ids)
        if self._template is not None:
            return self._template.extension(completion_ids, new_messages)
        if any(message["role"] == "assistant" for message in new_messages):
            return self._context_turns(*turn, new_messages, tools)
        return self._next_turn(*turn, new_messages, tools)

    def _context_turns(
        self, prompt_ids: Sequence[int], completion_ids: list[int], messages: list[Message], tools: list[Tool]
    ) -> list[int] | None:
        """Return the ids that follow a completion for messages among which are assistant messages, or None."""
        after_turn = self._next_turn(prompt_ids, completion_ids, [USER], tools)
        if after_turn is None:
            return None
        stop_ids = self.stop_token_ids()
        ended = completion_ids[-1:] in [[stop_id] for stop_id in stop_ids]
        placeholder_ids, render = self.encode(PLACEHOLDER), partial(self.render, tools=tools)
        return tokens_of_turns(after_turn, ended, messages, render, placeholder_ids, stop_ids)

    def _next_turn(
        self, prompt_ids: Sequence[int], completion_ids: list[int], messages: list[Message], tools: list[Tool]
    ) -> list[int] | None:
        """Return the ids with which the renderer follows a completion, or None."""
        stop_ids, start = set(self.stop_token_ids()), 0
        if self.name in _READS_ONE_TURN:
            start = next((i for i in range(len(prompt_ids) - 1, 0, -1) if prompt_ids[i] in stop_ids), 0)
        suffix = [*prompt_ids[start:]]
        continued = self._renderer.bridge_to_next_turn(suffix, completion_ids, messages, tools=tools or None)
        if continued is None:
            return None
        ids: list[int] = continued.token_ids
        sampled_end = len(suffix) + len(completion_ids)
        return ids[sampled_end:] if ids[:sampled_end] == suffix + completion_ids else None

    def _adapt(self, messages: list[Message], *, later: bool = False) -> list[Message]:
        """Return the messages as the template takes them.

        `call_id` is removed, and control tokens are broken. For a template that takes a system message only at the
        beginning, leading system messages are joined and later ones become user messages. With `later`, `messages` do
        not begin the conversation.
        """
        told = ({key: value for key, value in message.items() if key != "call_id"} for message in messages)
        adapted: list[Message] = self.controls.broken([*told])
        if self._system_anywhere:
            return adapted
        leading = 0 if later else len(list(takewhile(lambda message: message["role"] == "system", adapted)))
        for message in adapted[leading:]:
            if message["role"] == "system":
                message["role"] = "user"
        if leading:
            joined = "\n\n".join(message["content"] for message in adapted[:leading])
            adapted[:leading] = [{**adapted[0], "content": joined}]
        return adapted

    def sampled_reply(self, prompt_ids: Sequence[int], model_call: ModelCall) -> SampledReply:
        """Return the reply to a prompt before its first token."""
        family = plain() if self.family is None else self.family
        prompt_end = self.decode([*prompt_ids[-_PROMPT_END:]])
        is_json = model_call.grammar is not None
        parser = ReplyParser(family, prompt_end, model_call.tools, model_call.stop, is_json=is_json)
        return SampledReply(parser, self.decode, self.stop_token_ids(), may_call=model_call.may_call)

    def read(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Iterable[int],
        tools: list[Tool],
        stop_texts: Iterable[str] = (),
    ) -> tuple[Reply, int]:
        """Return the reply in all tokens of a call, and the number of tokens of its reasoning.

        Tool calls get new random ids each time.
        """
        sampled = self.sampled_reply(prompt_ids, ModelCall("", [], tools, stop=[*stop_texts]))
        sampled.feed(completion_ids)
        reply, _ = sampled.finish()
        return reply, sampled.reasoning_tokens

    def parse(self, prompt_ids: Sequence[int], completion_ids: Iterable[int], tools: list[Tool]) -> Reply:
        """Return the reply in all tokens of a call."""
        return self.read(prompt_ids, completion_ids, tools)[0]

    def stop_token_ids(self) -> list[int]:
        """Return the ids of the tokens that end the model's turn."""
        ids: list[int] = self._renderer.get_stop_token_ids()
        return [*dict.fromkeys(ids + self._ids(self.family.ends if self.family else []))]

    def _ids(self, tokens: Sequence[str]) -> list[int]:
        """Return the ids of those tokens that the tokenizer has."""
        ids = map(self._tokenizer.convert_tokens_to_ids, tokens)
        return [token_id for token_id in ids if token_id is not None]


def _texts(messages: list[Message], tools: list[Tool], *, reasoning: bool) -> Iterator[str]:
    """Yield the texts of a conversation, with or without reasoning."""
    for message in messages:
        yield message["content"]
        if reasoning:
            yield message.get("reasoning_content") or ""
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            yield name
            yield arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if tools:
        yield json.dumps(tools, ensure_ascii=False)


def _create(tokenizer: Any, name: str) -> Renderer:
    config = config_from_name(name)
    if name != "default":
        # keep earlier reasoning in later prompts: removing sampled tokens would break continuity
        config = config.model_copy(update={"thinking_retention": "all"})
    return create_renderer(tokenizer, config)
