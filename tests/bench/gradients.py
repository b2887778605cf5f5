"""How far gradients of segments are from those of padded rows, in float32 and bfloat16."""

import copy
from typing import Any

import torch
from torch import Tensor

from rolltap.trainer.traces.build import TraceBatch
from tests.bench.networks import network
from tests.bench.steps import Forward, Variant, run_steps

RUNS: list[tuple[Forward, str]] = [("segments", "float32"), ("padded", "bfloat16"), ("segments", "bfloat16")]


def differences(
    name: str, device: str, batch: TraceBatch, *, lora: bool, layers: int | None, tokens_per_segment: int | None
) -> list[dict[str, Any]]:
    """Return for each of `RUNS` the relative difference of its gradients from those of padded rows in float32.

    It is the norm of the difference of all gradients over the norm of all gradients. The weights are the same: those
    of float32 can be represented in bfloat16.
    """
    half = network(name, device=device, dtype=torch.bfloat16, lora=lora, layers=layers)
    models = {"bfloat16": half, "float32": copy.deepcopy(half).float()}
    expected = _gradients(models["float32"], batch, "padded", tokens_per_segment)
    return [
        {
            "forward": forward,
            "dtype": dtype,
            "difference": distance(_gradients(models[dtype], batch, forward, tokens_per_segment), expected),
        }
        for forward, dtype in RUNS
    ]


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference over the norm of `expected`. Both have the same names."""
    if found.keys() != expected.keys():
        raise ValueError(f"gradients of {sorted(found.keys() ^ expected.keys())[:3]} are in one of the two alone")
    difference = sum(float((found[name] - expected[name]).square().sum(dtype=torch.float64)) for name in expected)
    norm = sum(float(gradient.square().sum(dtype=torch.float64)) for gradient in expected.values())
    return float((difference / norm) ** 0.5)


def _gradients(model: Any, batch: TraceBatch, forward: Forward, tokens_per_segment: int | None) -> dict[str, Tensor]:
    rows = len(batch.traces)
    micro_batches = 1 if forward == "segments" else rows
    variant = Variant(forward, micro_batches, tokens_per_segment=tokens_per_segment)
    return run_steps(model, batch, variant, 1, gradients=True).gradients
