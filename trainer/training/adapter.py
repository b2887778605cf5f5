"""Adapters that vLLM does not load, or would load as another one."""

from collections.abc import Mapping
from typing import Any

from rolltap.addons.errors import InputError

LARGEST_RANK = 512
"""Of an adapter that vLLM loads."""

_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights` that leave the base weights as they are. The others change those of the trainer."""
_ABSENT = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_bdlora",
    "use_qalora",
)
"""Fields of PEFT's `LoraConfig` that vLLM does not know or refuses. Source: vLLM 0.32, `PEFTHelper`."""


def require_servable(lora: Mapping[str, Any]) -> None:
    """Raise `InputError` for arguments of `LoraConfig` whose adapter vLLM does not serve. Their types are right."""
    for key in _ABSENT:
        if lora.get(key):
            raise InputError(_refusal(key, lora[key], "remove it"))
    if lora.get("bias", "none") != "none":
        raise InputError(_refusal("bias", lora["bias"], 'set it to "none"'))
    init = lora.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _INITS:
        raise InputError(_refusal("init_lora_weights", init, f"leave it out, choose one of {', '.join(_INITS)}"))
    if lora.get("r", 8) > LARGEST_RANK:
        raise InputError(_refusal("r", lora["r"], f"set {LARGEST_RANK} or less"))
    ranks = lora.get("rank_pattern") or {}
    if any(rank > LARGEST_RANK for rank in ranks.values()):
        raise InputError(_refusal("rank_pattern", ranks, f"set {LARGEST_RANK} or less"))


def _refusal(key: str, value: Any, fix: str) -> str:
    return f'vLLM does not serve an adapter with lora.{key} = {value!r}: {fix}, or set publish = "checkpoint"'
