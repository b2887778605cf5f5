"""Whether a request repeats an earlier one whose reply was lost, so that it must not be sampled twice."""

from collections.abc import Mapping
from typing import Any

from rolltap.addons.dialects.types import ModelCall
from rolltap.addons.endpoint.generation import Generation

_RETRY_COUNT = "x-stainless-retry-count"
"""How often the client has sent this request before: the OpenAI and Anthropic SDKs."""

_REMEMBERED = 8
"""Calls of a session that are done and may still be asked for again."""


def worth_remembering(generations: list[Generation]) -> list[Generation]:
    """The generations that a retry can be of: those that run, and the newest that are done."""
    done = [generation for generation in generations if generation.done]
    forgotten = set(done[:-_REMEMBERED])
    return [generation for generation in generations if generation not in forgotten]


def find_retried(
    generations: list[Generation],
    dialect: str,
    model_call: ModelCall,
    prompt_ids: list[int],
    headers: Mapping[str, str],
) -> Generation | None:
    """The newest generation that the request repeats, or None when it asks for a new sample.

    A request that is the same in everything is a retry when nobody has had that generation's reply: its listener hung
    up. Otherwise two sub-agents may ask the same, or a script may draw twice, and only the client's own word makes it
    a retry. A generation that failed is never repeated.
    """
    marked = headers.get(_RETRY_COUNT, "0") != "0"
    for generation in reversed(generations):
        if generation.error is None and (marked or generation.unheard):
            same_api = generation.call.dialect == dialect and _wishes(generation.model_call) == _wishes(model_call)
            if same_api and generation.call.prompt_ids == prompt_ids:
                return generation
    return None


def _wishes(model_call: ModelCall) -> tuple[Any, ...]:
    return (model_call.model, model_call.max_tokens, model_call.stop, model_call.schema, model_call.requested_sampling)
