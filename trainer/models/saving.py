"""A trained model as folders that vLLM and transformers take for its base: checkpoints, adapters, the finished model.

All names are those of the base checkpoint. vLLM applies nothing, and says nothing, for names that it does not know.
transformers gives weights other names, and keeps some of them together: the text part of a vision-language model, the
experts of a layer. Its own conversions of the loading are reversed, and compared with what the checkpoint contains.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from rolltap.addons.errors import InputError
from rolltap.trainer.models.loading import INDEX, StoredWeights, frozen_modules, stored_weights
from rolltap.trainer.models.merging import PREFIX, MergedWeights, adapter_weights

_LAYER = re.compile(r".*?\.\d+\.")
"""The beginning of a weight's name up to its layer's number. A conversion concerns the weights of one layer."""


class NamedWeights:
    """The weights of a model that can have changed: all but those of `frozen_modules`, under the base's names.

    Raises `InputError` for a weight that the base checkpoint does not have in this shape.
    """

    def __init__(self, weights: MergedWeights, base: StoredWeights) -> None:
        self._weights = weights
        self._layer_of: dict[str, str] = {}
        """The base's name of a weight -> its layer."""
        self._layers: dict[str, list[str]] = {}
        """Layer -> the model's names."""
        self._renamed: dict[str, bool] = {}
        """Layer -> whether the base has other names than the model."""
        self._cached: tuple[str, dict[str, Tensor]] = ("", {})
        self._base = base
        self._usual = Counter(base.types.values()).most_common(1)[0][0]
        """Type of most weights of the base."""
        frozen, shapes = {*frozen_modules(weights.model)}, weights.shapes()
        left_out = _written_once(weights, base)
        for name in shapes:
            if name.rpartition(".")[0] not in frozen and name not in left_out:
                match = _LAYER.match(name)
                self._layers.setdefault(match.group() if match else "other", []).append(name)
        for layer, names in self._layers.items():
            here = {name: shapes[name] for name in names}
            stored = _stored_shapes(weights.model, here, base)
            self._renamed[layer] = stored.keys() != here.keys()
            self._layer_of |= dict.fromkeys(stored, layer)

    def __contains__(self, name: str) -> bool:
        return name in self._layer_of

    def on_device(self, name: str) -> Tensor:
        """Return a weight by its name in the base checkpoint, where the model is, in the type in which it is written.

        That is the type in which the model was loaded, for trained weights too, which have 32 bits in memory. A weight
        whose type in the base is not that of most others keeps it.
        """
        layer = self._layer_of[name]
        if self._cached[0] != layer:
            tensors = self._weights.get(self._layers[layer])
            self._cached = layer, _converted(self._weights.model, tensors) if self._renamed[layer] else tensors
        weight = self._cached[1][name].detach()
        stored = self._base.types[name]
        kind = type_of(self._weights.model) if stored == self._usual else _TYPES.get(stored, weight.dtype)
        return weight.to(kind).contiguous()


_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of weights, by their names in safetensors."""


def type_of(model: PreTrainedModel) -> torch.dtype:
    """Return the type in which a model was loaded. Its trained weights may have 32 bits since."""
    dtype: torch.dtype | str = model.config.dtype or model.dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _written_once(weights: MergedWeights, base: StoredWeights) -> set[str]:
    """Return further names of weights that have several, where the base has only one of them: tied embeddings."""
    left_out: set[str] = set()
    for names in weights.shared:
        absent = {name for name in names if base.shape(name) is None}
        one = torch.empty(1, device="meta")
        absent -= {name for name in absent if all(map(base.shape, _converted(weights.model, {name: one})))}
        left_out |= absent if len(absent) < len(names) else set()
    return left_out


def _stored_shapes(
    model: PreTrainedModel, shapes: Mapping[str, torch.Size], base: StoredWeights
) -> Mapping[str, torch.Size]:
    """Return names and shapes in the base of some weights of the model."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    converted = {name: tensor.shape for name, tensor in _converted(model, tensors).items()}
    for candidate in (converted, shapes):  # as transformers writes them, or as the model has them
        if all(base.shape(name) == shape for name, shape in candidate.items()):
            return candidate
    name = next(name for name, shape in converted.items() if base.shape(name) != shape)
    raise InputError(
        f"the weight {name} of shape {[*converted[name]]} is not in {base.folder} (there: {base.shape(name)}): the "
        "engine would not take it; train from the folder that the model was loaded from"
    )


