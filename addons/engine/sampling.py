"""Default sampling parameters."""

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
"""Samples from the unmodified policy, so that sampled tokens follow the recorded log-probabilities. Each call sends all
of them, because vLLM takes missing ones from the model's generation_config.json."""
