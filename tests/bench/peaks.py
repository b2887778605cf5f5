"""Peak memory of a step over the length of a trace, and the longest trace that fits."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from rolltap.trainer.traces.build import TraceBatch
from tests.bench.groups import single
from tests.bench.networks import network
from tests.bench.steps import Variant, run_steps

WARM_UP = 256
"""Tokens of a step before the measured one, which allocates what is allocated once."""


def peaks(name: str, device: str, lengths: list[int], variant: Variant, **options: Any) -> list[int]:
    """Return the bytes that a step on one trace of each length takes at its peak, more than before the step.

    On a CUDA device they are those of its allocator. On the CPU they are those of the resident memory of another
    process, in which memory that is freed goes back to the system.
    """
    if device == "cuda":
        model = network(name, device=device, **options)
        return [cuda_peak(model, length, variant) for length in lengths]
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536"), pool:
        return pool.submit(_resident_peaks, name, lengths, variant, options).result()


def slope(lengths: list[int], values: list[int]) -> float:
    """Return the slope of the line through the values that has the least squares."""
    return float(np.polyfit(lengths, values, 1)[0])


def longest(fits: Callable[[int], bool | None], first: int, *, precision: float = 0.05) -> tuple[int, bool]:
    """Return the largest length that fits, and whether a longer one was seen not to fit.

    Doubles `first` until it does not fit, then bisects until the bounds are `precision` apart. `fits` returns None when
    it has no time for more.
    """
    low, high = 0, first
    while True:
        answer = fits(high)
        if not answer:
            break
        low, high = high, 2 * high
    if answer is None:
        return low, False
    while high - low > precision * high:
        middle = (low + high) // 2
        answer = fits(middle)
        if answer is None:
            break
        low, high = (middle, high) if answer else (low, middle)
    return low, True


def cuda_peak(model: Any, length: int, variant: Variant) -> int:
    """Return the bytes of the allocator's peak in a step on one trace, more than before the step."""
    vocabulary = model.config.get_text_config().vocab_size
    run_steps(model, single(WARM_UP, vocabulary=vocabulary), variant, 1)
    batch = single(length, vocabulary=vocabulary)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_steps(model, batch, variant, 1)
    return int(torch.cuda.max_memory_allocated() - before)


def _resident_peaks(name: str, lengths: list[int], variant: Variant, options: dict[str, Any]) -> list[int]:
    model = network(name, device="cpu", **options)
    vocabulary = model.config.get_text_config().vocab_size
    run_steps(model, single(WARM_UP, vocabulary=vocabulary), variant, 1)
    return [_resident_peak(model, single(length, vocabulary=vocabulary), variant) for length in lengths]


def _resident_peak(model: Any, batch: TraceBatch, variant: Variant) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = _status("VmRSS")
    run_steps(model, batch, variant, 1)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
