"""A trained model as folders that vLLM and transformers take for its base: checkpoints, adapters,
the finished model.

All names are those of the base checkpoint. vLLM applies nothing, and says nothing, for names that
it does not know. transformers gives weights other names, and keeps some of them together: the text
part of a vision-language model, the experts of a layer. Its own conversions of the loading are
reversed, and compared with what the checkpoint contains.
"""

import json
import re
import shutil
from collections import Counter
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from rolltap.addons.errors import InputError
from rolltap.trainer.models.loading import INDEX, StoredWeights, frozen_modules, stored_weights
from rolltap.trainer.models.merging import PREFIX, MergedWeights, adapter_weights

_LAYER = re.compile(r"\.(\d+)\.")
"""The number of a weight's layer in its name. A conversion concerns the weights of one layer."""
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of weights, by their names in safetensors."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""How the names of files with weights end, in all formats. Those of other formats would be out of
date."""
_TEMPLATES = "additional_chat_templates"
"""The only folder of a checkpoint that transformers reads (5.23, utils.CHAT_TEMPLATE_DIR)."""


class NamedWeights:
    """The weights of a model that can have changed: all but those of `frozen_modules`, under the
    base's names.

    Raises `InputError` for a weight that the base checkpoint does not have in this shape.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, base: StoredWeights) -> None:
        weights = MergedWeights(model)
        model = weights.model
        self._base = base
        dtype = model.config.dtype or model.dtype
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        self.type: torch.dtype = dtype
        """In which the model was loaded. Its trained weights may have 32 bits since."""
        self._usual = Counter(base.types.values()).most_common(1)[0][0]
        """Type of most weights of the base."""
        frozen = set(frozen_modules(model))
        shapes: dict[str, torch.Size] = {}
        for name, weight in weights.unmerged.items():
            if name.rpartition(".")[0] not in frozen:
                shapes[name] = weight.shape
        # names of the same weight, of which the base may have one
        tied = _stored_shapes(model, dict.fromkeys(model.all_tied_weights_keys, ()))
        self._names = set()
        """The base's names."""
        for name, shape in _stored_shapes(model, shapes).items():
            if name in base.shapes or name not in tied:
                _require_stored(name, shape, base)
                self._names.add(name)
        self._weights_of = lru_cache(maxsize=1)(partial(_weights_of, weights, list(shapes)))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def on_cpu(self, name: str) -> Tensor:
        """Return a weight by its name in the base checkpoint, in the type in which it is written.

        That is the type in which the model was loaded, for trained weights too, which have 32 bits
        in memory. A weight whose type in the base is not that of most others keeps it.
        """
        weight = self._weights_of(_layer_of(name))[name]
        stored = self._base.types[name]
        dtype = _TYPES.get(stored, weight.dtype)
        if stored == self._usual:
            dtype = self.type
        # a file has neither two names of one weight nor a transposed one
        return weight.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _layer_of(name: str) -> str:
    """Return the number of a weight's layer; nothing outside of layers."""
    match = _LAYER.search(name)
    if match is None:
        return ""
    return match[1]


def _weights_of(weights: MergedWeights, names: list[str], layer: str) -> dict[str, Tensor]:
    """Return the weights of a layer by the base's names. `names` are all of the model's."""
    own = [name for name in names if _layer_of(name) == layer]
    return _converted(weights.model, weights.get(own))


