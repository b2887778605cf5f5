"""Prints an engine's cache on a GPU by vLLM's own functions. Runs in vLLM's environment, on any
machine.

Reads engines by name as JSON: `model`, `tokens` (the longest session), `sequences`, `memory` (bytes
of the cache). Prints for each `blocks`, `block` (bytes) and `session` (bytes), and `refused`, why
vLLM would not start, or null.
"""

import json
import os
import sys

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # vLLM 0.32
    from vllm.v1.core import kv_cache_utils as planning


def examined(engine):
    config = EngineArgs(
        model=engine["model"],
        dtype="bfloat16",
        max_model_len=engine["tokens"],
        max_num_seqs=engine["sequences"],
        language_model_only=True,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
    ).create_engine_config()
    cache = config.cache_config
    # a GPU's, in place of the CPU's: all attention kernels of GPUs before Blackwell take multiples
    # of 16 tokens
    cache.block_size = 16
    cache.kv_cache_layout = "LBNHC"
    if config.model_config.is_hybrid:
        Platform._align_hybrid_block_size(config, TritonAttentionBackend)
    groups = planning.get_kv_cache_groups(config, specs(config))
    found = planning.get_kv_cache_config_from_groups(config, groups, engine["memory"])
    block = engine["memory"] // found.num_blocks
    refused = None
    try:
        CompilationConfig(
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY
        ).resolve_cudagraph_mode_and_sizes(
            AttentionCGSupport.UNIFORM_BATCH,
            "",
            use_v2_model_runner=True,
            kv_cache_config=found,
            max_num_reqs=engine["sequences"],
        )
    except ValueError as error:
        refused = str(error)
    session = engine["memory"] / get_max_concurrency_for_kv_cache_config(config, found)
    return {"blocks": found.num_blocks, "block": block, "session": session, "refused": refused}


def specs(config):
    """Return what the layers of a model would ask for."""
    cache, model = config.cache_config, config.model_config
    kind, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    text = model.hf_text_config
    attention = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    if not model.is_hybrid:
        return {f"layer {i}": attention for i in range(text.num_hidden_layers)}
    linear = MambaSpec(
        shapes=kind.get_mamba_state_shape_from_config(config),
        dtypes=kind.get_mamba_state_dtype_from_config(config),
        block_size=cache.mamba_block_size,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
    )
    kinds = {"linear_attention": linear, "full_attention": attention}
    return {f"layer {i}": kinds[name] for i, name in enumerate(text.layer_types)}


print(json.dumps({name: examined(engine) for name, engine in json.load(sys.stdin).items()}))
