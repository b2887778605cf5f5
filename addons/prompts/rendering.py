"""Conversation to token ids and back, by the `renderers` library; and which renderer a model needs."""

import hashlib
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from renderers.base import (
    MODEL_RENDERER_MAP,
    RENDERER_REGISTRY,
    MultimodalRenderer,
    Renderer,
    ToolCallParseStatus,
    create_renderer,
    load_tokenizer,
)
from renderers.configs import config_from_name

from rolltap.addons.dialects.types import Message, Reply, Tool, ToolCall, well_formed
from rolltap.addons.errors import InputError
from rolltap.addons.prompts.template_bridge import PROBE_CALL, PROBE_TOOL, TemplateBridge
from rolltap.addons.prompts.tokenizer import CachingTokenizer

_PROBES: list[tuple[list[Message], list[Tool] | None]] = [
    ([{"role": "user", "content": "Hello"}], None),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}], [PROBE_TOOL]),
    (
        [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [PROBE_CALL]},
            {"role": "tool", "content": "Nothing.", "tool_call_id": "c1", "name": "look"},
        ],
        [PROBE_TOOL],
    ),
]
_READS_ONE_TURN = frozenset(
    ["nemotron-3", "nemotron-3-ultra", "prime-qwen3", "qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"]
)
"""Renderers that continue a conversation without a look at the prompt before its last stop token."""

_SYSTEM_LATER: list[Message] = [{"role": "user", "content": "Hello"}, {"role": "system", "content": "Be brief."}]


