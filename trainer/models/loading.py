"""A model folder as the model that is trained: its text part, in one type, with no weight made up.

Also the fast GPU kernels that it can use, and the names, shapes and files of its stored weights.

transformers takes a kernel of linear attention or of a state-space layer from a package if it can
be imported, and says nothing when it falls back to PyTorch. Source: transformers 5.23,
integrations/hub_kernels.py, use_kernel_func_from_hub_with_fallback.
"""

import importlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import model_type_to_module_name

from rolltap.addons.errors import InputError

LINEAR_ATTENTION = "flash-linear-attention"
"""The package of kernels for linear attention. Triton compiles them where they run, not nvcc."""
INSTALL = "pip install '.[train,kernels]'"
"""Command that installs it, in a clone. The other packages are compiled with nvcc, against the
torch that is there."""

_FALLBACK = re.compile(r'@use_kernel_func_from_hub_with_fallback\("\w+", "(\w+)"')
_PACKAGES = {"fla": LINEAR_ATTENTION}
"""Modules whose package has another name than the module with hyphens."""


def kernels(model_type: str) -> dict[str, bool]:
    """Return the kernel packages that the models of a type can use, and whether each can be
    imported here.

    `model_type` is that of `config.json`, of the whole model or of its text part. Models with their
    own code have none.
    """
    models = Path(transformers.__file__).parent / "models"
    modules: set[str] = set()
    for file in (models / model_type_to_module_name(model_type)).glob("modeling_*.py"):
        modules.update(_FALLBACK.findall(file.read_text()))
    found = {}
    for module in sorted(modules):
        package = _PACKAGES.get(module, module.replace("_", "-"))
        found[package] = _importable(module)
    return found


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # as transformers decides: a broken package falls back like a missing one
        return False
    return True


Dtype = Literal["bfloat16", "float32"]
"""Types of the weights."""

_DECIDED_HERE = {
    "dtype": "set `dtype` in the recipe",
    "torch_dtype": "set `dtype` in the recipe",
    "device_map": "each process trains on one device",
}
_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    RuntimeError,
    SafetensorError,
)
"""Errors of transformers for a folder that it cannot load. Code that the folder brings raises its
own."""


def load_policy(
    folder: Path,
    dtype: Dtype,
    /,
    *,
    on_cpu: bool = False,
    **init: Any,
) -> PreTrainedModel:
    """Return the causal language model in a folder, on this process's device, for text alone.

    Of a vision-language checkpoint only the text part is loaded. Where transformers has no class
    for the text part, the other parts are loaded and frozen: see `frozen_modules`. The output
    embeddings are tied as `config.json` says. The device is the current one of CUDA, so set it
    before; without CUDA, or with `on_cpu`, it is the CPU.

    `init` are further arguments of `from_pretrained`. Raises `InputError` for one that is decided
    here, for a folder that is not a checkpoint of a causal language model, and for one that lacks
    weights of the model.
    """
    config, unused = _config(folder, init)
    stored_weights(folder)
    if torch.cuda.is_available() and not on_cpu:
        unused["device_map"] = {"": torch.cuda.current_device()}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            **unused,
        )
    except torch.OutOfMemoryError:
        raise
    except _UNREADABLE as error:
        said = f"cannot be loaded: {error}; is its download complete?"
        raise InputError(f"model: the folder {folder} {said}") from error
    missing = report["missing_keys"]
    if missing:
        raise InputError(
            f"model: the folder {folder} lacks {len(missing)} weights of {type(model).__name__}, "
            f"such as {min(missing)}, which would be random numbers: complete the checkpoint, or "
            "correct tie_word_embeddings in its config.json"
        )
    for name in frozen_modules(model):
        model.get_submodule(name).requires_grad_(False)
    return model


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a model folder; no processor, which vision-language models have.
    Raises `InputError`."""
    _check_folder(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        # transformers makes an empty one of no files
        if not tokenizer.encode("a", add_special_tokens=False):
            raise ValueError("there is no vocabulary")
    except _UNREADABLE as error:
        raise InputError(
            f"model: the folder {folder} has no tokenizer that can be loaded: {error}; copy "
            "tokenizer.json and tokenizer_config.json from the model into it"
        ) from error
    return tokenizer


def meta_policy(folder: Path, dtype: Dtype, /, **init: Any) -> PreTrainedModel:
    """Return the model that `load_policy` returns, on the meta device. `config.json` is all that
    the folder needs.

    Raises `InputError` as `load_policy` does.
    """
    config, unused = _config(folder, init)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **unused)
    except _UNREADABLE as error:
        said = f"describes no model that can be made: {error}"
        raise InputError(f"model: the folder {folder} {said}") from error


def frozen_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of all modules outside the text part: a vision tower, what is in it, a
    projector.

    They are frozen, adapters leave them out (the list fits `LoraConfig.exclude_modules`, which does
    not look below a name), and they are not published.
    """
    if model.config.get_text_config() is model.config:
        return []
    text: set[torch.nn.Module] = set()
    for part in (model.get_decoder(), model.get_output_embeddings()):
        if part is not None:
            text.update(part.modules())
    # what is not in the text part, and does not hold it
    return [name for name, module in model.named_modules() if text.isdisjoint(module.modules())]


