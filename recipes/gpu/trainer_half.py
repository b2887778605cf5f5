"""Check the trainer on this machine's GPU: gradients of segments, and memory against the plan.

python recipes/gpu/trainer_half.py [--cpu] [--out gpu-check.json]

The models have random weights. Without `--cpu` those of 4B dimensions are among them, which need 80 GB.
"""

import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from rolltap.trainer.models.loading import kernels
from rolltap.trainer.training.dry_run.memory import Rows, fixed, variable
from rolltap.trainer.training.dry_run.model import model_numbers
from rolltap.trainer.training.forward.forest import Row
from rolltap.trainer.training.forward.kernels import Kernel, Spans
from rolltap.trainer.training.forward.passes import SegmentScorer
from rolltap.trainer.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
LORA = {"r": 16, "target_modules": "all-linear"}
SIZE = 1024
"""Tokens of a segment where memory is measured."""
LENGTH = 16 * 1024
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2**16,
}
TINY_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    check: str
    model: str
    value: float
    limit: float
    """The value must not be larger."""

    @property
    def ok(self) -> bool:
        """True if the value is within its limit."""
        return self.value <= self.limit


@click.command()
@click.option("--cpu", is_flag=True, help="Check tiny models on the CPU.")
@click.option("--out", type=click.Path(path_type=Path), default="gpu-check.json", show_default=True)
def main(cpu: bool, out: Path) -> None:
    """Print a table of checks, write it as JSON, and end with status 1 if one failed."""
    warnings.simplefilter("ignore", FutureWarning)
    if not cpu and not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA GPU: --cpu is the small form without one")
    device = "cpu" if cpu else "cuda"
    machine = {"device": "CPU" if cpu else torch.cuda.get_device_name(), "torch": torch.__version__}
    found = list(_results(device))
    table = Table("check", "model", "value", "limit", "")
    for result in found:
        table.add_row(
            result.check, result.model, f"{result.value:.3g}", f"{result.limit:.3g}", "ok" if result.ok else "FAILED"
        )
    Console().print(table)
    rows = [asdict(result) | {"ok": result.ok} for result in found]
    for row in rows:
        row["value"] = row["value"] if math.isfinite(row["value"]) else None  # JSON has no other numbers
    out.write_text(json.dumps({**machine, "kernels": kernels("qwen3_5"), "checks": rows}, indent=2))
    sys.exit(not all(result.ok for result in found))


def _results(device: str) -> Iterator[Result]:
    yield from _attention(device)
    with tempfile.TemporaryDirectory() as made:
        for name in ("qwen3-4b", "qwen3.5-4b"):
            tiny = _tiny(Path(made), name)
            yield Result("segments against whole rows, float32", tiny.name, _difference(tiny, device, "float32"), 1e-4)
            if device == "cuda":
                yield Result(
                    "segments against whole rows, bfloat16", tiny.name, _difference(tiny, device, "bfloat16"), 0.1
                )
                offloaded = _difference(tiny, device, "float32", offload_states=True)
                yield Result("offloaded states against whole rows", tiny.name, offloaded, 1e-4)
                folder = ROOT / "tests" / "models" / name
                for lora in ({}, LORA):
                    yield from _memory_or_none(folder, lora)


def _tiny(made: Path, name: str) -> Path:
    """Return a folder with the configuration of a tiny model of the same class."""
    config = AutoConfig.from_pretrained(ROOT / "tests" / "models" / name).get_text_config()
    changes = TINY | (
        TINY_LINEAR if hasattr(config, "linear_num_key_heads") else {"layer_types": ["full_attention"] * 4}
    )
    folder = made / name.replace("4b", "tiny")
    for key, value in changes.items():
        setattr(config, key, value)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, key, None)
    config.save_pretrained(folder)
    return folder


