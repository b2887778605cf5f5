"""Attention of packs: which pairs it multiplies, and what it computes of them."""

import math
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step import attention
from rolltap.trainer.training.step.attention import block_mask, make_tiles
from rolltap.trainer.training.step.pack import NAME, Pack
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


@given(many_sessions(), WINDOWS, st.booleans())
@example([branching_rows()], None, False)
def test_each_pair_that_is_seen_is_in_one_tile_and_no_other_is(sessions, window, masked):
    pack = Pack(sessions)
    found = torch.zeros(pack.tokens, pack.tokens, dtype=torch.int)
    with patch.object(attention, "TILE", 5):
        for tile in make_tiles(pack, window, masked=masked):
            part = found[tile.queries][:, tile.keys]
            shown = torch.ones_like(part)
            if tile.causal:
                shown = shown.tril()
            if tile.hidden is not None:
                shown = shown.masked_fill(tile.hidden, 0)
            every = torch.arange(pack.tokens)
            found[every[tile.queries][:, None], every[tile.keys][None]] += shown
            # the first tile of a query has its own key
            assert tile.joins or not (found[tile.queries, tile.queries].diagonal() == 0).any()
    assert torch.equal(found, seen_of(pack, window).int())


@given(many_sessions())
def test_a_query_is_in_few_tiles_whose_keys_are_not_copied(sessions):
    pack = Pack(sessions)
    number = torch.zeros(pack.tokens)
    for tile in make_tiles(pack, None):
        assert tile.hidden is None
        assert isinstance(tile.keys, slice)
        number[tile.queries] += 1
    assert number.max() <= 1 + math.log2(pack.tokens)


