"""Traces as rows of token ids, rows as a forest whose segments hold each shared token once, and batches of segments."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import Trace
from rolltap.trainer.traces.tokens import TOKEN_BYTES, common_length


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of one trace, and which of them are scored."""

    ids: NDArray[np.int32]
    """Prompt and completion, shape (T,)."""
    scored: NDArray[np.int64]
    """Ascending positions p of the n trained tokens, shape (n,), at least 1. `ids[p]` is scored given `ids[:p]`."""
    experts: NDArray[np.integer[Any]] | None = None
    """Numbers of those that the engine chose for the tokens but the last one, shape (T - 1, layers, top_k)."""


def trace_row(trace: Trace) -> Row:
    """Return a trace's row. Raises `InputError` for a trace whose completion ids, mask and log-probabilities differ in
    length, and for one that trains its first token, which has no probability."""
    if not len(trace.completion_ids) == len(trace.completion_mask) == len(trace.logprobs):
        raise InputError(
            f"trace {trace.trace_id} has {len(trace.completion_ids)} completion ids, {len(trace.completion_mask)} mask "
            f"values and {len(trace.logprobs)} log-probabilities"
        )
    ids = np.array([*trace.prompt_ids, *trace.completion_ids], np.int32)
    scored = len(trace.prompt_ids) + np.flatnonzero(np.array(trace.completion_mask))
    if len(scored) and scored[0] == 0:
        raise InputError(f"trace {trace.trace_id} trains its first token, which nothing precedes")
    return Row(ids, scored, trace.routing)


LEAST_SHARED = 16
"""A piece shared by several rows is a segment of its own from this number of tokens on, at least 2. A shorter one is
computed again by each branch, because a forward pass of its own costs more."""

LEAST_SIZE = 3
"""Tokens that a segment may have at least: with 2, one of three tokens would be left alone."""

TRIES = 32
"""Segments that do not fit into a batch before it is closed."""

LEAST_WASTE = 1024
"""Tokens of padding that a batch may have however small it is: about what another batch costs. Beyond them, at most a
quarter of its tokens."""


@dataclass(frozen=True, slots=True)
class Segment:
    """An unbranched piece of the forest: tokens that follow those of its ancestors."""

    parent: int
    """Index of the segment before it, -1 at the start of a row."""
    start: int
    """Position of its first token: the number of tokens of its ancestors."""
    ids: NDArray[np.int32]
    """Its tokens, shape (n,), n at least 1."""
    inner: bool
    """True if other segments continue it. Only then is its state needed."""
    at: NDArray[np.int64]
    """Offsets in `ids` after which a token is scored, shape (E,). An offset repeats where rows go on differently, and
    where several rows score the same token."""
    tokens: NDArray[np.int32]
    """The scored token after each of these offsets, shape (E,)."""
    flat: NDArray[np.int64]
    """Index of each in the flat vector of scored tokens (row by row, each row's positions in order), shape (E,)."""
    experts: NDArray[np.integer[Any]] | None = None
    """Experts of its tokens, the same in all of its rows, shape (n, layers, top_k)."""

    @property
    def end(self) -> int:
        """Number of tokens up to its last one, those of its ancestors included."""
        return self.start + len(self.ids)


_Path = tuple[list[int], list[int]]
"""The segments from a row's first token on: the positions after their last tokens, ascending, and their indices."""


