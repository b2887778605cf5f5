"""Tiny checkpoints of the architectures that people train, with the quickstart's tokenizer.

Each function writes a folder as `save_pretrained` does, with seeded weights.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
}


def qwen3(folder: Path, tokenizer_folder: Path, *, tied: bool, shard: str = "5GB") -> Path:
    """Write a Qwen3 model with two layers. Return `folder`. `shard` is the largest size of a
    weights file."""
    text = _text(tokenizer_folder, num_hidden_layers=2, head_dim=16, tie_word_embeddings=tied)
    return _write(folder, tokenizer_folder, lambda: Qwen3ForCausalLM(Qwen3Config(**text)), shard)


def qwen3_moe(folder: Path, tokenizer_folder: Path) -> Path:
    """Write a Qwen3 model with experts, which transformers keeps in one tensor a layer and writes
    one by one."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = _text(tokenizer_folder, num_hidden_layers=2, head_dim=16, tie_word_embeddings=False)
    return _write(
        folder, tokenizer_folder, lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**text, **experts))
    )


def qwen35(folder: Path, tokenizer_folder: Path, *, tied: bool = False, shard: str = "5GB") -> Path:
    """Write a Qwen3.5 model with a vision tower: three layers of linear attention and one of full
    attention.

    vLLM's linear attention on CPU needs heads of 64 and bfloat16. As in the published checkpoints,
    there are weights of a layer for speculative decoding (`mtp.`), which transformers does not
    load.
    """
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    text = _text(
        tokenizer_folder, num_hidden_layers=4, head_dim=64, tie_word_embeddings=tied, **linear
    )
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {name: text["vocab_size"] - place for place, name in enumerate(names, 1)}
    config = Qwen3_5Config(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, **tokens
    )
    _write(folder, tokenizer_folder, lambda: Qwen3_5ForConditionalGeneration(config), shard)
    file = max(folder.glob("*.safetensors"))
    weights = load_file(file) | {"mtp.fc.weight": torch.randn(64, 128)}
    save_file(weights, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        written = json.loads(index.read_text())
        written["weight_map"]["mtp.fc.weight"] = file.name
        index.write_text(json.dumps(written))
    return folder


def gemma3(folder: Path, tokenizer_folder: Path) -> Path:
    """Write a Gemma 3 model with a vision tower. transformers has no class for the text part of its
    checkpoints."""
    text = _text(tokenizer_folder, num_hidden_layers=2, head_dim=16, sliding_window=32)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    size = text["vocab_size"]
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=size - 1,
        boi_token_index=size - 2,
        eoi_token_index=size - 3,
    )
    return _write(folder, tokenizer_folder, lambda: Gemma3ForConditionalGeneration(config))


def _text(tokenizer_folder: Path, **values) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {**TEXT, "vocab_size": len(tokenizer), "bos_token_id": None, **tokens, **values}


def _write(folder: Path, tokenizer_folder: Path, make, shard: str = "5GB") -> Path:
    torch.manual_seed(0)
    model: PreTrainedModel = make()
    model.save_pretrained(folder, max_shard_size=shard)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    if model.config.get_text_config() is not model.config:
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": "Qwen2VLImageProcessor"})
        )
    return folder


COUNT, SUBMIT = (
    f"<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n"
    for command in ("wc -l < words.txt > answer.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
)
"""Calls of the quickstart's task, each a token of its own."""


def counting_qwen35(folder: Path, tokenizer_folder: Path) -> Path:
    """Write a Qwen3.5 with the tokenizer of one that drives mini-swe-agent through the quickstart's
    task.

    The next token depends on the last one only: each turn is a call, of `COUNT` or of `SUBMIT`
    alike. So about half of the sessions succeed, and training can improve the rest.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in (".\n\n", ">\n", COUNT, SUBMIT)]
    )
    tokenizer.save_pretrained(folder)
    model = Qwen3_5ForConditionalGeneration.from_pretrained(qwen35(folder, folder))
    text = model.model.language_model
    following = {
        "\n": ["</think>"],
        "</think>": ["<tool_call>"],
        "<tool_call>": [COUNT, SUBMIT],
        COUNT: ["</tool_call>"],
        SUBMIT: ["</tool_call>"],
        "</tool_call>": ["<|im_end|>"],
    }

    def id_of(token: str) -> int:
        return tokenizer.convert_tokens_to_ids(tokenizer.tokenize(token)[-1])

    with torch.no_grad():
        for layer in text.layers:
            linear = getattr(layer, "linear_attn", None)
            mixer = linear.out_proj if linear else layer.self_attn.o_proj
            mixer.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        torch.nn.init.orthogonal_(text.embed_tokens.weight)
        model.lm_head.weight.zero_()
        for token, others in following.items():
            embedding = text.embed_tokens.weight[id_of(token)]
            model.lm_head.weight[list(map(id_of, others))] += 3 * embedding / embedding.norm()
    model.save_pretrained(folder)
    return folder
