"""Linear attention and feed-forward parts of a packed row, computed in chunks of its tokens.

A row is depth first, so the ancestors of a token lie before it. A chunk is a stretch of the row.
The mixer of a layer (projections, convolution, recurrence, norm) runs once a chunk; in it

- the convolution gets, before each stretch that does not follow the token before it, the inputs of
  its ancestors,
- the recurrence runs level by level of the tree: each piece of a segment begins with the state
  after its parent.

A chunk hands inputs and states that later chunks continue to them. With several chunks, each is
under `torch.utils.checkpoint`: besides the row's own states, a layer holds the intermediate values
of one chunk at a time.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from rolltap.trainer.training.step.pack import NAME, Ints, Pack

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
            if _has_known_mixer(module):
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


def _run(module: Any, function: Callable[..., Any], *arguments: Any, several: bool) -> Any:
    """Call a function of one chunk. Of several, its intermediate values are computed again for the
    backward pass."""
    if several and module.gradient_checkpointing and torch.is_grad_enabled():
        return checkpoint(function, *arguments, use_reentrant=False)
    return function(*arguments)


# ------------------------------------------------------------------------------------ feed-forward
def _feed_forward(module: Any, hidden: Tensor) -> Any:
    """Return what `module` does for hidden states (B, T, H), a chunk of tokens at a time."""
    parts = hidden.flatten(0, 1)[None].split(CHUNK, 1)
    outputs = []
    start = 0
    for part in parts:
        tokens = slice(start, start + part.shape[1])
        several = len(parts) > 1
        outputs.append(_run(module, _feed_forward_part, module, part, tokens, several=several))
        start = tokens.stop
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, 1).view(hidden.shape)
    # gpt-oss: the scores (tokens, experts) of its router, too
    hidden_parts, scores = zip(*outputs, strict=True)
    return torch.cat(hidden_parts, 1).view(hidden.shape), torch.cat(scores)


def _feed_forward_part(module: Any, part: Tensor, tokens: slice) -> Any:
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
    end: int
    lengths: list[int]
    """Tokens of each piece, in order."""
    first: int
    """Number of its first piece."""
    parents: list[int]
    """The piece before each piece, -1 at a root."""
    levels: list[list[int]]
    """Its pieces, those of each level after their parents."""
    given: list[int]
    """Pieces of earlier chunks that pieces of this one continue."""
    handed_on: list[int]
    """Pieces of this chunk that pieces of later ones continue."""
    given_inputs: Ints
    """Tokens of earlier chunks whose inputs the convolution reads here."""
    handed_on_inputs: Ints
    """Tokens of this chunk whose inputs the convolution reads in later ones."""
    runs: list[int]
    """Tokens of each stretch whose tokens follow one another on a path."""
    tails: Ints
    """Before each run the tokens that the convolution reads (runs, width - 1), -1 before the
    root."""


def chunks_of(pack: Pack, width: int) -> list[Chunk]:
    """Return the chunks of a pack for a convolution that reads `width` tokens. The pack's layers
    share them."""
    key = (__name__, CHUNK, width)
    if key not in pack.derived:
        pack.derived[key] = _cut(pack, width)
    found: list[Chunk] = pack.derived[key]
    return found


def _cut(pack: Pack, width: int) -> list[Chunk]:
    size = int(pack.ends[-1])
    edges = np.arange(0, size, CHUNK)
    begins = np.union1d(pack.begins, edges)
    ends = np.append(begins[1:], size)
    before = pack.above[begins]
    # the piece that holds each piece's parent token
    parents = np.where(before >= 0, np.searchsorted(begins, before, side="right") - 1, -1)
    firsts = np.searchsorted(begins, edges)
    lasts = np.append(firsts[1:], len(begins))
    tails = _ancestors(pack.above, begins, width - 1)

    chunks: list[Chunk] = []
    for begin, first, last in zip(edges, firsts, lasts, strict=True):
        end = int(ends[last - 1])
        own = parents[first:last]
        later = parents[last:]
        depths: list[int] = []
        for parent in own:
            depths.append(depths[parent - first] + 1 if parent >= first else 0)
        levels: list[list[int]] = [[] for _ in range(max(depths) + 1)]
        for piece, depth in enumerate(depths):
            levels[depth].append(piece)
        # a run begins where the convolution would read a token that is no ancestor, or lies before the chunk
        apart = before[first:last] != begins[first:last] - 1
        apart[0] = True
        run_starts = np.flatnonzero(apart)
        run_begins = begins[first:last][run_starts]
        read_here = tails[first:last][run_starts]
        read_later = tails[last:]
        chunk = Chunk(
            begin=int(begin),
            end=end,
            lengths=(ends[first:last] - begins[first:last]).tolist(),
            first=int(first),
            parents=own.tolist(),
            levels=levels,
            given=np.unique(own[(own >= 0) & (own < first)]).tolist(),
            handed_on=np.unique(later[(later >= first) & (later < last)]).tolist(),
            given_inputs=np.unique(read_here[(read_here >= 0) & (read_here < begin)]),
            handed_on_inputs=np.unique(read_later[(read_later >= begin) & (read_later < end)]),
            runs=np.diff([*run_begins, end]).tolist(),
            tails=read_here,
        )
        chunks.append(chunk)
    return chunks


def _ancestors(above: Ints, tokens: Ints, number: int) -> Ints:
    """Return the `number` tokens before each of `tokens` on its path (n, number), -1 before the
    root."""
    found = np.empty((len(tokens), number), np.int64)
    for column in reversed(range(number)):
        tokens = np.where(tokens >= 0, above[tokens], -1)
        found[:, column] = tokens
    return found


# ------------------------------------------------------------------------------------------ mixers
def _has_known_mixer(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    names = getattr(forward, "__code__", None)
    if names is None or CONVOLUTION not in names.co_names:
        return False
    has_rule = any(rule in names.co_names for rule in (*DELTA_RULES, SCAN))
    return has_rule or type(module).__name__.endswith(WITHOUT_STATE)


def _wrap_functions(namespace: Any) -> None:
    """Replace a module's functions by those that know packs, once."""
    wrappers = {CONVOLUTION: _Convolution, SCAN: _Scan, FUSED_SCAN: _FusedScan}
    wrappers |= dict.fromkeys(DELTA_RULES, _DeltaRule)
    for name, wrapper in wrappers.items():
        function = getattr(namespace, name, None)
        if function is not None and not isinstance(function, _Wrapped):
            setattr(namespace, name, wrapper(function))


