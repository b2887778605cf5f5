"""Keys and values of a forest of segments, and batches of segments that read them.

The forest is cut into paths, each of which goes on with the child that has the most segments below it (heavy paths,
Sleator and Tarjan, https://doi.org/10.1016/0022-0000(83)90006-5). So the ancestors of a segment lie on few paths, at
most 1 + log2 of the number of segments, and are a slice of each. A path's keys lie in one buffer for each layer, and
their gradients in another in float32: sums in bfloat16 would lose small ones.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolltap.trainer.training.forward.forest import Segment
from rolltap.trainer.training.forward.kernels import Spans

POSITIONS = 16384
"""Positions that tokens attend to at once: their gradients are copies until they are added."""


class Slice(NamedTuple):
    """Positions of a path."""

    path: int
    start: int
    end: int


Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients, each (tokens, heads, size)."""


class Paths:
    """The paths of a forest, with the keys and values of its inner segments in each layer that has attention."""

    def __init__(self, segments: Sequence[Segment], *, offload: bool = False) -> None:
        """With `offload` keys, values and gradients rest in pinned memory of the CPU."""
        self._segments, self._offload = segments, offload
        below = Counter(range(len(segments)))
        for k in reversed(range(len(segments))):
            below[segments[k].parent] += below[k]
        heavy: dict[int, int] = {}
        for k, segment in enumerate(segments):
            if segment.inner and below[k] > below.get(heavy.get(segment.parent, -2), 0):
                heavy[segment.parent] = k
        self._of: dict[int, int] = {}
        self._heads: list[int] = []
        self._ends: dict[int, int] = {}
        for k, segment in enumerate(segments):
            if segment.inner:
                goes_on = segment.parent >= 0 and heavy[segment.parent] == k
                path = self._of[k] = self._of[segment.parent] if goes_on else len(self._heads)
                self._heads += [] if goes_on else [k]
                self._ends[path] = segment.end
        self._buffers: defaultdict[int, dict[int, Pair]] = defaultdict(dict)
        self._gradients: defaultdict[int, dict[int, Pair]] = defaultdict(dict)

    @property
    def tensors(self) -> list[Tensor]:
        """The keys and values that are kept, layer by layer, then their gradients."""
        kept = [*self._buffers.values(), *self._gradients.values()]
        return [tensor for layers in kept for pair in layers.values() for tensor in pair]

    def own(self, segment: int) -> Slice | None:
        """Return the slice that a segment fills, if others continue it."""
        piece = self._segments[segment]
        return Slice(self._of[segment], piece.start, piece.end) if segment in self._of else None

    def before(self, segment: int) -> list[Slice]:
        """Return the slices that a segment's ancestors fill, in order of position."""
        found: list[Slice] = []
        above = self._segments[segment].parent
        while above >= 0:
            path = self._of[above]
            head = self._segments[self._heads[path]]
            found.insert(0, Slice(path, head.start, self._segments[above].end))
            above = head.parent
        return found

    def write(self, at: Slice, layer: int, pair: Pair) -> None:
        """Keep the keys and values of a slice."""
        for buffer, new in zip(self._pair(self._buffers, at, layer, pair, None), pair, strict=True):
            buffer.copy_(new)

    def read(self, at: Slice, layer: int, device: torch.device) -> Pair:
        """Return the keys and values of a slice."""
        keys, values = self._view(self._buffers[at.path][layer], at)
        return keys.to(device, non_blocking=True), values.to(device, non_blocking=True)

    def add(self, at: Slice, layer: int, pair: Pair) -> None:
        """Add to the gradients of a slice."""
        for total, new in zip(self._pair(self._gradients, at, layer, pair, torch.float32), pair, strict=True):
            total.copy_(total.to(new.device).add_(new))

    def gradients(self, at: Slice, layer: int, device: torch.device) -> Pair | None:
        """Return the gradients of a slice, float32, or None if nothing was added to its path."""
        if layer not in self._gradients[at.path]:
            return None
        keys, values = self._view(self._gradients[at.path][layer], at)
        return keys.to(device), values.to(device)

    def free(self, segment: int) -> None:
        """Drop what is kept of the path that begins with a segment, if one does: its others are read no longer."""
        path = self._of.get(segment, -1)
        if path >= 0 and self._heads[path] == segment:
            self._buffers.pop(path, None)
            self._gradients.pop(path, None)

    def _pair(
        self, kept: dict[int, dict[int, Pair]], at: Slice, layer: int, like: Pair, dtype: torch.dtype | None
    ) -> Pair:
        layers = kept[at.path]
        if layer not in layers:
            length = self._ends[at.path] - self._segments[self._heads[at.path]].start
            away = self._offload and like[0].is_cuda
            where: dict[str, Any] = {"device": "cpu" if away else like[0].device, "pin_memory": away}
            keys, values = (torch.zeros(length, *x.shape[1:], dtype=dtype or x.dtype, **where) for x in like)
            layers[layer] = keys, values
        return self._view(layers[layer], at)

    def _view(self, pair: Pair, at: Slice) -> Pair:
        first = self._segments[self._heads[at.path]].start
        return pair[0][at.start - first : at.end - first], pair[1][at.start - first : at.end - first]


@dataclass(eq=False)
class Batch:
    """Segments that run together, one after another in `rows` rows of the same number of tokens."""

    paths: Paths
    segments: Sequence[int]
    starts: Sequence[int]
    """Position of the first token of each segment."""
    lengths: Sequence[int]
    """Tokens of each segment, with its padding."""
    rows: int
    writes: bool = True
    """True to keep the keys and values of inner segments, False if they are kept already."""
    layers: int = 0
    """Number of calls of attention that have begun, which is the index of the next one."""
    _tails: dict[int, tuple[Spans, list[list[Slice]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spans = Spans(self.lengths, self.lengths)
        self.own: list[tuple[slice, Slice]] = []
        """Tokens of the segments that others continue, without padding, and where their keys are kept."""
        self.views: list[tuple[slice, Slice, Spans]] = []
        """Tokens, a slice of which each of them sees all, and the spans of both."""
        before = [self.paths.before(k) for k in self.segments]
        first = 0
        views: dict[Slice, slice] = {}
        for k, n, slices in zip(self.segments, self.lengths, before, strict=True):
            if (own := self.paths.own(k)) is not None:
                self.own.append((slice(first, first + own.end - own.start), own))
            for at in slices:
                begin = views[at].start if at in views else first
                views[at] = slice(begin, first + n)
            first += n
        for at, tokens in views.items():
            for start in range(at.start, at.end, POSITIONS):
                piece = at._replace(start=start, end=min(at.end, start + POSITIONS))
                spans = Spans([tokens.stop - tokens.start], [piece.end - piece.start], causal=False)
                self.views.append((tokens, piece, spans))

    def tails(self, window: int) -> tuple[Spans, list[list[Slice]]] | None:
        """Return what segments see through a window: the spans of all keys, which are for each segment those of the
        slices before it, then its own. None if nothing is hidden."""
        if all(start + n <= window for start, n in zip(self.starts, self.lengths, strict=True)):
            return None
        if window not in self._tails:
            lows = {k: start - window + 1 for k, start in zip(self.segments, self.starts, strict=True)}
            tails = [
                [at._replace(start=max(at.start, low)) for at in self.paths.before(k) if at.end > low]
                for k, low in lows.items()
            ]
            keys = [n + sum(at.end - at.start for at in seen) for n, seen in zip(self.lengths, tails, strict=True)]
            self._tails[window] = Spans(self.lengths, keys, window=window), tails
        return self._tails[window]
