"""Conversation to token ids and back with the `renderers` library."""

import json
from collections.abc import Iterable, Iterator, Sequence

from renderers.base import MODEL_RENDERER_MAP

from rolltap.addons.dialects.call import Message, ModelCall, Reply, Tool
from rolltap.addons.errors import InputError
from rolltap.addons.prompts.choice import (
    choose_renderer,
    find_family,
    named_renderer,
    read_turns,
    splits_otherwise,
    written_turns,
)
from rolltap.addons.prompts.families import families
from rolltap.addons.prompts.probes import USER
from rolltap.addons.prompts.reply import ReplyParser, SampledReply
from rolltap.addons.prompts.template import Placeholder, TemplateContinuation, tokens_of_turns
from rolltap.addons.prompts.tokenizer import ControlTokens, load, vocabulary_size
from rolltap.addons.store.metadata import tokenizer_digests

_READS_ONE_TURN = frozenset(
    [
        "nemotron-3",
        "nemotron-3-ultra",
        "prime-qwen3",
        "qwen3",
        "qwen3-vl",
        "qwen3.5",
        "qwen3.6",
        "qwen3.8",
    ]
)
"""Renderers whose `bridge_to_next_turn` does not depend on the prompt before its last stop token.

They are given only the suffix from that token on, so that their work does not grow with the
conversation.
"""
_LONG_PROMPT = 8
"""Characters per token of the context window.

Texts have fewer: a longer prompt is counted before it is rendered.
"""
_PIECE = 65_536
"""Characters that are counted together."""
_PIECE_SLACK = 16
"""Tokens that a cut between two pieces may add."""
_PROMPT_END = 64
"""Tokens of a prompt in which its last turn begins.

That is a generation prompt, with reasoning that it may open.
"""


