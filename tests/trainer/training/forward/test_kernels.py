"""Attention in parts, against one softmax over all keys."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rolltap.trainer.training.forward import kernels
from rolltap.trainer.training.forward.kernels import Kernel, Spans, join
from tests.trainer.training.forward import flash

HEADS = 6


def whole(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, cap: float | None) -> Tensor:
    """The definition: each query's softmax over the keys that it sees, in float64."""
    query, key, value = query.double(), *(x.double().repeat_interleave(HEADS // x.shape[1], 1) for x in (key, value))
    outs, q, k = [], 0, 0
    for n, m in zip(spans.queries, spans.keys, strict=True):
        scores = torch.einsum("nhd,mhd->hnm", query[q : q + n], key[k : k + m]) * scale
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        if spans.causal:
            apart = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
            scores = scores.masked_fill((apart > 0) | (apart <= -(spans.window or m + n)), float("-inf"))
        outs.append(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value[k : k + m]))
        q, k = q + n, k + m
    return torch.cat(outs)


def tensors(
    spans: Spans, size: int, width: int, dtype: torch.dtype, keys: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    n, m = sum(spans.queries), sum(spans.keys)
    shapes = ((n, HEADS, size), (m, keys, size), (m, keys, width), (n, HEADS, width))
    query, key, value, grad = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return query, key, value, grad


SPANS = {
    "own": lambda: Spans([5, 1, 40], [5, 1, 40]),
    "all": lambda: Spans([9, 3], [30, 7], causal=False),
    "window": lambda: Spans([5, 40], [9, 45], window=6),
}


@pytest.mark.parametrize("kind", SPANS)
@pytest.mark.parametrize(("cap", "width"), [*product([None, 2.0], [8, 4, 16])])
@pytest.mark.parametrize(("dtype", "keys"), [(torch.float32, 1), (torch.float32, 6), (torch.bfloat16, 2)])
def test_outputs_and_gradients_are_those_of_the_definition(kind, dtype, keys, cap, width, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "SCORES", 2000)
    spans = SPANS[kind]()
    query, key, value, grad = tensors(spans, 8, width, dtype, keys)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    wanted = whole(*leaves, spans, 0.3, cap)
    wanted_gradients = torch.autograd.grad(wanted, leaves, grad.double())
    kernel = Kernel(query, value, 0.3, cap)
    out, lse = kernel.forward(query, key, value, spans)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(out.double(), wanted.detach(), rtol=tolerance, atol=tolerance)
    for got, one in zip(kernel.backward(grad, query, key, value, out, lse, spans), wanted_gradients, strict=True):
        torch.testing.assert_close(got.double(), one.double(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Take tensors for those of a GPU, whose kernels are `flash`. The names of those that are called."""
    called: list[str] = []

    def kernel(name, function):
        def call(*args, **kwargs):
            called.append(name)
            return function(*args, **kwargs)

        return call

    stand_in = SimpleNamespace(
        _flash_attention_forward=kernel("forward", flash.forward),
        _flash_attention_backward=kernel("backward", flash.backward),
    )
    monkeypatch.setattr(kernels, "aten", stand_in)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **options: self)
    return called


@pytest.mark.parametrize("kind", SPANS)
@pytest.mark.parametrize(("size", "width", "keys"), [(16, 16, 2), (24, 8, 6), (8, 8, 1)])
def test_what_the_kernels_of_cuda_are_asked_for_is_the_definition(kind, size, width, keys, calls):
    spans = SPANS[kind]()
    query, key, value, grad = tensors(spans, size, width, torch.bfloat16, keys)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    wanted = whole(*leaves, spans, 0.3, None)
    wanted_gradients = torch.autograd.grad(wanted, leaves, grad.double())
    kernel = Kernel(query, value, 0.3)
    out, lse = kernel.forward(query, key, value, spans)
    torch.testing.assert_close(out.double(), wanted.detach(), rtol=0.03, atol=0.03)
    # those of some tokens among more, and of heads before tokens
    lse = torch.nn.functional.pad(lse, (1, 0))[:, 1:]
    grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    found = kernel.backward(grad, query, key, value, out, lse, spans)
    for got, one in zip(found, wanted_gradients, strict=True):
        torch.testing.assert_close(got.double(), one, rtol=0.03, atol=0.03)
    assert calls == ["forward", "backward"]


def test_the_kernels_of_cuda_are_those_of_flash_attention_for_16_bits_alone(calls):
    spans = SPANS["own"]()
    for dtype, size, cap in ((torch.float32, 16, None), (torch.bfloat16, 12, None), (torch.bfloat16, 16, 2.0)):
        query, key, value, grad = tensors(spans, size, size, dtype)
        kernel = Kernel(query, value, 0.3, cap)
        kernel.backward(grad, query, key, value, *kernel.forward(query, key, value, spans), spans)
    assert calls == []


@pytest.mark.parametrize("cap", [None, 2.0])
def test_parts_that_are_joined_are_the_whole(cap):
    both = Spans([7], [20])
    query, key, value, grad = tensors(both, 8, 8, torch.float32)
    kernel = Kernel(query, value, 0.3, cap)
    wanted = kernel.forward(query, key, value, both)
    wanted_gradients = kernel.backward(grad, query, key, value, *wanted, both)
    cuts = [(slice(13, 20), Spans([7], [7]))]
    cuts += [(at, Spans([7], [at.stop - at.start], causal=False)) for at in (slice(0, 6), slice(6, 13))]
    parts = [kernel.forward(query, key[at], value[at], spans) for at, spans in cuts]
    out, lse = parts[0]
    for part in parts[1:]:
        join(out, lse, *part)
    torch.testing.assert_close((out, lse), wanted)
    found = [kernel.backward(grad, query, key[at], value[at], out, lse, spans) for at, spans in cuts]
    torch.testing.assert_close(sum(dq for dq, _, _ in found), wanted_gradients[0])
    for at, (_, dk, dv) in zip((at for at, _ in cuts), found, strict=True):
        torch.testing.assert_close((dk, dv), (wanted_gradients[1][at], wanted_gradients[2][at]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention on CUDA needs a GPU")
@pytest.mark.parametrize("kind", SPANS)
@pytest.mark.parametrize(("size", "width"), [(64, 64), (192, 128), (512, 512)])
def test_kernels_of_cuda_are_those_of_the_cpu(kind, size, width):
    spans = SPANS[kind]()
    inputs = tensors(spans, size, width, torch.bfloat16)
    found = []
    for device in ("cpu", "cuda"):
        query, key, value, grad = (x.to(device) for x in inputs)
        kernel = Kernel(query, value, 0.1)
        out, lse = kernel.forward(query, key, value, spans)
        found.append([x.float().cpu() for x in (out, lse, *kernel.backward(grad, query, key, value, out, lse, spans))])
    torch.testing.assert_close(found[1], found[0], rtol=0.03, atol=0.03)