@given(many_sessions(), WINDOWS)
def test_nothing_is_seen_outside_of_the_blocks_and_a_whole_block_is_seen_by_all(sessions, window):
    pack = Pack(sessions)
    with patch.object(attention, "BLOCK", 4):
        mask = block_mask(pack, window)
        again = block_mask(pack, window)
    assert again is mask
    length = mask.seq_lengths[0]
    assert length - pack.tokens in range(4)
    wanted = torch.eye(length, dtype=torch.bool)
    wanted[: pack.tokens, : pack.tokens] = seen_of(pack, window)
    every = torch.arange(length)
    assert torch.equal(mask.mask_mod(None, None, every[:, None], every[None]), wanted)
    parts = wanted.view(length // 4, 4, length // 4, 4)
    some = listed(mask.kv_num_blocks, mask.kv_indices)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (parts.any(3).any(1) & ~some & ~whole).any()
    assert parts.all(3).all(1)[whole].all()
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
    """Random queries, keys and values, of which the last have the size `width`, and sinks."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, HEADS, tokens, SIZE, generator=generator)
    key = torch.randn(1, groups, tokens, SIZE, generator=generator)
    value = torch.randn(1, groups, tokens, width, generator=generator)
    sinks = torch.randn(HEADS, generator=generator)
    return [x.to(dtype).requires_grad_() for x in (query, key, value, sinks)]


def formula(pack: Pack, leaves: list[torch.Tensor], window: int | None, cap: float | None, sinks: bool):
    """Attention in float64 with a mask of N x N, (1, N, heads, size)."""
    q, k, v, s = (x.double() for x in leaves)
    k, v = (x.repeat_interleave(HEADS // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * SIZE**-0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen_of(pack, window), -torch.inf)
    if sinks:
        scores = torch.cat([scores, s.view(1, -1, 1, 1).expand(-1, -1, pack.tokens, 1)], -1)
    return (scores.softmax(-1)[..., : pack.tokens] @ v).transpose(1, 2)


def call(pack: Pack | None, leaves: list[torch.Tensor], sinks: bool = False, config=None, **options):
    name = attention.register("sdpa")
    module = torch.nn.Module()
    module.config = config or SimpleNamespace()
    module.is_causal = True
    module.num_key_value_groups = HEADS // leaves[1].shape[1]
    if sinks:
        options["s_aux"] = leaves[3]
    if pack is not None:
        options[NAME] = pack
    return AttentionInterface()[name](module, *leaves[:3], None, scaling=SIZE**-0.5, **options)[0]


@pytest.mark.parametrize(
    ("window", "cap", "sinks", "groups", "width"),
    [
        (None, None, False, 2, SIZE),
        (None, None, True, 1, 12),
        (WINDOW, None, True, 2, 20),
        (None, 2.0, False, 1, 12),
        (WINDOW, 2.0, True, 2, 20),
    ],
)
def test_values_and_gradients_are_those_of_the_formula(window, cap, sinks, groups, width):
    pack = Pack([branching_rows()])
    leaves = tensors(pack.tokens, groups, width)
    used = leaves if sinks else leaves[:3]
    wanted = formula(pack, leaves, window, cap, sinks)
    found = call(pack, leaves, sinks, sliding_window=window, softcap=cap)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(found, used, upstream)
    exact = torch.autograd.grad(wanted, used, upstream.double())
    for one, other in zip(gradients, exact, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


def test_low_precision_is_joined_in_float32():
    pack = Pack([branching_rows()])
    leaves = tensors(pack.tokens, dtype=torch.bfloat16)
    wanted = formula(pack, leaves, None, None, sinks=False)
    with torch.autocast("cpu", torch.bfloat16):
        # the query as rotary embeddings leave it
        found = call(pack, [leaves[0].float(), *leaves[1:]])
    assert found.dtype == torch.bfloat16
    # half a unit in the last place of bfloat16, twice: of the output of a tile, and of the sum
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=2**-8)


def test_a_window_that_hides_nothing_needs_no_masks():
    pack = Pack([branching_rows()])
    assert all(tile.hidden is not None for tile in make_tiles(pack, pack.depth - 1))
    assert [*make_tiles(pack, pack.depth)] == [*make_tiles(pack, None)]


def test_attention_that_packs_cannot_have_is_refused():
    pack = Pack([[make_row([1, 2, 3])]])
    leaves = tensors(pack.tokens)
    with pytest.raises(InputError, match="dropout"):
        call(pack, leaves, dropout=0.1)
    with pytest.raises(InputError, match="dropout, or a bias"):
        call(pack, leaves, position_bias=torch.zeros(1))
    with pytest.raises(InputError, match="chunks of positions"):
        call(pack, leaves, config=SimpleNamespace(attention_chunk_size=8))


def packs(lengths: tuple[int, ...]) -> list[Pack]:
    """A pack of two rows for each length, with a common prompt."""
    found = []
    for length in lengths:
        prompt = [*range(length // 2)]
        scored = range(length // 2 + 1, length // 2 + length // 4)
        rows = [make_row(prompt + [token] * (length // 4), scored) for token in (7, 8)]
        found.append(Pack([rows]))
    return found


@pytest.fixture
def nothing_compiled():
    """Forget the lengths that other tests have compiled for: torch's compiler for the CPU fails at several."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def flex(compiled, pack: Pack, window: int | None) -> None:
    """Compare compiled FlexAttention, without gradients, with the tiles."""
    leaves = tensors(pack.tokens)
    options = {"scaling": SIZE**-0.5}
    module = SimpleNamespace(training=True)
    kernel = "transformers.integrations.flex_attention.WrappedFlexAttention"
    with torch.no_grad(), patch(kernel, lambda training: lambda: compiled):
        found = attention._on_cuda(module, *leaves[:3], pack, window, options)
        wanted = call(pack, leaves, sliding_window=window)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("nothing_compiled")
def test_flex_attention_compiles_for_the_first_length_and_once_for_all_others():
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter)
    for pack in packs((300, 700, 1100, 2000)):
        flex(compiled, pack, None)
    assert counter.frame_count == 2


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("window", [None, WINDOW])
def test_the_compiled_kernel_of_the_cpu_gives_what_tiles_give(window):
    flex(torch.compile(flex_attention), Pack([branching_rows()]), window)