class Rendering:
    """A model's tokenizer and renderer.

    `model` is a folder or a name from which `transformers` can load a tokenizer. `renderer` is a
    name of the `renderers` library, or `auto`. `auto` tries in this order:

    1. the renderer registered for the model's name;
    2. the first renderer that gives the text of the model's own chat template on all probe
       conversations;
    3. the chat template itself (`default`).

    Replies are read by the family that reads all turns that the prompts write (`find_family`), or
    by the one that `tool_parser` names.

    Raises `InputError` when the tokenizer cannot be loaded, the renderer cannot be created, and for
    an unknown tool parser.
    """

    def __init__(self, model: str, renderer: str = "auto", tool_parser: str = "auto") -> None:
        self.model = model
        """As it was given."""
        self.tokenizer = load(model)
        needs_template = renderer in ("auto", "default") and model not in MODEL_RENDERER_MAP
        if needs_template and not self.tokenizer.chat_template:
            raise InputError(
                f"the model {model} has no chat template, so no conversation can be written as its "
                "prompt: use its instruct version, lay chat_template.jinja into its folder, or "
                "name a renderer (rolltap_renderer)"
            )
        self.vocabulary = vocabulary_size(self.tokenizer, model)
        self.name = renderer
        """The name of the renderer."""
        if renderer == "auto":
            self.name = choose_renderer(self.tokenizer, model)
        try:
            self._renderer = named_renderer(self.tokenizer, self.name)
        except Exception as error:
            reason = f"cannot use the renderer {self.name!r} with {model!r}: {error}"
            raise InputError(reason) from error
        self.notes: list[str] = []
        """Other things to know of this model's runs: a text each."""
        if splits_otherwise(self.tokenizer, self._renderer):
            self.notes.append(
                f"the chat template of {model} and the renderer {self.name} write the same text in "
                "different tokens: prompts that continue no call may be split otherwise than "
                "elsewhere; sampled tokens stay as they are"
            )
        self._written = written_turns(self._write)
        self.family = find_family(self.tokenizer, self._written, tool_parser)
        """The one that reads replies. Without a name, it reads no tool calls: they are text."""
        stop_ids: list[int] = self._renderer.get_stop_token_ids()
        self.stop_token_ids = [*dict.fromkeys(stop_ids + self._ids(self.family.ends))]
        """The ids of the tokens that end the model's turn."""
        self.unreadable: str | None = None
        """Why tool calls in replies cannot be found, and the settings that help, or None."""
        if self.family.name is None:
            self.unreadable = (
                f"the tool calls of {model} cannot be read: no tool parser reads what its prompts "
                "write. Name the parser of its family (rolltap_tool_parser: "
                f"{', '.join(families())}); rolltap_renderer=default leaves them as text"
            )
        self.refuses_tools = self.unreadable is not None and renderer != "default"
        """True when calls with tools are refused: it was not chosen by hand that they stay text."""
        self._system_anywhere = True
        """False for a template that takes a system message only at the beginning."""
        try:
            self._render([USER, {"role": "system", "content": "Be brief."}], [], True)
        except Exception:
            self._system_anywhere = False
        self.controls = ControlTokens(self.tokenizer, self._render, self.stop_token_ids)
        self._template: TemplateContinuation | None = None
        self.refusal: str | None = None
        """The reason for which this model's conversations are never continued, or None.

        A single `extension` may still be None.
        """
        if self.name == "default":
            self._template = TemplateContinuation(
                self._render,
                self.tokenizer.encode,
                self.stop_token_ids,
                self._ids([self.family.past_end]),
            )
            self.refusal = self._template.refusal
        self.lacks: list[str] = []
        """Things that this model's rollouts will lack, each with the setting that helps."""
        if self.unreadable is not None:
            self.lacks.append(self.unreadable)
        if self.refusal is not None:
            self.lacks.append(
                f"the conversations of {model} cannot be continued token for token, each call is "
                f"rendered: {self.refusal}. Name the renderer of its family (rolltap_renderer), "
                "if there is one"
            )
        self.digests = tokenizer_digests(
            self.tokenizer.get_vocab(),
            self.tokenizer.chat_template,
        )
        """The entries of `run.json` that name the tokenizer and the chat template."""

    def read_turns(self) -> dict[str, bool]:
        """Return whether replies are read as the prompts write them, by `choice.TURNS`."""
        return read_turns(self.family, self._written)

    def _write(self, messages: list[Message], tools: list[Tool], generation: bool) -> str:
        return self.tokenizer.decode(self._render(messages, tools, generation))

    def _render(
        self,
        messages: list[Message],
        tools: list[Tool],
        generation: bool,
    ) -> list[int]:
        ids: list[int] = self._renderer.render_ids(
            messages,
            tools=tools or None,
            add_generation_prompt=generation,
        )
        return ids

    def least_tokens(self, messages: list[Message], tools: list[Tool], limit: int) -> int:
        """Return a lower bound of the number of prompt tokens, without rendering the prompt.

        It is rough for prompts that are likely to have fewer tokens than `limit`, and cheap for
        those that have many more: counting ends beyond `limit`. Thread-safe.
        """
        count = len(messages)
        if count > limit:
            return count
        # a chat template may leave out earlier reasoning
        texts = [*_texts(messages, tools, reasoning=self.name != "default")]
        if sum(map(len, texts)) <= _LONG_PROMPT * limit:
            return count
        for text in texts:
            for start in range(0, len(text), _PIECE):
                tokens = self.tokenizer.count(text[start : start + _PIECE])
                count += max(0, tokens - _PIECE_SLACK)
                if count > limit:
                    return count
        return count

    def render(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        """Return the prompt token ids of a whole conversation, including the generation prompt."""
        return self._render(self._adapt(messages), self.controls.broken(tools), True)

    def extension(
        self,
        prompt_ids: Sequence[int],
        completion_ids: list[int],
        messages: list[Message],
        tools: list[Tool],
    ) -> list[int] | None:
        """Return the ids that follow `prompt_ids + completion_ids`.

        These are the end of the turn, unless the completion has one, the new `messages` and the
        generation prompt. The messages may include assistant messages that no call sampled
        (`tokens_of_turns`). Returns None when the renderer cannot continue the conversation, or
        would change its tokens.
        """
        new = self._adapt(messages, later=True)
        if self._template is not None:
            return self._template.extension(completion_ids, new)
        if all(message["role"] != "assistant" for message in new):
            return self._next_turn(prompt_ids, completion_ids, new, tools)
        after_user = self._next_turn(prompt_ids, completion_ids, [USER], tools)
        if after_user is None:
            return None
        ended = not set(self.stop_token_ids).isdisjoint(completion_ids[-1:])
        placeholder = Placeholder(self._render, self.tokenizer.encode, self.stop_token_ids)
        written_tools = self.controls.broken(tools)
        return tokens_of_turns(placeholder, after_user, ended, new, written_tools)

    def _next_turn(
        self,
        prompt_ids: Sequence[int],
        completion_ids: list[int],
        messages: list[Message],
        tools: list[Tool],
    ) -> list[int] | None:
        """Return the ids with which the renderer follows a completion, or None."""
        start = 0
        if self.name in _READS_ONE_TURN:
            stop_ids = self.stop_token_ids
            start = max(0, len(prompt_ids) - 1)
            while start > 0 and prompt_ids[start] not in stop_ids:
                start -= 1
        suffix = [*prompt_ids[start:]]  # not of all ids: a list of a million takes 10 ms
        continued = self._renderer.bridge_to_next_turn(
            suffix,
            completion_ids,
            messages,
            tools=tools or None,
        )
        if continued is None:
            return None
        sampled = suffix + completion_ids
        ids: list[int] = continued.token_ids
        if ids[: len(sampled)] != sampled:
            return None
        return ids[len(sampled) :]

    def _adapt(self, messages: list[Message], *, later: bool = False) -> list[Message]:
        """Return the messages as the template takes them.

        `call_id` is removed, and control tokens are broken. For a template that takes a system
        message only at the beginning, leading system messages are joined and later ones become user
        messages. With `later`, `messages` do not begin the conversation.
        """
        adapted: list[Message] = self.controls.broken(messages)
        leading = []
        for message in adapted:
            message.pop("call_id", None)
            if message["role"] != "system" or self._system_anywhere:
                later = True
            elif later:
                message["role"] = "user"
            else:
                leading.append(message["content"])
        if leading:
            system = {**adapted[0], "content": "\n\n".join(leading)}
            adapted[: len(leading)] = [system]
        return adapted

    def sampled_reply(self, prompt_ids: Sequence[int], model_call: ModelCall) -> SampledReply:
        """Return the reply to a prompt before its first token."""
        prompt_end = self.tokenizer.decode([*prompt_ids[-_PROMPT_END:]])
        parser = ReplyParser(self.family, prompt_end, model_call)
        return SampledReply(parser, self.tokenizer.decode, self.stop_token_ids)

    def read(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Iterable[int],
        tools: list[Tool],
        stop_texts: Iterable[str] = (),
    ) -> tuple[Reply, int]:
        """Return the reply in all tokens of a call, and the number of tokens of its reasoning.

        Tool calls get no ids.
        """
        sampled = self.sampled_reply(prompt_ids, ModelCall("", [], tools, stop=[*stop_texts]))
        sampled.feed(completion_ids)
        reply, _ = sampled.finish()
        return reply, sampled.reasoning_tokens

    def _ids(self, tokens: Sequence[str]) -> list[int]:
        """Return the ids of those tokens that the tokenizer has."""
        ids = map(self.tokenizer.convert_tokens_to_ids, tokens)
        return [token_id for token_id in ids if token_id is not None]


def _texts(messages: list[Message], tools: list[Tool], *, reasoning: bool) -> Iterator[str]:
    """Yield the texts of a conversation, with or without reasoning."""
    for message in messages:
        yield message["content"]
        if reasoning:
            yield message.get("reasoning_content") or ""
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            yield arguments
    if tools:
        yield json.dumps(tools, ensure_ascii=False)
