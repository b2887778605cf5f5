"""A model folder as the model that is trained: its text part, in one type, with no weight made up.

Also the fast GPU kernels that it can use, and the names, shapes and files of its stored weights.

transformers takes a kernel of linear attention or of a state-space layer from a package if it can be imported, and says
nothing when it falls back to PyTorch. Source: transformers 5.23, integrations/hub_kernels.py,
use_kernel_func_from_hub_with_fallback.
"""

import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import model_type_to_module_name

from rolltap.addons.errors import InputError

LINEAR_ATTENTION = "flash-linear-attention"
"""The package of kernels for linear attention. Triton compiles them where they run, without nvcc."""
INSTALL = "pip install '.[train,kernels]'"
"""Command that installs it, in a clone. The other packages are compiled with nvcc, against the
torch that is there."""

_FALLBACK = re.compile(r'@use_kernel_func_from_hub_with_fallback\("\w+", "(\w+)"')
_PACKAGES = {"fla": LINEAR_ATTENTION}
"""Modules whose package has another name than the module with hyphens."""


def kernels(model_type: str) -> dict[str, bool]:
    """Return the kernel packages that the models of a type can use, and whether each can be imported here.

    `model_type` is that of `config.json`, of the whole model or of its text part. Models with their own code have none.
    """
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    sources = "".join(file.read_text() for file in sorted(folder.glob("modeling_*.py")))
    modules = sorted(set(_FALLBACK.findall(sources)))
    return {_PACKAGES.get(module, module.replace("_", "-")): _importable(module) for module in modules}


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
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError, SafetensorError)
"""Errors of transformers for a folder that it cannot load. Code that the folder brings raises its own."""


def load_policy(folder: Path, dtype: Dtype, /, *, on_cpu: bool = False, **init: Any) -> PreTrainedModel:
    """Return the causal language model in a folder, on this process's device, for text alone.

    Of a vision-language checkpoint only the text part is loaded. Where transformers has no class for the text part,
    the other parts are loaded and frozen: see `frozen_modules`. The output embeddings are tied as `config.json` says.
    The device is the current one of CUDA, so set it before; without CUDA, or with `on_cpu`, it is the CPU.

    `init` are further arguments of `from_pretrained`. Raises `InputError` for one that is decided here, for a folder
    that is not a checkpoint of a causal language model, and for one that lacks weights of the model.
    """
    config, unused = _config(folder, init)
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"model: the folder {folder} has no weights (*.safetensors): download or convert them")
    device = {"": torch.cuda.current_device()} if torch.cuda.is_available() and not on_cpu else None
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
            f"model: the folder {folder} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}, "
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
    name), and they are not published.
    """
    if model.config.get_text_config() is model.config:
        return []
    parts = (model.get_decoder(), model.get_output_embeddings())
    text = {module for part in parts if part is not None for module in part.modules()}
    # what is not in the text part, and does not hold it
    return [name for name, module in model.named_modules() if text.isdisjoint(module.modules())]


def _config(folder: Path, init: dict[str, Any]) -> tuple[transformers.PreTrainedConfig, dict[str, Any]]:
    """Return the configuration in a folder, changed by `init`, and the arguments that are left for the model."""
    for name in init.keys() & _DECIDED_HERE.keys():
        raise InputError(f"model_init_kwargs.{name}: {_DECIDED_HERE[name]}: remove it")
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


INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a checkpoint, by file."""

    folder: Path
    shapes: dict[str, dict[str, tuple[int, ...]]]
    """File name -> weight name -> shape."""
    types: dict[str, str]
    """Weight name -> its type, as safetensors names it: "BF16", "F32"."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a weight; None when the checkpoint does not have it."""
        return next((file[name] for file in self.shapes.values() if name in file), None)


def stored_weights(folder: Path) -> StoredWeights:
    """Return what the safetensors files of a checkpoint contain: those of its index, or its only one.

    Raises `InputError` for a folder without them, or with broken ones.
    """
    try:
        index = folder / INDEX
        files = [_SINGLE]
        if index.is_file():
            files = sorted({*json.loads(index.read_text())["weight_map"].values()})
        stored = StoredWeights(folder, {}, {})
        for file in files:
            _add_file(stored, file)
        return stored
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise InputError(
            f"model: the weights in {folder} cannot be read: {error}; it needs {_SINGLE}, or {INDEX} and its files"
        ) from error


def _add_file(stored: StoredWeights, file: str) -> None:
    """Add what a file contains."""
    shapes = stored.shapes[file] = {}
    with safe_open(stored.folder / file, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            part = weights.get_slice(name)
            shapes[name] = tuple(part.get_shape())
            stored.types[name] = part.get_dtype()
