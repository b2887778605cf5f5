"""Sampling parameters where nobody asks for others."""

from typing import Any

NEUTRAL_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Samples from the policy itself, so that log-probabilities are the policy's. All of it is sent with every call,
because vLLM otherwise takes defaults from the model's generation_config.json."""