def _converted(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(revert_weight_conversion(model, tensors))


def _stored_shapes(model: PreTrainedModel, shapes: dict[str, Any]) -> dict[str, torch.Size]:
    """Return the names and shapes that transformers writes for some weights of the model."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return {name: tensor.shape for name, tensor in _converted(model, tensors).items()}


def _require_stored(name: str, shape: torch.Size, base: StoredWeights) -> None:
    if base.shapes.get(name) != shape:
        raise InputError(
            f"the weight {name} of shape {[*shape]} is not in {base.folder} (there: "
            f"{base.shapes.get(name)}): the engine would not take it; train from the folder that "
            "the model was loaded from"
        )


def save_weights(model: PreTrainedModel | PeftModel, folder: Path, base: Path) -> None:
    """Write what training can have changed as a checkpoint that an engine which serves `base`
    reloads.

    These are all weights but those of `frozen_modules`, in the type that the model was loaded in,
    with the base's `config.json`. An adapter is merged into what is written. Main memory: three
    times the largest file of the base. `load_policy` may refuse the folder. Raises `InputError` for
    a model whose weights do not fit `base`, and `OSError`.
    """
    _save(model, folder, base, whole=False)


def save_whole(model: PreTrainedModel | PeftModel, folder: Path, base: Path) -> None:
    """Write the finished model: a folder with everything that `base` has, and the trained weights
    in their place.

    Only the type of the weights in `config.json` follows the model. Adapter, memory and errors are
    those of `save_weights`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in base.iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    if (base / _TEMPLATES).is_dir():
        shutil.copytree(base / _TEMPLATES, folder / _TEMPLATES, dirs_exist_ok=True)
    _save(model, folder, base, whole=True)


def _save(
    model: PreTrainedModel | PeftModel,
    folder: Path,
    base: Path,
    *,
    whole: bool,
) -> None:
    """Write weights and `config.json`; if `whole`, also the weights that are as they were."""
    stored = stored_weights(base)
    changed = NamedWeights(model, stored)
    index: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in stored.files.items():
        tensors = {name: changed.on_cpu(name) for name in names if name in changed}
        if whole:
            with safe_open(base / file, "pt") as weights:
                for name in set(names) - tensors.keys():
                    tensors[name] = weights.get_tensor(name)
        if tensors:
            _write(tensors, folder / file)
            index |= dict.fromkeys(tensors, file)
    if (base / INDEX).is_file():
        _write_json({"metadata": {}, "weight_map": index}, folder / INDEX)
    # with the type of the weights, in which readers load them
    config: dict[str, Any] = json.loads((base / "config.json").read_text())
    parts = [config]
    for part in config.values():
        if isinstance(part, dict):
            parts.append(part)
    for part in parts:
        for key in part.keys() & {"dtype", "torch_dtype"}:
            part[key] = str(changed.type).removeprefix("torch.")
    _write_json(config, folder / "config.json")


def save_adapter(model: PeftModel, folder: Path, base: Path) -> None:
    """Write the adapter `default` under names that an engine which serves `base` applies.

    Raises `InputError` for an adapter on weights that the base checkpoint has not as one linear
    layer, such as the experts of a layer together, and `OSError`. PEFT's names are written then.
    """
    model.save_pretrained(
        str(folder),
        selected_adapters=["default"],
        save_embedding_layers=False,
        state_dict=adapter_weights(model),
    )
    inner: PreTrainedModel = model.get_base_model()
    stored = stored_weights(base)
    file = folder / ADAPTER_SAFE_WEIGHTS_NAME
    names: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(file).items():
        module, lora, rest = key.removeprefix(PREFIX).partition(".lora_")
        if module not in names:
            names[module] = _stored_name(inner, module, stored)
        tensors[f"{PREFIX}{names[module]}{lora}{rest}"] = tensor
    if all(module == name for module, name in names.items()):
        return
    _write(tensors, file)
    # names of modules instead of patterns, which were made for the model in memory
    config = LoraConfig.from_pretrained(str(folder))
    config.target_modules = sorted(names.values())
    config.exclude_modules = None
    config.rank_pattern = {}
    config.alpha_pattern = {}
    for module, name in names.items():
        layer: Any = inner.get_submodule(module)
        if layer.r["default"] != config.r:
            config.rank_pattern[name] = layer.r["default"]
        if layer.lora_alpha["default"] != config.lora_alpha:
            config.alpha_pattern[name] = layer.lora_alpha["default"]
    config.save_pretrained(str(folder))


def _stored_name(model: PreTrainedModel, module: str, base: StoredWeights) -> str:
    """Return the base checkpoint's name of a linear layer. Raises `InputError` if transformers made
    it of several."""
    shapes: dict[str, torch.Size] = {}
    with suppress(AttributeError):
        layer: Any = model.get_submodule(module)
        shapes = _stored_shapes(model, {f"{module}.weight": layer.get_base_layer().weight.shape})
    if len(shapes) != 1:
        raise InputError(
            f"the adapter changes {module}, which is not one linear layer with a LoRA adapter, and "
            "engines take no other ones: correct target_modules, target_parameters and "
            "modules_to_save, or publish checkpoints"
        )
    for name, shape in shapes.items():
        _require_stored(name, shape, base)
    return name.removesuffix(".weight")


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # its name for an OSError
        raise OSError(f"{file}: {error}") from error


def _write_json(value: Any, file: Path) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
