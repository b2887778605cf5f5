"""Models as they are trained: the text part alone, in the recipe's type."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

Dtype = Literal["bfloat16", "float16", "float32"]


def meta_policy(folder: Path, dtype: Dtype) -> Any:
    """Return the model of a folder on the meta device, from its `config.json` alone."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