Streams = Sequence[Sequence[Tensor]]
"""For each input of a recurrence its pieces, (1, n, ...)."""
OutputsAndStates = tuple[list[Tensor], list[Tensor]]
"""Of each piece the output (1, n, ...), and the state after its last token (1, ...)."""


class _Work:
    """Inputs of the functions of a mixer for a chunk, and results that they leave for later ones."""

    def __init__(self, chunk: Chunk, inputs: Tensor | None, states: Iterable[Tensor]) -> None:
        self.chunk = chunk
        self.inputs = inputs
        """The convolution's inputs of `chunk.given_inputs`, (1, channels, n)."""
        self.states = dict(zip(chunk.given, states, strict=False))
        """State after the last token of pieces, (1, ...)."""
        self.inputs_handed_on: Tensor | None = None

    def handed_on(self) -> list[Tensor]:
        return [self.states[piece] for piece in self.chunk.handed_on if piece in self.states]


def _mix(mixer: Any, hidden_states: Tensor, **options: Any) -> Any:
    """Return the output of a mixer for hidden states (1, N, H)."""
    pack = options.pop(NAME, None)
    if pack is None:
        return type(mixer).forward(mixer, hidden_states, **options)
    # of padded rows, and of sampling
    options.pop("attention_mask", None)
    options.pop("cache_params", None)
    width = max(part.kernel_size[0] for part in mixer.modules() if isinstance(part, nn.Conv1d))
    chunks = chunks_of(pack, width)
    inputs: dict[int, Tensor] = {}
    states: dict[int, Tensor] = {}
    outputs = []
    parts = hidden_states.split([chunk.end - chunk.begin for chunk in chunks], 1)
    for chunk, part in zip(chunks, parts, strict=True):
        given = [inputs[token] for token in chunk.given_inputs.tolist()]
        joined = torch.cat(given, -1) if given else None
        own = [states[piece] for piece in chunk.given if piece in states]
        arguments = (mixer, chunk, options, part, joined, *own)
        output, handed_on, *new = _run(mixer, _mix_chunk, *arguments, several=len(chunks) > 1)
        outputs.append(output)
        if handed_on is not None:
            inputs.update(zip(chunk.handed_on_inputs.tolist(), handed_on.split(1, -1), strict=True))
        states.update(zip(chunk.handed_on, new, strict=False))  # mixers without states have none
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