def _converted(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(revert_weight_conversion(model, tensors))


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""How the names of files with weights end, in all formats. Those of other formats would be out of date."""
_TEMPLATES = "additional_chat_templates"
"""The only folder of a checkpoint that transformers reads (5.23, utils.CHAT_TEMPLATE_DIR)."""


def save_weights(model: PreTrainedModel | PeftModel, folder: Path, base: Path) -> None:
    """Write what training can have changed as a checkpoint that an engine which serves `base` reloads.

    These are all weights but those of `frozen_modules`, in the type that the model was loaded in, with the base's
    `config.json`. An adapter
    is merged into what is written. Main memory: three times the largest file of the base. `load_policy` may refuse the
    folder. Raises `InputError` for a model whose weights do not fit `base`, and `OSError`.
    """
    stored = stored_weights(base)
    changed = NamedWeights(MergedWeights(model), stored)
    index: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for file, shapes in stored.shapes.items():
        if names := [name for name in shapes if name in changed]:
            _write({name: changed.on_device(name).cpu() for name in names}, folder / file)
            index |= dict.fromkeys(names, file)
    if (base / INDEX).is_file():
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2) + "\n")
    _write_config(model, folder, base)


def save_whole(model: PreTrainedModel | PeftModel, folder: Path, base: Path) -> None:
    """Write the finished model: a folder with everything that `base` has, and the trained weights in their place.

    Only the type of the weights in `config.json` follows the model. Adapter, memory and errors are those of
    `save_weights`.
    """
    stored = stored_weights(base)
    changed = NamedWeights(MergedWeights(model), stored)
    folder.mkdir(parents=True, exist_ok=True)
    for file, shapes in stored.shapes.items():
        if not any(name in changed for name in shapes):
            shutil.copyfile(base / file, folder / file)
            continue
        with safe_open(base / file, "pt") as weights:
            own = {name: changed.on_device(name).cpu() for name in shapes if name in changed}
            _write(own | {name: weights.get_tensor(name) for name in shapes.keys() - own.keys()}, folder / file)
    for path in filter(Path.is_file, base.iterdir()):
        if path.name == INDEX or not (path.name.startswith(".") or path.name.endswith(_WEIGHTS)):
            shutil.copyfile(path, folder / path.name)
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
    model.save_pretrained(
        str(folder), selected_adapters=["default"], save_embedding_layers=False, state_dict=adapter_weights(model)
    )
    file = folder / ADAPTER_SAFE_WEIGHTS_NAME
    modules: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(file).items():
        module, lora, rest = key.removeprefix(PREFIX).partition(".lora_")
        if module not in modules:
            modules[module] = _stored_name(inner, module, stored)
        tensors[f"{PREFIX}{modules[module]}{lora}{rest}"] = tensor
    if any(name != other for name, other in modules.items()):
        _write(tensors, file)
        description = folder / "adapter_config.json"
        # names of modules instead of patterns, which were made for the model in memory
        config = json.loads(description.read_text())
        config |= {"target_modules": sorted(modules.values()), "exclude_modules": None}
        config |= {key: _by_name(config[key] or {}, modules) for key in ("rank_pattern", "alpha_pattern")}
        description.write_text(json.dumps(config, indent=2) + "\n")


def _by_name(pattern: Mapping[str, float], modules: Mapping[str, str]) -> dict[str, float]:
    """Return a pattern's values by the stored names of modules, given by those in memory. The first match counts."""
    keys = {stored: get_pattern_key(list(pattern), module) for module, stored in modules.items()}
    return {stored: pattern[key] for stored, key in keys.items() if key in pattern}


def _stored_name(model: PreTrainedModel, module: str, base: StoredWeights) -> str:
    """Return the base checkpoint's name of a linear layer. Raises `InputError` if transformers made it of several."""
    try:
        layer = model.get_submodule(module).get_base_layer()
        shape = layer.weight.shape
    except AttributeError as error:
        raise InputError(
            f"the adapter changes {module}, which is not one linear layer with a LoRA adapter, and engines take "
            "no other ones: correct target_modules, target_parameters and modules_to_save, or publish checkpoints"
        ) from error
    (name,) = _stored_shapes(model, {f"{module}.weight": shape}, base)
    return name.removesuffix(".weight")


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
    dtype = str(type_of(model))
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for key in part.keys() & {"dtype", "torch_dtype"}:
            part[key] = dtype.removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
