"""Retries: finds the generation that a request repeats, so that the call is not sampled twice."""

from collections.abc import Mapping
from typing import Any

from rolltap.addons.dialects.types import ModelCall
from rolltap.addons.endpoint.generation import Generation

_RETRY_COUNT = "x-stainless-retry-count"
"""Header of the OpenAI and Anthropic SDKs: the number of times that the client has already sent this request."""

_REMEMBERED = 8
"""Number of finished calls of a session that a retry can still get."""


def worth_remembering(generations: list[Generation]) -> list[Generation]:
    """Return the running generations and the newest `_REMEMBERED` finished ones, in the same order."""
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
    """Return the newest generation that the request repeats, or None for a request of its own.

    A repeated request has the same API, prompt ids, model name, token limit, stop texts, schema and sampling
    parameters. It is a retry when the generation has no listener and its reply was not delivered, or when the client
    marks it as a retry (`_RETRY_COUNT`). Other equal requests are new samples: two sub-agents can send the same prompt.
    Failed and aborted generations are not reused.
    """
    marked = headers.get(_RETRY_COUNT, "0") != "0"
    for generation in reversed(generations):
        if generation.error is None and (marked or generation.unheard):
            same_api = generation.call.dialect == dialect
            same_settings = _settings(generation.model_call) == _settings(model_call)
            if same_api and same_settings and generation.call.prompt_ids == prompt_ids:
                return generation
    return None


def _settings(model_call: ModelCall) -> tuple[Any, ...]:
    return (model_call.model, model_call.max_tokens, model_call.stop, model_call.schema, model_call.requested_sampling)
