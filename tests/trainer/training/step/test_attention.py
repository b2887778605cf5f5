"""Attention of packs: which pairs it multiplies, and what it computes of them."""

import gc
import math
import weakref
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step import attention
from rolltap.trainer.training.step.attention import block_mask, keys_of, stretches
from rolltap.trainer.training.step.pack import PACK_ARGUMENT, Pack
from tests.trainer.training.step.small_models import WINDOW, branching_rows, make_row
from tests.trainer.training.step.test_pack import ancestors, many_sessions

WINDOWS = st.sampled_from([None, 1, 3, 10])
HEADS = 4
SIZE = 16


def seen_of(pack: Pack, window: int | None) -> torch.Tensor:
    """The keys that each query sees, by definition, (N, N)."""
    seen = ancestors(pack)
    if window is not None:
        positions = pack.positions[0]
        seen &= positions[:, None] - positions < window
    return seen


@given(many_sessions())
@example([branching_rows()])
def test_each_pair_that_is_seen_is_in_one_of_few_stretches_and_no_other_is(sessions):
    pack = Pack(sessions)
    found = torch.zeros(pack.tokens, pack.tokens, dtype=torch.int)
    number = torch.zeros(pack.tokens)
    for queries, keys in stretches(pack):
        shown = torch.ones_like(found[queries, keys])
        found[queries, keys] += shown.tril() if queries == keys else shown
        number[queries] += 1
        # the first stretch of a query has its own key
        assert (found[queries, queries].diagonal() == 1).all()
    assert torch.equal(found, seen_of(pack, None).int())
    assert number.max() <= 1 + math.log2(pack.tokens)


@given(many_sessions(), WINDOWS, st.integers(1, 9))
def test_a_tile_has_all_keys_that_its_queries_see(sessions, window, size):
    pack = Pack(sessions)
    wanted = seen_of(pack, window)
    for begin in range(0, pack.tokens, size):
        queries = slice(begin, min(begin + size, pack.tokens))
        keys, hidden = keys_of(pack, queries, window or pack.depth)
        found = torch.zeros_like(wanted[queries])
        found[:, keys] = ~hidden
        assert torch.equal(found, wanted[queries])


