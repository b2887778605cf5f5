"""Linear attention and feed-forward parts of a packed row, computed in chunks of its tokens.

A row is depth first, so the ancestors of a token lie before it. A chunk is a stretch of the row.
The mixer of a layer (projections, convolution, recurrence, norm) runs once a chunk; in it

- the convolution gets the inputs of its ancestors before each piece of a segment,
- the recurrence runs level by level of the tree: each piece of a segment begins with the state
  after its parent.

A chunk hands inputs and states that later chunks continue to them. With several chunks, each is
under `torch.utils.checkpoint`: besides the row's own states, a layer holds the intermediate values
of one chunk at a time.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from rolltap.trainer.training.step.pack import PACK_ARGUMENT, Ints, Pack

CHUNK = 16384
"""Tokens that a layer computes at once. A row of so many fills a GPU; chunks of longer rows are
computed once more for the backward pass. A layer of Qwen3.5-4B holds 0.4 MB for each token of a
chunk with torch's formula."""

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
SCAN = "mamba2_chunk_scan"
FUSED_SCAN = "mamba2_split_conv1d_scan_combined"
"""Functions of transformers' models that look at other tokens, each with a kernel of a package or a
formula. Source: transformers 5.23, models/*/modeling_*.py,
use_kernel_func_from_hub_with_fallback."""

WITHOUT_STATE = "ShortConv"
"""How the names of mixers end that have the convolution alone (LFM2)."""

FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe")
"""Names of the part of a layer that looks at one token at a time."""

FORMULA_CHUNK = 64
"""Tokens that the formula of a delta rule multiplies at once."""


def compute_in_chunks(model: Any) -> None:
    """Let the linear attention of a causal language model take packs, and bound what its layers
    hold at once.

    PEFT, DDP or FSDP wrap the model after this. Calls without a pack give the same values as
    before, except under autocast: there linear attention stays in float32. Autocast would multiply
    in bfloat16, although the code has cast to float32. A mixer that is not known here leaks between
    branches, without an error: the probe finds that.
    """
    for layer in getattr(model.get_decoder(), "layers", ()):
        for module in layer.modules():
            if _is_mixer(module):
                _wrap_functions(sys.modules[type(module).__module__])
                _replace_forward(module, layer, _mix)
        for name in FEED_FORWARD:
            module = getattr(layer, name, None)
            if module is not None and takes_one_argument(module):
                feed_forward_in_chunks(module, layer)


def feed_forward_in_chunks(module: nn.Module, layer: nn.Module) -> None:
    """Let a part of a layer that looks at one token at a time compute a chunk of tokens at a
    time."""
    _replace_forward(module, layer, _feed_forward)


def takes_one_argument(module: nn.Module) -> bool:
    """Return True if the part of a layer takes hidden states alone: others take states of earlier
    tokens (RWKV)."""
    return len(inspect.signature(type(module).forward).parameters) == len(("self", "hidden"))


def _replace_forward(module: Any, layer: Any, function: Callable[..., Any]) -> None:
    # a bound method, not a closure: a copy of the module then has one of its own
    module.forward = MethodType(function, module)
    # transformers sets these of every module that has them, together with its layers'
    module.gradient_checkpointing = getattr(layer, "gradient_checkpointing", False)


def _run(
    module: Any,
    function: Callable[..., Any],
    *tensors: Tensor,
    several: bool,
) -> Any:
    """Call a function of one chunk. Of several, its intermediate values are computed again for the
    backward pass.

    All its tensors are arguments, because the layer's own checkpoint drops arguments, and keeps
    what a closure holds.
    """
    if several and module.gradient_checkpointing and torch.is_grad_enabled():
        return checkpoint(function, *tensors, use_reentrant=False)
    return function(*tensors)


# ------------------------------------------------------------------------------------ feed-forward
def _feed_forward(module: Any, hidden: Tensor) -> Any:
    """Return what `module` does for hidden states (B, T, H), a chunk of tokens at a time."""
    parts = hidden.flatten(0, 1)[None].split(CHUNK, 1)
    outputs = []
    start = 0
    for part in parts:
        tokens = slice(start, start + part.shape[1])
        compute = partial(_feed_forward_part, module, tokens)
        outputs.append(_run(module, compute, part, several=len(parts) > 1))
        start = tokens.stop
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, 1).view(hidden.shape)
    # gpt-oss: the scores (tokens, experts) of its router, too
    hidden_parts, scores = zip(*outputs, strict=True)
    return torch.cat(hidden_parts, 1).view(hidden.shape), torch.cat(scores)


