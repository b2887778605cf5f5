"""The trainer's half of the check: gradients, attention's kernels, and memory against the plan.

python recipes/gpu/trainer_half.py --out lines.jsonl [--cpu]

The models have random weights. Without `--cpu`, two of 4B dimensions are among them, which need
80 GB. check.py starts this as a process of its own, and reads the lines.
"""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch
from lines import Line, at_most, failed
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import hub_kernels

from rolltap.trainer.models.devices import use_expandable_segments
from rolltap.trainer.models.loading import LINEAR_ATTENTION, kernels
from rolltap.trainer.training.dry_run.memory import Rows, fixed, variable
from rolltap.trainer.training.dry_run.model import model_numbers
from rolltap.trainer.training.forward.forest import Row
from rolltap.trainer.training.forward.kernels import Kernel, Spans
from rolltap.trainer.training.forward.linear import in_float32
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


FLOAT32 = 1e-4
"""Largest difference of gradients in float32, relative to their norm."""
TF32 = 5e-3
"""The same where flash-linear-attention runs on a GPU: Triton multiplies float32 as TF32."""
BFLOAT16 = 0.1
GIB = 2**30


FILE = click.Path(path_type=Path)


@click.command()
@click.option("--cpu", is_flag=True, help="Check tiny models on the CPU.")
@click.option("--out", type=FILE, required=True, help="File for the lines.")
def main(cpu: bool, out: Path) -> None:
    """Write the lines, each when it is known, as JSON Lines."""
    warnings.simplefilter("ignore", FutureWarning)
    use_expandable_segments()  # as a training
    with out.open("w") as file:
        for line in trainer_lines("cpu" if cpu else "cuda"):
            file.write(json.dumps(line.to_json()) + "\n")


def trainer_lines(device: str) -> Iterator[Line]:
    """Yield the lines of all models."""
    yield from _attention(device)
    with tempfile.TemporaryDirectory() as made:
        for name in ("qwen3-4b", "qwen3.5-4b"):
            tiny = _tiny(Path(made), name)
            limit = float32_limit(tiny, device)
            apart = _difference(tiny, device, "float32")
            yield at_most(f"trainer: gradients of segments, float32, {tiny.name}", apart, limit)
            if device == "cuda":
                apart = _difference(tiny, device, "bfloat16")
                what = f"trainer: gradients of segments, bfloat16, {tiny.name}"
                yield at_most(what, apart, BFLOAT16)
                apart = _difference(tiny, device, "float32", offload_states=True)
                yield at_most(f"trainer: gradients of offloaded states, {tiny.name}", apart, limit)
                folder = ROOT / "tests" / "models" / name
                for lora in ({}, LORA):
                    yield from _memory_or_none(folder, lora)


def float32_limit(folder: Path, device: str) -> float:
    """Return the largest difference of gradients in float32: larger where fla's kernels run."""
    packages = kernels(AutoConfig.from_pretrained(folder).model_type)
    return TF32 if device == "cuda" and packages.get(LINEAR_ATTENTION) else FLOAT32


def _tiny(made: Path, name: str) -> Path:
    """Return a folder with the configuration of a tiny model of the same class."""
    config = AutoConfig.from_pretrained(ROOT / "tests" / "models" / name).get_text_config()
    changes = {**TINY, "layer_types": ["full_attention"] * 4}
    if hasattr(config, "linear_num_key_heads"):
        changes |= TINY_LINEAR
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
    in_float32(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    return model.train()


def _difference(folder: Path, device: str, dtype: str, **options: Any) -> float:
    """Return the norm of the difference of all gradients over the norm of all.

    Compared are segments, and whole rows in float32 whose linear attention is transformers' formula
    in torch.
    """
    shared = np.arange(200, dtype=np.int32) % 500
    random = np.random.default_rng(0)
    own = [random.integers(3, 500, 300) for _ in range(2)]
    rows = [Row(np.append(shared, ids).astype(np.int32), np.arange(150, 500)) for ids in own]

    model = _model(folder, device, dtype, {})
    scorer = SegmentScorer(_autocast(device, dtype), 1.0, tokens_per_segment=128, **options)
    scorer(model, rows).logprobs.sum().backward()
    found = _gradients(model)

    model = _model(folder, device, "float32", {})
    scorer = SegmentScorer(nullcontext, 1.0, tokens_per_segment=512, keep_graph=True)
    with without_kernels():
        for row in rows:
            scorer(model, [row]).logprobs.sum().backward()
    expected = _gradients(model)

    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    whole = sum(float(gradient.square().sum()) for gradient in expected.values())
    return float((difference / whole) ** 0.5)


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            found[name] = weight.grad
    return found


def without_kernels() -> AbstractContextManager[Any]:
    """Let transformers take its own functions in place of a package's, as for an export."""
    return patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True)


