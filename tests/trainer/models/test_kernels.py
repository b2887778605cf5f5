import sys
from types import ModuleType

import pytest

from rolltap.trainer.models.loading import fallback_warning, kernels

GATED_DELTA = ["causal-conv1d", "flash-linear-attention"]


@pytest.mark.parametrize(
    ("model_type", "packages"),
    [
        ("qwen3", []),
        ("qwen3_moe", []),
        ("qwen3_5", GATED_DELTA),
        ("qwen3_5_text", GATED_DELTA),
        ("qwen3_next", GATED_DELTA),
        ("bamba", ["causal-conv1d", "mamba-ssm"]),
        ("brings_its_own_code", []),
    ],
)
def test_the_kernels_of_a_model_are_those_that_transformers_looks_for(model_type, packages):
    assert sorted(kernels(model_type)) == packages


def test_a_kernel_counts_if_its_module_can_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    assert kernels("qwen3_5") == {"causal-conv1d": False, "flash-linear-attention": True}


def test_what_falls_back_is_said_with_its_remedy(monkeypatch):
    for module in ("causal_conv1d", "fla"):
        monkeypatch.setitem(sys.modules, module, None)
    warning = fallback_warning("qwen3_5")
    assert "causal-conv1d and flash-linear-attention" in warning
    assert "rolltap[train,kernels]" in warning
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d"))
    assert fallback_warning("qwen3_5") is None
    assert fallback_warning("qwen3") is None