def _feed_forward_part(module: Any, tokens: slice, part: Tensor) -> Any:
    replay = getattr(module, "routing_replay", None)
    if replay is None:
        return type(module).forward(module, part)
    return replay(module, part, tokens)


# -------------------------------------------------------------------------- chunks of a packed row
@dataclass(frozen=True)
class Chunk:
    """A stretch of a packed row: pieces of segments. Pieces count over the row, `levels` within the
    chunk."""

    begin: int
    lengths: list[int]
    """Tokens of each piece, in order."""
    first: int
    """Number of its first piece."""
    parents: list[int]
    """The piece before each piece, -1 at a root."""
    levels: list[list[int]]
    """Its pieces, those of each level after their parents."""
    handed_on: list[int]
    """Pieces of this chunk that pieces of later ones continue."""
    handed_on_inputs: Ints
    """Tokens of this chunk whose inputs the convolution reads in later ones."""
    tails: Tensor
    """Inputs that the convolution reads before each piece, (pieces * (width - 1),): 0 stands for
    zeros, the next indices for inputs that earlier chunks have handed on, then for its own."""


def cut(pack: Pack, size: int, width: int) -> list[Chunk]:
    """Return the chunks of `size` tokens of a pack, for a convolution that reads `width` tokens."""
    edges = np.arange(0, pack.tokens, size)
    begins = np.union1d(pack.begins, edges)
    lengths = np.diff(begins, append=pack.tokens)
    # the piece that holds each piece's parent token
    parents = np.searchsorted(begins, pack.above[begins], side="right") - 1
    tails = np.empty((len(begins), width - 1), np.int64)
    tokens = begins
    for column in reversed(range(width - 1)):
        tokens = np.where(tokens < 0, -1, pack.above[tokens])
        tails[:, column] = tokens

    chunks: list[Chunk] = []
    known = np.array([-1])
    bounds = np.searchsorted(begins, [*edges, pack.tokens])
    for first, last in pairwise(bounds.tolist()):
        begin = int(begins[first])
        end = begin + int(lengths[first:last].sum())
        levels: list[list[int]] = []
        depths: list[int] = []
        for piece, parent in enumerate(parents[first:last]):
            depth = depths[parent - first] + 1 if parent >= first else 0
            depths.append(depth)
            if depth == len(levels):
                levels.append([])
            levels[depth].append(piece)
        read = np.append(known, np.arange(begin, end))
        chunk = Chunk(
            begin=begin,
            lengths=lengths[first:last].tolist(),
            first=first,
            parents=parents[first:last].tolist(),
            levels=levels,
            handed_on=_distinct(parents[last:], first, last).tolist(),
            handed_on_inputs=_distinct(tails[last:], begin, end),
            tails=torch.from_numpy(np.searchsorted(read, tails[first:last].ravel())),
        )
        known = np.append(known, chunk.handed_on_inputs)
        chunks.append(chunk)
    return chunks


def _distinct(values: Ints, low: int, high: int) -> Ints:
    return np.unique(values[(values >= low) & (values < high)])


# ------------------------------------------------------------------------------------------ mixers
def _is_mixer(module: nn.Module) -> bool:
    """Return True if a module has a convolution, and no recurrence that is not known here."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or CONVOLUTION not in code.co_names:
        return False
    known = {*DELTA_RULES, SCAN}.intersection(code.co_names)
    return bool(known) or type(module).__name__.endswith(WITHOUT_STATE)


def _wrap_functions(namespace: Any) -> None:
    """Replace a module's functions by those that know packs, once."""
    wrappers = {CONVOLUTION: _Convolution, SCAN: _Scan, FUSED_SCAN: _FusedScan}
    wrappers |= dict.fromkeys(DELTA_RULES, _DeltaRule)
    for name, wrapper in wrappers.items():
        function = getattr(namespace, name, None)
        if function is not None and not isinstance(function, _Wrapped):
            setattr(namespace, name, wrapper(function))


class _Work:
    """A chunk of a mixer: what its functions take from earlier chunks, and what they leave."""

    def __init__(self, chunk: Chunk, inputs: list[Tensor], states: dict[int, Tensor]) -> None:
        self.chunk = chunk
        self.inputs = inputs
        """The convolution's inputs that earlier chunks have handed on, (1, channels, n) each."""
        self.states = states
        """State after the last token of pieces, (1, ...)."""
        self.inputs_handed_on: list[Tensor] = []