def _mix_chunk(
    mixer: Any,
    chunk: Chunk,
    options: dict[str, Any],
    part: Tensor,
    inputs: Tensor | None,
    *states: Tensor,
) -> tuple[Any, ...]:
    work = _Work(chunk, inputs, states)
    output = type(mixer).forward(mixer, part, **options, **{NAME: work})
    return output, work.inputs_handed_on, *work.handed_on()


class _Wrapped:
    def __init__(self, of_the_library: Callable[..., Any]) -> None:
        self.of_the_library = of_the_library


class _Convolution(_Wrapped):
    """The causal convolution (1, channels, N) of a chunk, by whichever kernel the model has for
    it."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: Any = None,
        **options: Any,
    ) -> Any:
        work = options.pop(NAME, None)
        if not isinstance(work, _Work):
            return self.of_the_library(x, weight, bias, activation=activation, **options)
        chunk = work.chunk
        if len(chunk.handed_on_inputs):
            work.inputs_handed_on = x[..., chunk.handed_on_inputs - chunk.begin]
        if len(chunk.runs) == 1 and not len(chunk.given_inputs):
            return self.of_the_library(x, weight, bias, activation=activation)
        before = chunk.tails.shape[1]
        tails = _tails(work, x).split(before, -1)
        runs = x.split(chunk.runs, -1)
        pieces = []
        lengths = []
        for tail, run in zip(tails, runs, strict=True):
            pieces += [tail, run]
            lengths += [before, run.shape[-1]]
        out = self.of_the_library(torch.cat(pieces, -1), weight, bias, activation=activation)
        of_runs = out.split(lengths, -1)[1::2]
        return torch.cat(of_runs, -1)


def _tails(work: _Work, x: Tensor) -> Tensor:
    """Return the inputs before the runs of a chunk (1, channels, runs * (width - 1))."""
    chunk = work.chunk
    earlier = [] if work.inputs is None else [work.inputs]
    source = torch.cat([x.new_zeros(*x.shape[:-1], 1), *earlier, x], -1)
    tokens = chunk.tails.ravel()
    within = 1 + len(chunk.given_inputs) + tokens - chunk.begin
    before = 1 + np.searchsorted(chunk.given_inputs, tokens)
    index = np.where(tokens >= chunk.begin, within, np.where(tokens >= 0, before, 0))
    return source.index_select(-1, torch.from_numpy(index).to(x.device))


class _DeltaRule(_Wrapped):
    """The gated delta rule, in float32 under autocast."""

    knows_lengths = True
    """False once the library has said that it runs its formula, which takes no `cu_seqlens`."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        work = options.pop(NAME, None)
        with torch.autocast(query.device.type, enabled=False):
            if not isinstance(work, _Work):
                return self.of_the_library(query, key, value, **options)
            streams = [query, key, value, options.pop("g"), options.pop("beta")]
            heads, size = value.shape[2:]
            zero = value.new_zeros(1, heads, key.shape[-1], size, dtype=torch.float32)
            options["output_final_state"] = True

            def level(pieces: Streams, state: Tensor) -> OutputsAndStates:
                return self._level(pieces, state, options)

            return _by_level(work, streams, zero, level), None

    def _level(self, pieces: Streams, state: Tensor, options: dict[str, Any]) -> OutputsAndStates:
        lengths = [piece.shape[1] for piece in pieces[0]]
        if len(lengths) == 1:
            out, last = self._call([piece for (piece,) in pieces], state, options)
            return [out], [last]
        if self.knows_lengths:
            offsets = torch.tensor([0, *np.cumsum(lengths)], device=state.device)
            try:
                joined = [torch.cat([*each], 1) for each in pieces]
                out, last = self._call(joined, state, {**options, "cu_seqlens": offsets})
                return [*out.split(lengths, 1)], [*last.split(1)]
            except ValueError:
                self.knows_lengths = False

        def group(rows: Sequence[Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
            multiplied = {"chunk_size": min(FORMULA_CHUNK, rows[0].shape[1])}
            return self._call(rows, states, {**options, **multiplied})

        # zeros change no state: a key of zeros writes nothing, and its decay is exp(0)
        return _by_length(pieces, state, [*map(padded_length, lengths)], group)

    def _call(self, streams: Sequence[Tensor], state: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        query, key, value, g, beta = streams
        options = {**options, "g": g, "beta": beta, "initial_state": state}
        found: tuple[Tensor, Tensor] = self.of_the_library(query, key, value, **options)
        return found


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


class _Scan(_Wrapped):
    """The scan of Mamba2, in float32 under autocast."""

    def __call__(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any) -> Any:
        work = options.pop(NAME, None)
        with torch.autocast(x.device.type, enabled=False):
            if not isinstance(work, _Work):
                return self.of_the_library(x, dt, a, b, c, **options)
            options["return_final_states"] = True
            del options["initial_states"]  # None: there is no cache

            def group(rows: Sequence[Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
                x, dt, b, c = rows
                found = self.of_the_library(x, dt, a, b, c, initial_states=states, **options)
                out, last = found
                return out, last

            def level(pieces: Streams, state: Tensor) -> OutputsAndStates:
                # padding would change the states
                lengths = [piece.shape[1] for piece in pieces[0]]
                return _by_length(pieces, state, lengths, group)

            zero = x.new_zeros(1, *x.shape[2:], b.shape[-1], dtype=torch.float32)
            return _by_level(work, [x, dt, b, c], zero, level)


class _FusedScan(_Wrapped):
    """The kernel of Mamba2's whole mixer, which knows no tree: the mixer goes on without it."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        if options.pop(NAME, None) is not None:
            return None
        return self.of_the_library(*args, **options)


def _by_level(
    work: _Work,
    streams: Sequence[Tensor],
    zero: Tensor,
    run: Callable[[Streams, Tensor], OutputsAndStates],
) -> Tensor:
    """Return the output (1, n, ...) of a recurrence for streams (1, n, ...). Each level of pieces
    begins with the states after their parents. `run` takes for each stream its pieces, and states
    (pieces, ...)."""
    chunk = work.chunk
    pieces = [stream.split(chunk.lengths, 1) for stream in streams]
    outputs: list[Tensor] = [zero] * len(chunk.lengths)
    for level in chunk.levels:
        state = torch.cat([work.states.get(chunk.parents[piece], zero) for piece in level])
        found, last = run([[own[piece] for piece in level] for own in pieces], state)
        for piece, output, after in zip(level, found, last, strict=True):
            outputs[piece] = output
            work.states[chunk.first + piece] = after
    return torch.cat(outputs, 1)


def _by_length(
    pieces: Streams,
    state: Tensor,
    lengths: Sequence[int],
    run: Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]],
) -> OutputsAndStates:
    """Return outputs and states of pieces, (1, n, ...) and (1, ...) each. Those of the same of
    `lengths` are rows of one call, with zeros after their tokens."""
    number = len(lengths)
    outputs: list[Tensor] = [state] * number
    states: list[Tensor] = [state] * number
    for length in sorted(set(lengths)):
        members = [piece for piece in range(number) if lengths[piece] == length]
        rows = []
        for own in pieces:
            filled = []
            for piece in members:
                missing = length - own[piece].shape[1]
                filled.append(pad(own[piece], (*[0, 0] * (own[piece].ndim - 2), 0, missing)))
            rows.append(torch.cat(filled))
        out, last = run(rows, state[members])
        for row, piece in enumerate(members):
            outputs[piece] = out[row : row + 1, : pieces[0][piece].shape[1]]
            states[piece] = last[row : row + 1]
    return outputs, states
