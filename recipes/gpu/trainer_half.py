"""The trainer's half of the check: packed rows, attention's kernels, speed, and memory against the
plan.

python recipes/gpu/trainer_half.py --out lines.jsonl [--cpu]

The models have random weights. Without `--cpu`, two of 4B dimensions are among them, which need
80 GB. check.py starts this as a process of its own, and reads the lines.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch
from lines import Line, at_most, fact, failed, passed
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import hub_kernels
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.models.activation_offloading import get_act_offloading_ctx_manager

from rolltap.trainer.models.devices import use_expandable_segments
from rolltap.trainer.models.loading import LINEAR_ATTENTION, kernels
from rolltap.trainer.training.plan.memory import Sizes, fixed, machine_of
from rolltap.trainer.training.plan.model import fake_step, model_numbers
from rolltap.trainer.training.plan.traced_step import StepMemory, at
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.step.attention import register
from rolltap.trainer.training.step.model import prepare
from rolltap.trainer.training.step.pack import PACK_ARGUMENT, Pack, PaddedRows, TraceRow
from rolltap.trainer.training.step.probe import probe

ROOT = Path(__file__).resolve().parents[2]
LORA = {"r": 16, "target_modules": "all-linear"}
MODELS = ("qwen3-4b", "qwen3.5-4b")
"""Folders of `tests/models`, with attention alone and with linear attention."""
LENGTH = 16 * 1024
"""Tokens of the row whose memory and time are measured."""
FLEX_LENGTH = 32 * 1024
"""Tokens of the row without branches, of which FlashAttention is compared with FlexAttention."""
LONGEST = 256 * 1024
"""Most tokens of the longest row that is tried: it takes minutes."""
LENGTHS = (500, 1300, 700, 3000, 2000, 2900)
"""Tokens of the rows that have no kernel of their own, but for the first two."""
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
ATTENTION = 0.02
"""Largest difference of attention and its gradients in bfloat16."""
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
    yield from attention_lines(device)
    if device == "cuda":
        yield from flex_lines(FLEX_LENGTH)
    with tempfile.TemporaryDirectory() as made:
        for name in MODELS:
            tiny = tiny_model(Path(made), name)
            yield from gradient_lines(tiny, device)
            if device == "cuda":
                yield recompilation_line(tiny)
    if device == "cuda":
        for name in MODELS:
            folder = ROOT / "tests" / "models" / name
            for lora in ({}, LORA):
                yield from guarded_sizes(folder, lora)


# -------------------------------------------------------------------- packed rows of tiny models


def gradient_lines(folder: Path, device: str) -> Iterator[Line]:
    """Yield how far gradients of packed and of padded rows are from those of plain rows."""
    rows = branching_rows()
    expected = plain_gradients(folder, device, rows)
    limits = {"float32": float32_limit(folder, device)}
    if device == "cuda":
        limits["bfloat16"] = BFLOAT16
    for dtype, limit in limits.items():
        for way, forest in (("packed", Pack), ("padded", PaddedRows)):
            model = make_model(folder, device)
            run(model, forest([rows], torch.device(device)), dtype)
            apart = difference(gradients_of(model), expected)
            what = f"trainer: gradients of {way} rows, {dtype}, {folder.name}"
            yield at_most(what, apart, limit)
        reason = probe(make_model(folder, device), lambda dtype=dtype: autocast(device, dtype))
        what = f"trainer: probe of packed rows, {dtype}, {folder.name}"
        yield Line(what, passed(reason is None), note=reason or "")


def float32_limit(folder: Path, device: str) -> float:
    """Return the largest difference of gradients in float32: larger where fla's kernels run."""
    packages = kernels(AutoConfig.from_pretrained(folder).model_type)
    return TF32 if device == "cuda" and packages.get(LINEAR_ATTENTION) else FLOAT32


def tiny_model(made: Path, name: str) -> Path:
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