class Rendering:
    """A model's tokenizer and renderer.

    `model` is a folder or a name that `transformers` can load a tokenizer from. `renderer` is a name of the
    `renderers` library or `auto`: the one registered for the model's name, else the one whose token ids agree with
    the model's own chat template on a set of probe conversations, else the template itself. Raises `InputError`.
    """

    def __init__(self, model: str, renderer: str = "auto") -> None:
        try:
            self._tokenizer = CachingTokenizer(load_tokenizer(model))
        except Exception as error:
            raise InputError(f"cannot load a tokenizer from {model!r}: {str(error).splitlines()[0]}") from error
        self.name = self._choose(model) if renderer == "auto" else renderer
        try:
            self._renderer = _create(self._tokenizer, self.name)
        except Exception as error:
            raise InputError(f"the renderer {self.name!r} does not fit {model!r}: {error}") from error
        self._system_anywhere = self._takes(_SYSTEM_LATER)
        self._template_bridge = (
            TemplateBridge(self._tokenizer, self.stop_token_ids()) if self.name == "default" else None
        )
        template = self._tokenizer.chat_template
        self.chat_template_sha256 = hashlib.sha256(str(template).encode()).hexdigest()
        vocabulary = json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        self.tokenizer_sha256 = hashlib.sha256(vocabulary.encode()).hexdigest()

    @property
    def refusal(self) -> str | None:
        """Why no conversation can be continued token for token, or None when they can."""
        return self._template_bridge.refusal if self._template_bridge is not None else None

    def _choose(self, model: str) -> str:
        if model in MODEL_RENDERER_MAP:
            return str(MODEL_RENDERER_MAP[model])
        create_renderer(self._tokenizer, config_from_name("default"))  # fills the registry
        for name in RENDERER_REGISTRY:
            if name != "default" and self._agrees(name):
                return str(name)
        return "default"

    def _agrees(self, name: str) -> bool:
        try:
            renderer = _create(self._tokenizer, name)
            if isinstance(renderer, MultimodalRenderer):
                return False
            return all(
                renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
                == self._tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
                )
                for messages, tools in _PROBES
            )
        except Exception:
            # most renderers ask for special tokens of their own model family: this one is not for this model
            return False

    def _takes(self, messages: list[Message]) -> bool:
        try:
            self._renderer.render_ids(messages, tools=None, add_generation_prompt=True)
        except Exception:
            return False  # the template raises for what it does not know
        return True

    def render(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        """Prompt token ids of a whole conversation, the generation prompt included."""
        fitting = self._fit(messages)
        ids: list[int] = self._renderer.render_ids(fitting, tools=tools or None, add_generation_prompt=True)
        return ids

    def bridge(
        self, prompt_ids: list[int], completion_ids: list[int], messages: list[Message], tools: list[Tool]
    ) -> list[int] | None:
        """`prompt_ids + completion_ids` followed by the tokens of the new `messages` and the generation prompt.

        None when the renderer cannot continue this conversation without changing its tokens.
        """
        new = self._fit(messages, later=True)
        if self._template_bridge is not None:
            extension = None if self.refusal else self._template_bridge.extension(completion_ids, new)
            return None if extension is None else prompt_ids + completion_ids + extension
        start = self._last_stop(prompt_ids) if self.name in _READS_ONE_TURN else 0
        tail = prompt_ids[start:]
        bridged = self._renderer.bridge_to_next_turn(tail, completion_ids, new, tools=tools or None)
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        sampled = len(tail) + len(completion_ids)
        if ids[: len(tail)] != tail or ids[len(tail) : sampled] != completion_ids:
            return None
        return prompt_ids + ids[len(tail) :]

    def _last_stop(self, prompt_ids: list[int]) -> int:
        """The position of the last stop token, or 0."""
        stops = set(self.stop_token_ids())
        return next((i for i in range(len(prompt_ids) - 1, 0, -1) if prompt_ids[i] in stops), 0)

    def _fit(self, messages: list[Message], *, later: bool = False) -> list[Message]:
        """The messages without our own keys and, for templates that take a system message only at the beginning, with
        those at the beginning joined and the others as the user's. `later` says that they are not the beginning."""
        fitting: list[Message] = []
        for message in messages:
            if "call_id" in message:
                message = {key: value for key, value in message.items() if key != "call_id"}
            if message["role"] == "system" and not self._system_anywhere:
                if fitting and all(earlier["role"] == "system" for earlier in fitting):
                    fitting[0] = {**fitting[0], "content": f"{fitting[0]['content']}\n\n{message['content']}"}
                    continue
                if fitting or later:
                    message = {**message, "role": "user"}
            fitting.append(message)
        return fitting

    def parse(
        self, prompt_ids: Sequence[int], completion_ids: list[int], tools: list[Tool], *, partial: bool = False
    ) -> Reply:
        """The message in the sampled tokens. A tool call that is not well formed becomes text, unless the completion
        is `partial` and the call may still become one."""
        try:
            parsed = self._renderer.parse_response(completion_ids, tools=tools or None, prompt_ids=prompt_ids)
        except (ValueError, RecursionError):
            # JSON that Python does not read: an integer of thousands of digits, or as many brackets
            return Reply(content=self._tokenizer.decode(completion_ids, skip_special_tokens=True))
        content = parsed.content or ""
        calls = []
        for call in parsed.tool_calls:
            if call.status is ToolCallParseStatus.OK and call.name and isinstance(call.name, str):
                arguments = call.arguments
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                calls.append(ToolCall(id=call_id, name=well_formed(call.name), arguments=well_formed(text)))
            elif not partial:
                content += call.raw
        # renderers strip reasoning once it is complete and not before; a stream needs the same text both times
        reasoning = (parsed.reasoning_content or "").strip()
        return Reply(content=content, reasoning=reasoning, tool_calls=calls)

    def stop_token_ids(self) -> list[int]:
        """Ids that end the model's turn."""
        ids: list[int] = self._renderer.get_stop_token_ids()
        return ids


def _create(tokenizer: Any, name: str) -> Renderer:
    config = config_from_name(name)
    if name != "default":
        # keep earlier reasoning in the context when the user speaks again: it was sampled, so it stays
        config = config.model_copy(update={"thinking_retention": "all"})
    return create_renderer(tokenizer, config)


def model_folder(model: str) -> str:
    """`model` as an absolute path when it is a folder here, else the name as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model
