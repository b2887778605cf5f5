"""A trained model as folders that vLLM and transformers take for its base: checkpoints, adapters, the finished model.

All names are those of the base checkpoint. vLLM applies nothing, and says nothing, for names that it does not know.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from rolltap.addons.errors import InputError
from rolltap.trainer.models.merging import MergedWeights
from rolltap.trainer.models.naming import NamedWeights, stored_module
from rolltap.trainer.models.stored import INDEX, StoredWeights, stored_weights

_PREFIX = "base_model.model."
"""PEFT puts it before the model's names."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""How the names of files with weights end, in all formats. Those of other formats would be out of date."""
_TEMPLATES = "additional_chat_templates"
"""The only folder of a checkpoint that transformers reads (5.23, utils.CHAT_TEMPLATE_DIR)."""


def save_weights(model: PreTrainedModel | PeftModel, folder: Path, base: Path) -> None:
    """Write what training can have changed as a checkpoint that an engine which serves `base` reloads.

    These are all weights but those of `frozen_modules`, in the model's type, with the base's `config.json`. An adapter
    is merged into what is written, and the model stays as it is. Main memory: three times the largest file
    of the base. The frozen weights that are left out stay in the engine: `load_policy` may refuse the folder.

    Raises `InputError` for a model whose weights do not fit `base`, and `OSError`.
    """
    changed, stored = _changed(model, base)
    index: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for file, shapes in stored.shapes.items():
        if names := [name for name in shapes if name in changed]:
            _write({name: changed.get(name) for name in names}, folder / file)
            index |= dict.fromkeys(names, file)
    if INDEX in _names(base):
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2) + "\n")
    _write_config(model, folder, base)


def save_whole(model: PreTrainedModel | PeftModel, folder: Path, base: Path) -> None:
    """Write the finished model: a folder with everything that `base` has, and the trained weights in their place.

    Weights that were not loaded, such as a vision tower, are the base's, as are tokenizer and processor. `config.json`
    is the base's; only its type of the weights follows the model. An adapter is merged as in `save_weights`. Memory
    and errors are those of `save_weights`.
    """
    changed, stored = _changed(model, base)
    folder.mkdir(parents=True, exist_ok=True)
    for file, shapes in stored.shapes.items():
        if not any(name in changed for name in shapes):
            shutil.copyfile(base / file, folder / file)
            continue
        with safe_open(base / file, "pt") as weights:
            _write(
                {name: changed.get(name) if name in changed else weights.get_tensor(name) for name in shapes},
                folder / file,
            )
    for name in _names(base):
        if name == INDEX or ((base / name).is_file() and not name.startswith(".") and not name.endswith(_WEIGHTS)):
            shutil.copyfile(base / name, folder / name)
    if (base / _TEMPLATES).is_dir():
        shutil.copytree(base / _TEMPLATES, folder / _TEMPLATES, dirs_exist_ok=True)
    _write_config(model, folder, base)


def save_adapter(model: PeftModel, folder: Path, base: Path) -> None:
    """Write the adapter `default` under names that an engine which serves `base` applies.

    Raises `InputError` for an adapter on weights that the base checkpoint has not as one linear layer, such as the
    experts of a layer together, and `OSError`.
    """
    inner: PreTrainedModel = model.get_base_model()
    stored = stored_weights(base)
    model.save_pretrained(str(folder), selected_adapters=["default"], save_embedding_layers=False)
    file = folder / ADAPTER_SAFE_WEIGHTS_NAME
    modules: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(file).items():
        module, lora, rest = key.removeprefix(_PREFIX).partition(".lora_")
        if module not in modules:
            modules[module] = _stored_name(inner, module, stored)
        tensors[f"{_PREFIX}{modules[module]}{lora}{rest}"] = tensor
    if any(name != other for name, other in modules.items()):
        _write(tensors, file)
        description = folder / "adapter_config.json"
        # names of modules instead of patterns, which were made for the model in memory
        config = json.loads(description.read_text())
        config |= {"target_modules": sorted(modules.values()), "exclude_modules": None}
        config |= {key: _by_name(config[key] or {}, modules) for key in ("rank_pattern", "alpha_pattern")}
        description.write_text(json.dumps(config, indent=2) + "\n")


def _by_name(pattern: Mapping[str, float], modules: Mapping[str, str]) -> dict[str, float]:
    """Return the values that a pattern gives to modules, under their stored names. The first key that matches counts.

    `modules` maps a name in memory to the stored one.
    """
    keys = {stored: get_pattern_key(list(pattern), module) for module, stored in modules.items()}
    return {stored: pattern[key] for stored, key in keys.items() if key in pattern}


def _stored_name(model: PreTrainedModel, module: str, base: StoredWeights) -> str:
    try:
        layer = model.get_submodule(module).get_base_layer()
        shape = layer.weight.shape
    except AttributeError as error:
        raise InputError(
            f"the adapter changes {module}, which is not one linear layer with a LoRA adapter, and engines take "
            "no other ones: correct target_modules, target_parameters and modules_to_save, or publish checkpoints"
        ) from error
    return stored_module(model, module, shape, base)


def _changed(model: PreTrainedModel | PeftModel, base: Path) -> tuple[NamedWeights, StoredWeights]:
    stored = stored_weights(base)
    return NamedWeights(MergedWeights(model), stored), stored


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    own = {tensor.data_ptr(): name for name, tensor in tensors.items()}  # a file has no two names of one weight
    tensors = {name: tensor if own[tensor.data_ptr()] == name else tensor.clone() for name, tensor in tensors.items()}
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # its name for an OSError
        raise OSError(f"{file}: {error}") from error


def _write_config(model: PreTrainedModel | PeftModel, folder: Path, base: Path) -> None:
    """Write the base's `config.json` with the type of the model's weights, in which readers load them."""
    config: dict[str, Any] = json.loads((base / "config.json").read_text())
    dtype = str(next(parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point))
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for key in part.keys() & {"dtype", "torch_dtype"}:
            part[key] = dtype.removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