def make_model(folder: Path, device: str, lora: dict[str, Any] | None = None) -> Any:
    """Return a prepared model as it is trained: in float32, or with an adapter on bfloat16."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    dtype = torch.bfloat16 if lora else torch.float32
    with torch.device(device):
        model = prepare(AutoModelForCausalLM.from_config(config, dtype=dtype), 1.0)
        if lora:
            model = get_peft_model(model, LoraConfig(**lora))
            model.enable_input_require_grads()
    model.activation_checkpointing_enable()
    return model.train()


def branching_rows() -> list[TraceRow]:
    """Return rows with a shared prompt, one of which leaves another one in its middle."""
    random = np.random.default_rng(0)
    shared = random.integers(3, 500, 200)
    rows = [np.append(shared, random.integers(3, 500, 300)) for _ in range(2)]
    rows.append(np.append(rows[0][:350], random.integers(3, 500, 90)))
    return [TraceRow(ids.astype(np.int32), np.arange(150, len(ids))) for ids in rows]


def autocast(device: str, dtype: str) -> AbstractContextManager[Any]:
    """Return the context of the model's passes."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device, getattr(torch, dtype))


def run(model: Any, forest: Pack | PaddedRows, dtype: str) -> None:
    """Add the gradients of the sum of all log-probabilities."""
    with autocast(model.device.type, dtype):
        output = model(**forest.inputs())
    forest.unpack(output.log_probs).sum().backward()


def plain_gradients(folder: Path, device: str, rows: Sequence[TraceRow]) -> dict[str, Tensor]:
    """Return the gradients of each row alone, in float32, by transformers' own functions."""
    model = make_model(folder, device)
    with without_kernels():
        for row in rows:
            ids = torch.from_numpy(row.ids).long().to(device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, row.scored - 1]
            every = logits.float().log_softmax(-1)
            every.gather(-1, ids[row.scored, None]).sum().backward()
    return gradients_of(model)


def without_kernels() -> AbstractContextManager[Any]:
    """Let transformers take its own functions in place of a package's, as for an export."""
    return patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True)


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Return the gradients of the weights that have one."""
    found = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            found[name] = weight.grad.float()
    return found


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all gradients over the norm of all."""
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    whole = sum(float(gradient.square().sum()) for gradient in expected.values())
    return (apart / whole) ** 0.5


def recompilation_line(folder: Path) -> Line:
    """Return the line that fails if rows of other lengths have kernels of their own."""
    model = make_model(folder, "cuda")

    def step(length: int) -> None:
        ids = np.random.default_rng(length).integers(3, 500, length).astype(np.int32)
        twin = np.append(ids[: length // 2], [3])
        rows = [TraceRow(each.astype(np.int32), np.arange(1, len(each))) for each in (ids, twin)]
        run(model, Pack([rows], "cuda"), "bfloat16")

    what = f"trainer: recompilations after two lengths of rows, {folder.name}"
    return at_most(what, recompilations(step, LENGTHS), 0, f"{len(LENGTHS)} lengths")


def recompilations(step: Callable[[int], None], lengths: Sequence[int]) -> int:
    """Return how many graphs torch compiles for all lengths but the first two."""
    compiled = []
    for length in lengths:
        step(length)
        compiled.append(counters["stats"]["unique_graphs"])
    return compiled[-1] - compiled[1]


# -------------------------------------------------------------------------------------- attention


def attention_lines(device: str) -> Iterator[Line]:
    """Yield how far attention and its gradients in bfloat16 are from the formula in float32."""
    pack = Pack([branching_rows()], device)
    cases: dict[str, dict[str, Any]] = {
        "paths": {},
        "windows": {"sliding_window": 128},
    }
    if device == "cuda":  # elsewhere a model's own attention computes them
        cases["soft caps"] = {"softcap": 20.0}
        cases["sinks"] = {"s_aux": torch.linspace(-1, 1, 8, device=device)}
    for name, options in cases.items():
        leaves = attention_inputs(pack.tokens, device)
        rounded = attended(leaves, pack, options)
        expected = by_formula(
            [leaf.detach().float().requires_grad_() for leaf in leaves], pack, options
        )
        what = f"trainer: attention in bfloat16 against float32, {name}"
        yield at_most(what, largest_difference(rounded, expected), ATTENTION)


def attention_inputs(tokens: int, device: str) -> list[Tensor]:
    """Return queries of 8 heads, and keys and values of 2, (1, heads, tokens, 128)."""
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, 128) for heads in (8, 2, 2)]
    return [
        torch.randn(shape, device=device).to(torch.bfloat16).requires_grad_() for shape in shapes
    ]


