"""One request from its decoded form to what its call starts with: prompt, sampling parameters, digest."""

import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.types import ModelCall
from rolltap.addons.endpoint.parameters import parameters
from rolltap.addons.endpoint.retries import request_digest
from rolltap.addons.endpoint.services import Services
from rolltap.addons.prompts.continuity import Prompt


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it was prepared in a thread."""

    prompt: Prompt
    prompt_ids: "array[int]"
    """The prompt's token ids, in the form that is written to the disk."""
    sampling: dict[str, Any]
    """vLLM's sampling parameters."""
    digest: bytes
    """The `request_digest`."""
    messages: str
    """JSON list of the prompt's new messages."""


def prepare_call(
    services: Services,
    own_sampling: Mapping[str, Any],
    dialect: Dialect,
    model_call: ModelCall,
    context_window: int,
    make_prompt: Callable[[ModelCall], Prompt],
) -> Asked:
    """Make the prompt of a request. A conversation that cannot fit into the window is refused untokenised.

    `own_sampling` are the session's parameters, `context_window` is the engine's, in tokens. Raises `DialectError`, and
    `PromptOverBudget` for a prompt that fits into the engine's window only.
    """
    budgets, rendering = services.budgets, services.rendering
    least = rendering.least_tokens(model_call.messages, model_call.tools, budgets.window(context_window))
    budgets.require_fit(least, context_window)
    prompt = make_prompt(model_call)
    budgets.require_fit(len(prompt.ids), context_window)
    room = context_window - len(prompt.ids)
    sampling = parameters(own_sampling, rendering.stop_token_ids(), model_call, room)
    prompt_ids = array("i", prompt.ids)
    recorded = {**sampling, "asked": model_call.unapplied()}
    digest = request_digest(dialect.NAME, model_call.model, prompt_ids, recorded)
    messages = json.dumps(prompt.new_messages, ensure_ascii=False)
    return Asked(prompt, prompt_ids, sampling, digest, messages)
