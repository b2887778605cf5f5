"""vLLM's sampling parameters of one call."""

from collections.abc import Mapping, Sequence
from typing import Any

from rolltap.addons.dialects.types import ModelCall


def parameters(
    sampling: Mapping[str, Any], stop_token_ids: Sequence[int], model_call: ModelCall, max_new_tokens: int
) -> dict[str, Any]:
    """Return vLLM's sampling parameters: the run's, and the harness's token limit, stop texts and grammar.

    `max_new_tokens` is the room that the prompt leaves in the context window.
    """
    own_limit = sampling.get("max_tokens", max_new_tokens)
    found = {
        **sampling,
        "max_tokens": min(model_call.max_tokens or max_new_tokens, max_new_tokens, own_limit),
        "stop_token_ids": stop_token_ids,
    }
    if model_call.stop:
        found["stop"] = model_call.stop
    if model_call.grammar is not None:
        found["structured_outputs"] = {"json": model_call.grammar} if model_call.grammar else {"json_object": True}
    return found