def _mix(mixer: Any, hidden_states: Tensor, **options: Any) -> Any:
    """Return the output of a mixer for hidden states (1, N, H)."""
    pack = options.pop(PACK_ARGUMENT, None)
    if pack is None:
        return type(mixer).forward(mixer, hidden_states, **options)
    # of padded rows, and of sampling
    options.pop("attention_mask", None)
    options.pop("cache_params", None)
    width = max(part.kernel_size[0] for part in mixer.modules() if isinstance(part, nn.Conv1d))
    chunks = pack.derive(cut, CHUNK, width)
    inputs: list[Tensor] = []
    states: dict[int, Tensor] = {}
    outputs = []
    parts = hidden_states.split([sum(chunk.lengths) for chunk in chunks], 1)
    for chunk, part in zip(chunks, parts, strict=True):
        compute = partial(_mix_chunk, mixer, options, chunk, list(states))
        tensors = [part, *states.values(), *inputs]
        output, new_inputs, new_states = _run(mixer, compute, *tensors, several=len(chunks) > 1)
        outputs.append(output)
        inputs += new_inputs
        states |= new_states
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs, 1)


def _mix_chunk(
    mixer: Any,
    options: dict[str, Any],
    chunk: Chunk,
    known: list[int],
    part: Tensor,
    *handed_on: Tensor,
) -> tuple[Tensor, list[Tensor], dict[int, Tensor]]:
    """Return the output of a chunk, and the inputs and states that later ones continue.

    `handed_on` are the states after the pieces `known`, then the inputs, of earlier chunks.
    """
    inputs = list(handed_on[len(known) :])
    states = dict(zip(known, handed_on, strict=False))
    work = _Work(chunk, inputs, states)
    output = type(mixer).forward(mixer, part, **options, **{PACK_ARGUMENT: work})
    # a mixer may have no states
    pieces = work.states.keys() & chunk.handed_on
    return output, work.inputs_handed_on, {piece: work.states[piece] for piece in pieces}