def _config(
    folder: Path,
    init: dict[str, Any],
) -> tuple[transformers.PreTrainedConfig, dict[str, Any]]:
    """Return the configuration in a folder, changed by `init`, and the arguments that are left for
    the model."""
    for name, reason in _DECIDED_HERE.items():
        if name in init:
            raise InputError(f"model_init_kwargs.{name}: {reason}: remove it")
    _check_folder(folder)
    file = folder / "config.json"
    try:
        stored = json.loads(file.read_text())
        config, unused = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **init)
        text = config.get_text_config()
    except _UNREADABLE as error:
        raise InputError(
            f"model: {file} cannot be read: {error}; if the model is newer than the installed "
            "transformers, update transformers"
        ) from error
    if "trust_remote_code" in init:
        unused["trust_remote_code"] = init["trust_remote_code"]
    # The text part has a default of its own for a key that it does not write. The text-only class
    # asks it alone.
    tied = stored.get("tie_word_embeddings")
    for key, part in stored.items():
        if isinstance(part, dict) and getattr(config, key, None) is text:
            tied = part.get("tie_word_embeddings", tied)
    if tied is not None:
        text.tie_word_embeddings = tied
    return config, unused


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise InputError(f"model: the folder {folder} has no config.json: give that of a model")


INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a checkpoint."""

    folder: Path
    files: dict[str, list[str]] = field(default_factory=dict)
    """File name -> its weights' names."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Weight name -> shape."""
    types: dict[str, str] = field(default_factory=dict)
    """Weight name -> its type, as safetensors names it: "BF16", "F32"."""


def stored_weights(folder: Path) -> StoredWeights:
    """Return what the safetensors files of a checkpoint contain: those of its index, or its only
    one.

    Raises `InputError` for a folder without them, or with broken ones.
    """
    stored = StoredWeights(folder)
    try:
        index = folder / INDEX
        files = {_SINGLE}
        if index.is_file():
            files = set(json.loads(index.read_text())["weight_map"].values())
        for file in sorted(files):
            with safe_open(folder / file, "pt") as weights:
                stored.files[file] = list(weights.keys())
                for name in stored.files[file]:
                    part = weights.get_slice(name)
                    stored.shapes[name] = tuple(part.get_shape())
                    stored.types[name] = part.get_dtype()
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise InputError(
            f"model: the weights in {folder} cannot be read: {error}; it needs {_SINGLE}, or "
            f"{INDEX} and its files: is the download complete?"
        ) from error
    return stored
