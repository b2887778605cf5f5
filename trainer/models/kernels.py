"""Packages of fast GPU kernels for linear attention and state-space layers.

transformers takes a kernel from such a package if it can be imported, and says nothing when it falls back to PyTorch.
Source: transformers 5.23, integrations/hub_kernels.py, use_kernel_func_from_hub_with_fallback.
"""

import importlib
import re
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name

INSTALL = "pip install --no-build-isolation 'rolltap[train,kernels]'"
"""Command that installs all of them, on the machine with the GPU: one is compiled against the torch that is there."""

_FALLBACK = re.compile(r'@use_kernel_func_from_hub_with_fallback\("\w+", "(\w+)"')
_PACKAGES = {"fla": "flash-linear-attention"}
"""Modules whose package has another name than the module with hyphens."""


def kernels(model_type: str) -> dict[str, bool]:
    """Return the kernel packages that the models of a type can use, and whether each can be imported here.

    `model_type` is that of `config.json`, of the whole model or of its text part. An importable package is used. The
    answer is empty for models without such layers, and for those that bring their own code.
    """
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    sources = "".join(file.read_text() for file in sorted(folder.glob("modeling_*.py")))
    modules = sorted(set(_FALLBACK.findall(sources)))
    return {_PACKAGES.get(module, module.replace("_", "-")): _importable(module) for module in modules}


def fallback_warning(model_type: str) -> str | None:
    """Return a line about the kernels that are missing here and their remedy; None when nothing falls back."""
    missing = [package for package, there in kernels(model_type).items() if not there]
    if not missing:
        return None
    return (
        f"{' and '.join(missing)} cannot be imported: these layers of {model_type} run in PyTorch, which is slow on a "
        f"GPU; {INSTALL}"
    )


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # as transformers decides: a broken package falls back like a missing one
        return False
    return True