class _Wrapped:
    """A function of transformers that looks at other tokens."""

    def __init__(self, of_the_library: Callable[..., Any]) -> None:
        self.of_the_library = of_the_library

    def __call__(self, *args: Any, **options: Any) -> Any:
        work = options.pop(PACK_ARGUMENT, None)
        if work is None:
            return self.of_the_library(*args, **options)
        return self.packed(work, *args, **options)

    def packed(self, work: _Work, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


class _Convolution(_Wrapped):
    """The causal convolution (1, channels, N), by whichever kernel the model has for it."""

    def packed(
        self,
        work: _Work,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: Any = None,
        **options: Any,
    ) -> Any:
        chunk = work.chunk
        if len(chunk.handed_on_inputs):
            work.inputs_handed_on.append(x[..., chunk.handed_on_inputs - chunk.begin])
        if chunk.parents == [-1]:
            return self.of_the_library(x, weight, bias, activation=activation)
        read = torch.cat([x.new_zeros(*x.shape[:-1], 1), *work.inputs, x], -1)
        tails = read.index_select(-1, chunk.tails.to(x.device))
        before = len(chunk.tails) // len(chunk.lengths)
        pieces = []
        lengths = []
        own = x.split(chunk.lengths, -1)
        for tail, piece in zip(tails.split(before, -1), own, strict=True):
            pieces += [tail, piece]
            lengths += [before, piece.shape[-1]]
        out = self.of_the_library(torch.cat(pieces, -1), weight, bias, activation=activation)
        return torch.cat(out.split(lengths, -1)[1::2], -1)


class _FusedScan(_Wrapped):
    """The kernel of Mamba2's whole mixer, which knows no tree: the mixer goes on without it."""

    def packed(self, work: _Work, *args: Any, **options: Any) -> None:
        return None


Streams = list[list[Tensor]]
"""For each input of a recurrence its pieces, (1, n, ...)."""
OutputsAndStates = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Of each piece the output (1, n, ...), and the state after its last token (1, ...)."""
Call = Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]
"""Takes the inputs (rows, n, ...) of a recurrence and its states (rows, ...), and returns its
output and the last states."""


class _Recurrence(_Wrapped):
    """A function with a state, in float32 under autocast."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        with torch.autocast(args[0].device.type, enabled=False):
            return super().__call__(*args, **options)

    def by_level(
        self,
        work: _Work,
        streams: Sequence[Tensor],
        zero: Tensor,
        call: Call,
    ) -> Tensor:
        """Return the output (1, n, ...) for streams (1, n, ...). Each level of pieces begins with
        the states after their parents."""
        chunk = work.chunk
        pieces = [stream.split(chunk.lengths, 1) for stream in streams]
        outputs: list[Tensor] = [zero] * len(chunk.lengths)
        for level in chunk.levels:
            states = torch.cat([work.states.get(chunk.parents[piece], zero) for piece in level])
            own = [[stream[piece] for piece in level] for stream in pieces]
            found, last = self.level(own, states, call)
            for piece, output, after in zip(level, found, last, strict=True):
                outputs[piece] = output
                work.states[chunk.first + piece] = after
        return torch.cat(outputs, 1)

    def level(self, pieces: Streams, states: Tensor, call: Call) -> OutputsAndStates:
        # padding would change the states
        lengths = [piece.shape[1] for piece in pieces[0]]
        return _by_length(pieces, states, lengths, call)


class _DeltaRule(_Recurrence):
    """The gated delta rule."""

    knows_lengths = True
    """False once the library has said that it runs its formula, which takes no `cu_seqlens`."""

    def packed(self, work: _Work, *args: Tensor, **options: Any) -> Any:
        _, key, value = args
        streams = [*args, options.pop("g"), options.pop("beta")]
        heads, size = value.shape[2:]
        zero = value.new_zeros(1, heads, key.shape[-1], size, dtype=torch.float32)
        options["output_final_state"] = True

        def call(rows: Sequence[Tensor], states: Tensor, **more: Any) -> Any:
            *first, g, beta = rows
            given = {
                **options,
                **more,
                "g": g,
                "beta": beta,
                "initial_state": states,
            }
            return self.of_the_library(*first, **given)

        return self.by_level(work, streams, zero, call), None

    def level(self, pieces: Streams, states: Tensor, call: Any) -> OutputsAndStates:
        lengths = [piece.shape[1] for piece in pieces[0]]
        if len(lengths) == 1:
            out, last = call([piece for (piece,) in pieces], states)
            return [out], [last]
        if self.knows_lengths:
            offsets = torch.tensor([0, *np.cumsum(lengths)], device=states.device)
            try:
                out, last = call([torch.cat(own, 1) for own in pieces], states, cu_seqlens=offsets)
                return out.split(lengths, 1), last.split(1)
            except ValueError:
                self.knows_lengths = False

        def multiplied(rows: Sequence[Tensor], states: Tensor) -> Any:
            return call(rows, states, chunk_size=min(FORMULA_CHUNK, rows[0].shape[1]))

        # zeros change no state: a key of zeros writes nothing, and its decay is exp(0)
        return _by_length(pieces, states, [*map(padded_length, lengths)], multiplied)


def padded_length(length: int) -> int:
    """Return the length of the rows that a piece is computed with: so few lengths that many pieces
    are one call.

    A piece that is shorter than the formula's chunk is padded to a power of 2, a longer one by at
    most a quarter.
    """
    if length <= FORMULA_CHUNK:
        return 1 << (length - 1).bit_length()
    chunks = -(-length // FORMULA_CHUNK)
    step = 1 << max(0, chunks.bit_length() - 3)
    return -(-chunks // step) * step * FORMULA_CHUNK


class _Scan(_Recurrence):
    """The scan of Mamba2."""

    def packed(self, work: _Work, *args: Tensor, **options: Any) -> Any:
        x, dt, a, b, c = args
        options["return_final_states"] = True
        del options["initial_states"]  # None: there is no cache

        def call(rows: Sequence[Tensor], states: Tensor) -> Any:
            x, dt, b, c = rows
            return self.of_the_library(x, dt, a, b, c, initial_states=states, **options)

        zero = x.new_zeros(1, *x.shape[2:], b.shape[-1], dtype=torch.float32)
        return self.by_level(work, [x, dt, b, c], zero, call)


def _by_length(
    pieces: Streams,
    states: Tensor,
    lengths: Sequence[int],
    call: Call,
) -> OutputsAndStates:
    """Return outputs and states of pieces. Those of the same of `lengths` are rows of one call,
    with zeros after their tokens."""
    outputs: list[Tensor] = [states] * len(lengths)
    lasts: list[Tensor] = [states] * len(lengths)
    for length in sorted(set(lengths)):
        members = [piece for piece, own in enumerate(lengths) if own == length]
        rows = []
        for stream in pieces:
            filled = []
            for piece in members:
                x = stream[piece]
                filled.append(pad(x, (*[0, 0] * (x.ndim - 2), 0, length - x.shape[1])))
            rows.append(torch.cat(filled))
        out, last = call(rows, states[members])
        for row, piece in enumerate(members):
            outputs[piece] = out[row : row + 1, : pieces[0][piece].shape[1]]
            lasts[piece] = last[row : row + 1]
    return outputs, lasts