def _attention(device: str) -> Iterator[Line]:
    """Yield how far attention and its gradients in bfloat16 are from float32, by their norm."""
    spans = {
        "own": Spans([300, 40], [300, 40]),
        "prefix": Spans([340], [5000], causal=False),
        "window": Spans([300, 40], [400, 100], window=128),
    }
    for name, span in spans.items():
        torch.manual_seed(0)
        keys = (sum(span.keys), 2, 128)
        queries = (340, 8, 128)
        tensors = [torch.randn(shape, device=device) for shape in (queries, keys, keys, queries)]
        rounded = [tensor.to(torch.bfloat16) for tensor in tensors]
        found = _attended(rounded, span)
        expected = _attended([tensor.float() for tensor in rounded], span)
        apart = 0.0
        for one, other in zip(found, expected, strict=True):
            apart = max(apart, float((one.float() - other).norm() / other.norm()))
        yield at_most(f"trainer: attention in bfloat16 against float32, {name}", apart, 0.02)


def _attended(tensors: list[torch.Tensor], span: Spans) -> list[torch.Tensor]:
    """Return the output of attention, and the gradients of query, key and value."""
    query, key, value, grad = tensors
    kernel = Kernel(query, value, 128**-0.5)
    out, lse = kernel.forward(query, key, value, span)
    return [out, *kernel.backward(grad, query, key, value, out, lse, span)]


def _memory_or_none(folder: Path, lora: dict[str, Any]) -> Iterator[Line]:
    """Yield the lines of `_memory`; a failed one when the GPU is too small: the others go on."""
    try:
        yield from _memory(folder, lora)
    except torch.OutOfMemoryError:
        what = f"trainer: memory, {_name(folder, lora)}"
        yield failed(what, f"a step of {LENGTH:,} tokens has no room")


def _name(folder: Path, lora: dict[str, Any]) -> str:
    return f"{folder.name}, {'LoRA' if lora else 'all weights'}"


def _memory(folder: Path, lora: dict[str, Any]) -> Iterator[Line]:
    """Yield GiB of CUDA's allocator beside the plan's: always held, and the peak of a step."""
    grpo = {"tokens_per_segment": SIZE}
    recipe = Recipe(model=folder, steps=1, max_tokens=LENGTH, lora=lora, grpo=grpo)
    numbers = model_numbers(recipe, "bfloat16", gpu=True)
    always = fixed(recipe, numbers, 1, cuda=False)
    traces = variable(recipe, numbers, Rows(1, LENGTH), None)
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
    planned = (always["weights"] + always["gradients"]) / GIB
    what = f"trainer: GiB of weights and gradients, {name}"
    yield at_most(what, held / GIB, 1.1 * planned, planned=planned)
    torch.cuda.reset_peak_memory_stats()
    step(LENGTH)
    peak = torch.cuda.max_memory_allocated() - before - held
    planned = traces.sizes.total / GIB
    what = f"trainer: GiB of a step of {LENGTH:,} tokens, {name}"
    yield at_most(what, peak / GIB, planned, planned=planned)


def _autocast(device: str, dtype: str) -> Callable[[], Any]:
    if dtype == "float32":
        return nullcontext
    return partial(torch.autocast, device, getattr(torch, dtype))


if __name__ == "__main__":
    main()