def build_forest(rows: Sequence[Row], tokens_per_segment: int) -> list[Segment]:
    """Return the segments of all rows, each after its parent, of at most `tokens_per_segment` tokens, or `LEAST_SIZE`.

    A segment that others continue has at least two tokens: kernels of linear attention have no gradient for one. A row
    counts up to the token before its last scored one. Takes O(n log n) comparisons of n rows, and O(tokens) besides.
    """
    used = {i: packed(row)[: row.scored[-1] * _BYTES] for i, row in enumerate(rows) if len(row.scored)}
    order = sorted(used, key=used.__getitem__)
    # a row that the next one begins with has no tokens of its own
    covered = {i for i, after in pairwise(order) if used[after].startswith(used[i])}
    whole = [i for i in order if i not in covered]
    shared = _shared([used[i] for i in whole])
    owners, branches = _branches(shared)
    parents: list[int] = []
    spans: list[tuple[int, int, int]] = []  # row, start, end
    paths: list[_Path] = [([], [])] * len(whole)
    starts = [0] * len(whole)
    for k, i in enumerate(whole):
        above, before = (values[: bisect_right(paths[owners[k]][0], starts[k])] for values in paths[owners[k]])
        cuts = [starts[k]]
        for depth, child in sorted((shared[child], child) for child in branches[k]):
            if depth - cuts[-1] >= LEAST_SHARED:
                cuts.append(depth)
            starts[child] = cuts[-1]
        cuts.append(len(used[i]) // _BYTES)
        # parts as equal as they can be
        parts = [(a, b, -(-(b - a) // max(tokens_per_segment, LEAST_SIZE))) for a, b in pairwise(cuts)]
        ends = [a + (b - a) * part // n for a, b, n in parts for part in range(1, n + 1)]
        own = list(range(len(spans), len(spans) + len(ends)))
        spans += zip(repeat(i), [starts[k], *ends], ends, strict=False)
        parents += [before[-1] if before else -1, *own[:-1]]
        paths[k] = above + ends, before + own
    of_row = dict(zip(whole, paths, strict=True))
    for i, after in reversed([*pairwise(order)]):
        of_row.setdefault(i, of_row[after])
    return _with_targets(rows, spans, parents, {i: of_row[i] for i in order})


def packed(row: Row) -> bytes:
    """Return a row's tokens with their experts: rows can share states as far as these agree."""
    columns = np.zeros((len(row.ids), _COLUMNS), np.int32)
    columns[:, 0] = row.ids
    if row.experts is not None:
        experts = row.experts[: len(row.ids)].reshape(-1, math.prod(row.experts.shape[1:]))
        # 64 bits of a digest: the experts themselves take kilobytes for each token
        factors = np.random.default_rng(0).integers(2**63, size=experts.shape[1])
        columns[: len(experts), 1:] = (experts @ factors)[:, None].view(np.int32)
    return columns.tobytes()


_COLUMNS = 3
"""Numbers of a packed token: its id, and the digest of its experts."""
_BYTES = TOKEN_BYTES * _COLUMNS


def own_tokens(rows: Sequence[Row]) -> list[int]:
    """Return for each row its number of tokens that the row before it does not share."""
    shared = _shared([*map(packed, rows)])
    return [len(row.ids) - n for row, n in zip(rows, shared, strict=True)]


def leaves_before(rows: Sequence[Row]) -> list[bool]:
    """Return for each row whether it shares tokens with the row before it, and goes on otherwise: there both branch."""
    before = [0, *(len(row.ids) for row in rows)]
    shared = _shared([*map(packed, rows)])
    return [0 < n < min(before[k], len(rows[k].ids)) for k, n in enumerate(shared)]


def _shared(rows: Sequence[bytes]) -> list[int]:
    """Return for each packed row the number of tokens that it shares with the row before it."""
    return [0] * bool(rows) + [common_length(a, b) // _COLUMNS for a, b in pairwise(rows)]


def stretches(whole: Sequence[int], own: Sequence[int], room: float) -> list[list[int]]:
    """Cut items, in their order, into as few lists of indices as hold at most `room` tokens each, or one item.

    An item counts its `whole` tokens at the beginning of a list, and only its `own` after the item before it.
    """
    lists: list[list[int]] = []
    left = 0.0
    for k, (first, more) in enumerate(zip(whole, own, strict=True)):
        if lists and more <= left:
            lists[-1].append(k)
            left -= more
        else:
            lists.append([k])
            left = room - first
    return lists


def _branches(shared: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return for each sorted row the row that it branches from (-1: none), and the rows that branch from it.

    A row owns the tokens that no earlier row has. `shared` are the tokens that a row has in common with the one before.
    """
    owners = [-1] * len(shared)
    branches: list[list[int]] = [[] for _ in shared]
    path: list[tuple[int, int]] = []  # owners of the last row's tokens, and the position from which on they own them
    for k, depth in enumerate(shared):
        while path and path[-1][1] >= depth:
            path.pop()
        if path:
            owners[k] = path[-1][0]
            branches[owners[k]].append(k)
        path.append((k, depth))
    return owners, branches


def _with_targets(
    rows: Sequence[Row], spans: Sequence[tuple[int, int, int]], parents: Sequence[int], paths: dict[int, _Path]
) -> list[Segment]:
    if not spans:
        return []
    # the token at p is predicted at p - 1; a row's positions come after all of the rows before it
    apart = max(ends[-1] for ends, _ in paths.values()) + 1
    lengths = [len(rows[i].scored) for i in paths]
    predicted = np.concatenate([rows[i].scored for i in paths]) - 1
    offsets = np.arange(len(paths)) * apart
    ends, indices = (np.fromiter(chain.from_iterable(values), np.int64) for values in zip(*paths.values(), strict=True))
    ends += np.repeat(offsets, [len(own) for own, _ in paths.values()])
    segment = indices[np.searchsorted(ends, np.repeat(offsets, lengths) + predicted, side="right")]
    at = predicted - np.array([start for _, start, _ in spans])[segment]
    tokens = np.concatenate([rows[i].ids[rows[i].scored] for i in paths])
    first = np.cumsum([0, *(len(row.scored) for row in rows)])
    flat = np.concatenate([np.arange(first[i], first[i + 1]) for i in paths])

    by_segment = np.argsort(segment, kind="stable")
    at, tokens, flat = at[by_segment], tokens[by_segment], flat[by_segment]
    bounds = np.searchsorted(segment[by_segment], np.arange(len(spans) + 1)).tolist()
    inner = set(parents)
    return [
        Segment(
            *(parents[k], start, rows[i].ids[start:end], k in inner, at[a:b], tokens[a:b], flat[a:b]),
            experts=None if (chosen := rows[i].experts) is None else chosen[start:end],
        )
        for k, ((i, start, end), (a, b)) in enumerate(zip(spans, pairwise(bounds), strict=True))
    ]


def batches(segments: Sequence[Segment], tokens: int, *, apart: bool, row: int = 0) -> list[list[int]]:
    """Return batches of segments that can run together, parents before their children, leaves last.

    A batch of several segments has at most `tokens` tokens. Of the inner segments whose parents have run, it takes
    those with the longest way to a leaf first. With `apart` each is a row of its own, which counts as `row` tokens
    more: rows of inner segments need no padding (the state of linear attention after padding is not the state before
    it), those of leaves have some.
    """
    ways = [len(segment.ids) for segment in segments]
    children: defaultdict[int, list[int]] = defaultdict(list)
    for k in reversed(range(len(segments))):
        parent = segments[k].parent
        if segments[k].inner:
            children[parent].append(k)
        if parent >= 0:
            ways[parent] = max(ways[parent], len(segments[parent].ids) + ways[k])
    found: list[list[int]] = []
    ready = sorted((-ways[k], k) for k in children[-1])  # a heap
    while ready:
        batch: list[int] = []
        others: list[tuple[int, int]] = []
        room = tokens
        while ready and len(others) < TRIES and (room >= LEAST_SHARED or not batch):
            way, k = heappop(ready)
            n = len(segments[k].ids)
            if not batch or (n + row <= room and not (apart and n != len(segments[batch[0]].ids))):
                batch.append(k)
                room -= n + row
            else:
                others.append((way, k))
        for item in chain(others, ((-ways[child], child) for k in batch for child in children[k])):
            heappush(ready, item)
        found.append(batch)
    leaves = [k for k, segment in enumerate(segments) if not segment.inner]
    if apart:
        return found + _padded(segments, leaves, tokens, row)
    lengths = [len(segments[k].ids) for k in leaves]
    return found + [[leaves[i] for i in part] for part in stretches(lengths, lengths, tokens)]


def _padded(segments: Sequence[Segment], leaves: Iterable[int], tokens: int, row: int) -> list[list[int]]:
    filled: list[list[int]] = []
    width = 1
    real = 0
    for k in sorted(leaves, key=lambda k: (-len(segments[k].ids), segments[k].start)):
        n = len(segments[k].ids)
        rows = len(filled[-1]) + 1 if filled else tokens + 1
        waste = rows * width - real - n
        if rows * (width + row) <= tokens and waste <= max(LEAST_WASTE, (real + n) // 4):
            filled[-1].append(k)
            real += n
        else:
            filled.append([k])
            width = real = n
    return filled