def attended(leaves: list[Tensor], pack: Pack, options: dict[str, Any]) -> list[Tensor]:
    """Return the output of the trainer's attention (1, tokens, heads, 128), and gradients."""
    module = torch.nn.Module()
    module.config = SimpleNamespace()
    module.num_key_value_groups = 4
    attention = ALL_ATTENTION_FUNCTIONS[register("sdpa")]
    out, _ = attention(module, *leaves, None, **options, **{PACK_ARGUMENT: pack})
    return with_gradients(out, leaves)


def by_formula(leaves: list[Tensor], pack: Pack, options: dict[str, Any]) -> list[Tensor]:
    """Return the same by a mask of all pairs."""
    query, key, value = leaves
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * query.shape[-1] ** -0.5
    cap = options.get("softcap")
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    places = torch.arange(pack.tokens, device=query.device)
    seen = (places[None] <= places[:, None]) & (places[:, None] < pack.subtree_end[None])
    window = options.get("sliding_window")
    if window is not None:
        positions = pack.positions[0]
        seen &= positions[:, None] - positions[None] < window
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = options.get("s_aux")
    if sinks is not None:
        more = sinks.view(1, -1, 1, 1).expand(-1, -1, pack.tokens, 1)
        scores = torch.cat([scores, more], -1)
    shares = scores.softmax(-1)[..., : pack.tokens]
    out = shares @ value.repeat_interleave(groups, 1)
    return with_gradients(out.transpose(1, 2), leaves)


def with_gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return an output (1, tokens, heads, 128), and the gradients of queries, keys and values."""
    generator = torch.Generator(out.device).manual_seed(1)
    weights = torch.randn(out.shape, generator=generator, device=out.device)
    (out.float() * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest norm of a difference over the norm of what is expected."""
    apart = 0.0
    for one, other in zip(found, expected, strict=True):
        apart = max(apart, float((one.float() - other.float()).norm() / other.float().norm()))
    return apart


def flex_lines(tokens: int) -> Iterator[Line]:
    """Yield how far FlexAttention is from FlashAttention on a row without branches, and its
    time."""
    row = TraceRow(np.arange(tokens + 1, dtype=np.int32), np.array([tokens]))
    pack = Pack([[row]], "cuda")
    leaves = attention_inputs(tokens, "cuda")

    def flash() -> list[Tensor]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        return with_gradients(out.transpose(1, 2), leaves)

    found = []
    seconds = []
    for way in (lambda: attended(leaves, pack, {}), flash):
        found.append(fresh(way, leaves))
        seconds.append(min(timed(lambda way=way: fresh(way, leaves)) for _ in range(5)))
    where = f"one row of {tokens:,} tokens"
    what = f"trainer: FlexAttention against FlashAttention, {where}"
    yield at_most(what, largest_difference(*found), ATTENTION)
    note = f"{1e3 * seconds[0]:.1f} ms and {1e3 * seconds[1]:.1f} ms, forward and backward"
    what = f"trainer: time of FlexAttention over FlashAttention's, {where}"
    yield fact(what, seconds[0] / seconds[1], note)