@given(many_sessions(), WINDOWS)
def test_nothing_is_seen_outside_of_the_blocks_and_a_whole_block_is_seen_by_all(sessions, window):
    pack = Pack(sessions)
    with patch.object(attention, "BLOCK", 4):
        mask = block_mask(pack, window)
    length = mask.seq_lengths[0]
    assert length - pack.tokens in range(4)
    wanted = torch.eye(length, dtype=torch.bool)
    wanted[: pack.tokens, : pack.tokens] = seen_of(pack, window)
    every = torch.arange(length)
    assert torch.equal(mask.mask_mod(None, None, every[:, None], every[None]), wanted)
    blocks = wanted.view(length // 4, 4, length // 4, 4).transpose(1, 2).flatten(2)
    some = listed(mask.kv_num_blocks, mask.kv_indices)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (blocks.any(2) & ~some & ~whole).any()
    assert blocks.all(2)[whole].all()
    assert not (some & whole).any()


def listed(numbers: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The blocks of keys that a mask lists for each block of queries, (n, n)."""
    found = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, (number, which) in enumerate(zip(numbers[0, 0], indices[0, 0], strict=True)):
        found[row, which[:number].long()] = True
    return found


def tensors(
    tokens: int,
    groups: int = 2,
    width: int = SIZE,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Random queries, keys and values, of which the last have the size `width`."""
    generator = torch.Generator().manual_seed(0)
    leaves = []
    for heads, size in ((HEADS, SIZE), (groups, SIZE), (groups, width)):
        leaf = torch.randn(1, heads, tokens, size, generator=generator)
        leaves.append(leaf.to(dtype).requires_grad_())
    return leaves


def formula(pack: Pack, leaves: list[torch.Tensor], window: int | None) -> torch.Tensor:
    """Attention in float64 with a mask of N x N, (1, N, heads, size)."""
    q, k, v = (x.double() for x in leaves)
    k, v = (x.repeat_interleave(HEADS // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * SIZE**-0.5
    scores = scores.masked_fill(~seen_of(pack, window), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def call(pack: Pack, leaves: list[torch.Tensor], config=None, **options) -> torch.Tensor:
    name = attention.register("sdpa")
    module = torch.nn.Module()
    module.config = config or SimpleNamespace()
    module.num_key_value_groups = HEADS // leaves[1].shape[1]
    options[PACK_ARGUMENT] = pack
    return AttentionInterface()[name](module, *leaves, None, scaling=SIZE**-0.5, **options)[0]


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("groups", "width"), [(2, SIZE), (1, 12), (4, 20)])
def test_values_and_gradients_are_those_of_the_formula(window, groups, width):
    pack = Pack([branching_rows()[:8]])
    leaves = tensors(pack.tokens, groups, width)
    wanted = formula(pack, leaves, window)
    found = call(pack, leaves, sliding_window=window)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(found, leaves, upstream)
    exact = torch.autograd.grad(wanted, leaves, upstream.double())
    for one, other in zip(gradients, exact, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("window", [None, WINDOW])
def test_low_precision_is_joined_in_float32(window):
    pack = Pack([branching_rows()])
    leaves = tensors(pack.tokens, dtype=torch.bfloat16)
    wanted = formula(pack, leaves, window)
    with torch.autocast("cpu", torch.bfloat16):
        # the query as rotary embeddings leave it
        found = call(pack, [leaves[0].float(), *leaves[1:]], sliding_window=window)
    assert found.dtype == torch.bfloat16
    # half a unit in the last place of bfloat16, twice: of the output of a stretch, and of the sum
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=2**-8)


def test_a_window_that_hides_nothing_needs_no_masks():
    pack = Pack([branching_rows()])
    leaves = tensors(pack.tokens)
    with patch.object(attention, "in_tiles") as masked:
        found = call(pack, leaves, sliding_window=pack.depth)
        assert not masked.called
        call(pack, leaves, sliding_window=pack.depth - 1)
        assert masked.called
    assert torch.equal(found, call(pack, leaves))


def test_a_checkpointed_layer_keeps_no_queries_keys_or_values():
    pack = Pack([branching_rows()])
    held = weakref.WeakSet()

    def layer(hidden):
        leaves = [hidden * 2, hidden * 3, hidden * 4]
        held.update(leaves)
        return call(pack, leaves, sliding_window=3)

    hidden = torch.randn(1, HEADS, pack.tokens, SIZE, requires_grad=True)
    output = checkpoint(layer, hidden, use_reentrant=False)
    gc.collect()
    assert not len(held)
    output.sum().backward()
    assert hidden.grad is not None


def test_attention_in_chunks_of_positions_is_refused():
    pack = Pack([[make_row([1, 2, 3])]])
    with pytest.raises(InputError, match="chunks of positions"):
        call(pack, tensors(pack.tokens), config=SimpleNamespace(attention_chunk_size=8))


@pytest.fixture
def nothing_compiled():
    """Forget the lengths of other tests: torch's compiler for the CPU fails at several."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def flex(compiled, pack: Pack, window: int | None) -> None:
    """Compare compiled FlexAttention, without gradients, with that of the CPU."""
    leaves = tensors(pack.tokens)
    module = SimpleNamespace(training=True)
    kernel = "transformers.integrations.flex_attention.WrappedFlexAttention"
    with torch.no_grad(), patch(kernel, lambda training: lambda: compiled):
        found = attention.on_cuda(module, *leaves, pack, window, scaling=SIZE**-0.5)
        wanted = call(pack, leaves, sliding_window=window)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("nothing_compiled")
def test_flex_attention_compiles_for_the_first_length_and_once_for_all_others():
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter)
    for length in (150, 300, 420, 700):
        prompt = [*range(length // 2)]
        rows = [make_row(prompt + [token] * (length // 4)) for token in (7, 8)]
        flex(compiled, Pack([rows]), None)
    assert counter.frame_count == 2


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("window", [None, WINDOW])
def test_flex_attention_compiled_for_the_cpu_gives_what_packs_have_there(window):
    flex(torch.compile(flex_attention), Pack([branching_rows()]), window)
