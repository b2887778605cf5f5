"""A model folder as the model that is trained: its text part, in one type, with no weight made up."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rolltap.addons.errors import InputError

Dtype = Literal["bfloat16", "float16", "float32"]
"""Types of the weights."""

_DECIDED_HERE = {
    "dtype": "set `dtype` in the recipe",
    "torch_dtype": "set `dtype` in the recipe",
    "device_map": "each process trains on one device",
}
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError, SafetensorError)
"""Errors of transformers for a folder that it cannot load. Code that the folder brings raises its own."""


def load_policy(folder: Path, dtype: Dtype, /, **init: Any) -> PreTrainedModel:
    """Return the causal language model in a folder, on this process's device, for text alone.

    Of a vision-language checkpoint only the text part is loaded. Where transformers has no class for the text part,
    the other parts are loaded and frozen: see `frozen_modules`. The output embeddings are tied as `config.json` says.
    The device is the current one of CUDA, so set it before; without CUDA it is the CPU.

    `init` are further arguments of `from_pretrained`, such as `trust_remote_code` and `attn_implementation`. Raises
    `InputError` for an argument that is decided here, for a folder that is not a checkpoint of a causal language
    model, and for one that lacks weights of the model.
    """
    for name in init.keys() & _DECIDED_HERE.keys():
        raise InputError(f"model_init_kwargs.{name}: {_DECIDED_HERE[name]}: remove it")
    config, unused = _config(folder, init)
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"model: the folder {folder} has no weights (*.safetensors): download or convert them")
    device = {"": torch.cuda.current_device()} if torch.cuda.is_available() else None
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), device_map=device, output_loading_info=True, **unused
        )
    except torch.OutOfMemoryError:
        raise
    except _UNREADABLE as error:
        raise InputError(f"model: the folder {folder} cannot be loaded: {error}; is its download complete?") from error
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"model: the folder {folder} lacks {len(missing)} weights of {type(model).__name__} ({_some(missing)}), "
            "which would be random numbers: complete the checkpoint, or correct tie_word_embeddings in its config.json"
        )
    for name in frozen_modules(model):
        model.get_submodule(name).requires_grad_(False)
    return model


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a model folder; no processor, which vision-language models have. Raises `InputError`."""
    _check_folder(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if not tokenizer.encode("a", add_special_tokens=False):  # transformers makes an empty one of no files
            raise ValueError("there is no vocabulary")
    except _UNREADABLE as error:
        raise InputError(
            f"model: the folder {folder} has no tokenizer that can be loaded: {error}; copy tokenizer.json and "
            "tokenizer_config.json from the model into it"
        ) from error
    return tokenizer


def meta_policy(folder: Path, dtype: Dtype, /, **init: Any) -> PreTrainedModel:
    """Return the model that `load_policy` returns, on the meta device. `config.json` is all that the folder needs.

    Raises `InputError` as `load_policy` does.
    """
    config, unused = _config(folder, init)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **unused)
    except _UNREADABLE as error:
        raise InputError(f"model: the folder {folder} describes no model that can be made: {error}") from error


def frozen_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of all modules outside the text part: a vision tower, what is in it, a projector.

    They are frozen, adapters leave them out (the list fits `LoraConfig.exclude_modules`, which does not look below a
    name), and they are not published. A text-only model has none.
    """
    if model.config.get_text_config() is model.config:
        return []
    parts = (model.get_decoder(), model.get_output_embeddings())
    text = {id(module) for part in parts if part is not None for module in part.modules()}
    above = {
        name for name, module in model.named_modules() if any(id(below) in text for below in module.modules())
    }  # the text part, and what holds it
    return [name for name, _ in model.named_modules() if name not in above]


def _config(folder: Path, init: dict[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the configuration in a folder, changed by `init`, and the arguments that are left for the model."""
    _check_folder(folder)
    trust = {"trust_remote_code": init["trust_remote_code"]} if "trust_remote_code" in init else {}
    try:
        stored = json.loads((folder / "config.json").read_text())
        config, unused = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **init)
        text = config.get_text_config()
    except _UNREADABLE as error:
        raise InputError(
            f"model: {folder / 'config.json'} cannot be read: {error}; if the model is newer than transformers, "
            "update transformers"
        ) from error
    # The text part has a default of its own for a key that it does not write. The text-only class asks it alone.
    written = [part for key, part in stored.items() if isinstance(part, dict) and getattr(config, key, None) is text]
    if "tie_word_embeddings" in stored and not any("tie_word_embeddings" in part for part in written):
        text.tie_word_embeddings = stored["tie_word_embeddings"]
    return config, unused | trust


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"model: the folder {folder} does not exist: correct the key in the recipe")
    if not (folder / "config.json").is_file():
        raise InputError(f"model: the folder {folder} has no config.json: give the folder of a saved model")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