def fresh(way: Callable[[], list[Tensor]], leaves: list[Tensor]) -> list[Tensor]:
    """Return what `way` returns, from gradients of none."""
    for leaf in leaves:
        leaf.grad = None
    return way()


def timed(step: Callable[[], Any]) -> float:
    """Return the seconds of a step on the GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


# ---------------------------------------------------------------------------------- real sizes


def guarded_sizes(folder: Path, lora: dict[str, Any]) -> Iterator[Line]:
    """Yield the lines of `size_lines`; a failed one when the GPU is too small: the others go on."""
    try:
        yield from size_lines(folder, lora, "cuda")
    except torch.OutOfMemoryError:
        what = f"trainer: memory, {name_of(folder, lora)}"
        yield failed(what, "a row has no room that has it by the plan")


def name_of(folder: Path, lora: dict[str, Any]) -> str:
    """Return how the lines call a model."""
    return f"{folder.name}, {'LoRA' if lora else 'all weights'}"


def planned(
    folder: Path, lora: dict[str, Any], *, offload: bool = False
) -> tuple[Sizes, StepMemory]:
    """Return the memory of a training process by the plan: always held, and for a row."""
    grpo = {"offload_checkpoints": offload}
    recipe = Recipe(
        model=folder, steps=1, max_tokens=LENGTH, lora=lora, grpo=grpo, dtype="bfloat16"
    )
    machine = machine_of(recipe, None, 1, online=False)
    numbers = model_numbers(recipe, "bfloat16", gpu=True)
    memory = fake_step(recipe, numbers, "bfloat16", sharded=False).memory()
    if offload:
        memory = memory.offloaded()
    return fixed(recipe, machine, numbers), memory


def size_lines(folder: Path, lora: dict[str, Any], device: str) -> Iterator[Line]:
    """Yield GiB of CUDA's allocator beside the plan's, tokens a second, and the longest row."""
    name = name_of(folder, lora)
    always, of_row = planned(folder, lora)
    _, of_offloaded = planned(folder, lora, offload=True)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = make_model(folder, device, lora)

    def step(length: int, *, offload: bool = False) -> None:
        ids = np.random.default_rng(0).integers(3, 500, length).astype(np.int32)
        pack = Pack([[TraceRow(ids, np.arange(1, length))]], device)
        offloading: Any = nullcontext()
        if offload:
            offloading = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
        with autocast(device, "bfloat16"), offloading:
            output = model(**pack.inputs())
        pack.unpack(output.log_probs).sum().backward()

    step(256)
    step(512)
    held = torch.cuda.memory_allocated() - before
    planned_held = (always["weights"] + always["gradients"]) / GIB
    what = f"trainer: GiB of weights and gradients, {name}"
    yield at_most(what, held / GIB, 1.1 * planned_held, planned=planned_held)

    for offload, memory in ((False, of_row), (True, of_offloaded)):
        how = f"{LENGTH:,} tokens, {name}{', offloaded' if offload else ''}"
        torch.cuda.reset_peak_memory_stats()
        step(LENGTH, offload=offload)
        peak = (torch.cuda.max_memory_allocated() - before - held) / GIB
        planned_peak = at(memory.peak, LENGTH) / GIB
        what = f"trainer: GiB of a row of {how}"
        yield at_most(what, peak, 1.1 * planned_peak, planned=planned_peak)
        seconds = timed(lambda offload=offload: step(LENGTH, offload=offload))
        yield fact(f"trainer: tokens a second, a row of {how}", LENGTH / seconds)

    free, _ = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    length = min(LONGEST, of_row.longest(int(0.95 * (free + cached))))
    torch.cuda.empty_cache()
    seconds = timed(lambda: step(length))
    note = f"as the plan says, without an optimizer, at most {LONGEST:,}; in {seconds:.0f} s"
    yield fact(f"trainer: tokens of the longest row, {name}", length, note)


if __name__ == "__main__":
    main()