def _model(folder: Path, device: str, dtype: str, lora: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        if lora:
            model = get_peft_model(model, LoraConfig(**lora))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    return model.train()


def _difference(folder: Path, device: str, dtype: str, **options: Any) -> float:
    """Return the norm of the difference of all gradients over the norm of all: segments, and whole rows in float32."""
    shared, rng = np.arange(200, dtype=np.int32) % 500, np.random.default_rng(0)
    rows = [Row(np.append(shared, rng.integers(3, 500, 300)).astype(np.int32), np.arange(150, 500)) for _ in range(2)]

    def gradients(dtype: str, score: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
        model = _model(folder, device, dtype, {})
        score(model).logprobs.sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    scorer = SegmentScorer(_autocast(device, dtype), 1.0, tokens_per_segment=128, **options)
    found = gradients(dtype, lambda model: scorer(model, rows))
    whole = SegmentScorer(nullcontext, 1.0, tokens_per_segment=512, keep_graph=True)
    parts = [gradients("float32", lambda model, row=row: whole(model, [row])) for row in rows]
    expected = {name: sum(part[name] for part in parts) for name in parts[0]}
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return float((difference / sum(float(value.square().sum()) for value in expected.values())) ** 0.5)


def _attention(device: str) -> Iterator[Result]:
    """Yield how attention and its gradients in bfloat16 differ from those in float32, relative to their norm."""
    spans = {"own": Spans([300, 40], [300, 40]), "prefix": Spans([340], [5000], causal=False)}
    for name, span in {**spans, "window": Spans([300, 40], [400, 100], window=128)}.items():
        torch.manual_seed(0)
        shapes = ((340, 8, 128), (sum(span.keys), 2, 128), (sum(span.keys), 2, 128), (340, 8, 128))
        tensors = [torch.randn(shape, device=device) for shape in shapes]
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            query, key, value, grad = (x.to(torch.bfloat16).to(dtype) for x in tensors)
            kernel = Kernel(query, value, 128**-0.5)
            out, lse = kernel.forward(query, key, value, span)
            found.append([out, *kernel.backward(grad, query, key, value, out, lse, span)])
        apart = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(*found, strict=True))
        yield Result("attention in bfloat16 against float32", name, apart, 0.02)


def _memory_or_none(folder: Path, lora: dict[str, Any]) -> Iterator[Result]:
    """Yield what `_memory` does, and a failed line when the GPU is too small: the other checks go on."""
    try:
        yield from _memory(folder, lora)
    except torch.OutOfMemoryError:
        yield Result(f"a step of {LENGTH:,} tokens has no room", _name(folder, lora), math.inf, 1.0)


def _name(folder: Path, lora: dict[str, Any]) -> str:
    return f"{folder.name}, {'LoRA' if lora else 'all weights'}"


def _memory(folder: Path, lora: dict[str, Any]) -> Iterator[Result]:
    """Yield the bytes of CUDA's allocator over those of the plan: what is always there, and the peak of a step."""
    recipe = Recipe(model=folder, steps=1, max_tokens=LENGTH, lora=lora, grpo={"tokens_per_segment": SIZE})
    numbers = model_numbers(recipe, "bfloat16")
    always, traces = fixed(recipe, numbers, 1, cuda=False), variable(recipe, numbers, Rows(1, LENGTH), None)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = _model(folder, "cuda", "bfloat16", lora)
    name = _name(folder, lora)
    scorer = SegmentScorer(_autocast("cuda", "bfloat16"), 1.0, tokens_per_segment=SIZE)

    def step(length: int) -> None:
        ids = np.random.default_rng(0).integers(3, 1000, length).astype(np.int32)
        scorer(model, [Row(ids, np.arange(1, length))]).logprobs.sum().backward()

    step(256)
    held = torch.cuda.memory_allocated() - before
    yield Result("weights and gradients over the plan", name, held / (always["weights"] + always["gradients"]), 1.1)
    torch.cuda.reset_peak_memory_stats()
    step(LENGTH)
    peak = torch.cuda.max_memory_allocated() - before - held
    yield Result(f"peak of a step of {LENGTH:,} tokens over the plan", name, peak / traces.sizes.total, 1.0)


def _autocast(device: str, dtype: str) -> Callable[[], Any]:
    return nullcontext if dtype == "float32" else partial(torch.autocast, device, getattr(torch, dtype))


if __name__ == "__main__":
    main()
