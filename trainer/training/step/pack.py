"""Traces as rows of token ids, and the rows of a micro-batch as one packed row, or padded.

The rows are the paths of a prefix forest, in which each shared token is once. The forest is laid
out depth first. So the descendants of a token are the tokens after it, up to `leave`, and a query q
sees a key k if k <= q < leave[k]. The child with the largest subtree comes first: then the
ancestors of a token lie in at most 1 + log2(N) stretches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import Trace
from rolltap.trainer.traces.tokens import TOKEN_BYTES, common_length

NAME = "prefix_pack"
"""Name of the argument with which a pack goes through a model to its layers."""
UNSCORED = -100
"""Label of a token that is not scored, as in transformers."""
OWN = -1
"""In place of an expert: the token routes by itself."""
FEWEST_TOKENS = 2
"""Tokens of a pack without a scored one: kernels of linear attention have no gradient for one."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of one trace, and which of them are scored."""

    ids: NDArray[np.int32]
    """Prompt and completion, shape (T,)."""
    scored: Ints
    """Ascending positions p of the n trained tokens, shape (n,), at least 1. `ids[p]` is scored
    given `ids[:p]`."""
    experts: NDArray[np.integer[Any]] | None = None
    """Experts that the engine chose for each token but the last, shape (T - 1, layers, top_k)."""


def trace_row(trace: Trace) -> Row:
    """Return a trace's row.

    Raises `InputError` for a trace whose completion ids, mask and log-probabilities differ in
    length, and for one that trains its first token, which has no probability.
    """
    if not len(trace.completion_ids) == len(trace.completion_mask) == len(trace.logprobs):
        raise InputError(
            f"trace {trace.trace_id} has {len(trace.completion_ids)} completion ids, "
            f"{len(trace.completion_mask)} mask values and {len(trace.logprobs)} log-probabilities"
        )
    ids = np.array([*trace.prompt_ids, *trace.completion_ids], np.int32)
    scored = len(trace.prompt_ids) + np.flatnonzero(np.array(trace.completion_mask))
    if len(scored) and scored[0] == 0:
        raise InputError(f"trace {trace.trace_id} trains its first token, which nothing precedes")
    return Row(ids, scored, trace.routing)


_COLUMNS = 3
"""Numbers of a token where rows are compared: its id, and 64 bits of a digest of its experts."""
_BYTES = TOKEN_BYTES * _COLUMNS


def _comparable(row: Row) -> bytes:
    """Return a row's tokens with their experts: rows share states as far as these bytes agree."""
    columns = np.zeros((len(row.ids), _COLUMNS), np.int32)
    columns[:, 0] = row.ids
    if row.experts is not None:
        experts = row.experts[: len(row.ids)].reshape(-1, math.prod(row.experts.shape[1:]))
        # a digest, because the experts of a token take kilobytes; that of none is 0
        factors = np.random.default_rng(0).integers(2**63, size=experts.shape[1])
        digests = (experts.astype(np.int64) + 1) @ factors
        columns[: len(experts), 1:] = digests[:, None].view(np.int32)
    return columns.tobytes()


class Pack:
    """The tokens of all rows as one row of N tokens, and its M scored pairs.

    A pair is a token and a scored token after it. Rows that score the same token after the same
    tokens share a pair.

    Attributes:
        tokens: The number N.
        ids: Ids of the tokens, (1, N).
        positions: The number of tokens before each token on its path, (1, N).
        depth: The number of tokens of the longest path.
        leave: For each token the index after its last descendant, (N,).
        above: For each token the index of the token before it on its path, (N,), -1 at a root.
        parents: The segments are the unbranched pieces, in the order of their tokens. For each the
            index of the segment that it continues, -1 at a root.
        begins: Index of the first token of each segment.
        ends: Index after the last token of each segment.
        contexts: For each pair the index of the token before the scored one, (M,), ascending.
        labels: The scored token of each pair, (1, M). A pack without any has one pair with -100.
        mask: 1 where a session has a scored token, then 0, (B, S). S is at least 1.
        experts: The recorded experts of each token, (N, layers, top_k) int16, -1 for tokens
            without. None if no row has them.
        derived: Layers keep here what all of them need of the pack.
    """

    def __init__(
        self,
        sessions: Sequence[Sequence[Row]],
        device: torch.device | str = "cpu",
    ) -> None:
        """Pack B sessions, each with its rows. A row ends before its last scored token.

        Without any scored token the pack has `FEWEST_TOKENS` tokens, so that a process with
        nothing to train takes part in collective operations.
        """
        rows = [row for session in sessions for row in session]
        forest = _Forest(rows)
        layout = _Layout(forest.parents)

        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.tokens = len(forest.ids)
        self.parents = layout.parents
        self.begins = layout.begins
        self.ends = layout.ends
        self.above = np.full(self.tokens, -1)
        above = forest.parents[layout.places]
        self.above[above >= 0] = layout.moved[above[above >= 0]]
        lengths = self.ends - self.begins
        positions = np.repeat(layout.depths - self.begins, lengths) + np.arange(self.tokens)
        self.depth = int(positions.max()) + 1
        self.ids = tensor(forest.ids[layout.places])[None]
        self.positions = tensor(positions)[None]
        self.leave = tensor(np.repeat(layout.leaves, lengths))
        self.experts: Tensor | None = None
        if any(row.experts is not None for row in rows):
            self.experts = tensor(_experts(rows, forest)[layout.places])
        self.derived: dict[Any, Any] = {}

        nothing = np.empty(0, np.int64)
        before = layout.moved[np.concatenate([nothing, *forest.contexts])]
        after = np.concatenate([nothing, *(row.ids[row.scored] for row in rows)])
        contexts, labels, pairs = _distinct_pairs(before, after)
        self.contexts = tensor(contexts)
        self.labels = tensor(labels)[None]

        counts = [sum(len(row.scored) for row in session) for session in sessions]
        at = np.zeros((len(sessions), max([1, *counts])), np.int64)
        mask = np.zeros_like(at)
        first = 0
        for i, count in enumerate(counts):
            at[i, :count] = pairs[first : first + count]
            mask[i, :count] = 1
            first += count
        self._at = tensor(at)
        self.mask = tensor(mask)

    def inputs(self) -> dict[str, Any]:
        """Return arguments for a prepared model, whose output has values of the pairs, (1, M)."""
        return {
            "input_ids": self.ids,
            "position_ids": self.positions,
            "shift_labels": self.labels,
            NAME: self,
            # transformers makes no mask where it is given one of four dimensions
            "attention_mask": self.ids.new_ones(1, 1, 1, 1),
            "fused_lm_head": True,
            "use_cache": False,
        }

    def unpack(self, values: Tensor) -> Tensor:
        """Return (B, S) for `values` of the pairs, (1, M).

        A session has the values of its rows, one row after another, then zeros.
        """
        return values[0][self._at].masked_fill(self.mask == 0, 0.0)


class _Forest:
    """The tokens of a prefix forest, each after its parent, in the order of the sorted rows.

    Attributes:
        ids: Ids of the tokens, (N,).
        parents: Index of the parent of each token, (N,), -1 at a root.
        contexts: For each row the indices of the tokens before its scored ones, (n,).
        owners: Rows with tokens that no earlier row has, and the positions where these begin and
            end.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        used: dict[int, bytes] = {}
        for i, row in enumerate(rows):
            if len(row.scored):
                used[i] = _comparable(row)[: row.scored[-1] * _BYTES]
        self.contexts = [np.empty(0, np.int64) for _ in rows]
        self.owners: list[tuple[int, int, int]] = []
        ids: list[Ints] = []
        parents: list[Ints] = []
        size = 0
        path = np.empty(0, np.int64)  # indices of the tokens of the row before
        before = b""
        for i in sorted(used, key=used.__getitem__):
            shared = common_length(before, used[i]) // _COLUMNS
            length = len(used[i]) // _BYTES
            own = np.arange(size, size + length - shared)
            path = np.concatenate([path[:shared], own])
            if len(own):
                above = own - 1
                above[0] = path[shared - 1] if shared else -1
                ids.append(rows[i].ids[shared:length].astype(np.int64))
                parents.append(above)
                self.owners.append((i, shared, length))
            self.contexts[i] = path[rows[i].scored - 1]
            size += len(own)
            before = used[i]
        if not size:
            ids = [np.zeros(FEWEST_TOKENS, np.int64)]
            parents = [np.arange(-1, FEWEST_TOKENS - 1)]
        self.ids = np.concatenate(ids)
        self.parents = np.concatenate(parents)


class _Layout:
    """A forest depth first, the child with the largest subtree first.

    Attributes:
        parents: Index of the segment that each segment continues, -1 at a root.
        begins: Index of the first token of each segment.
        ends: Index after the last token of each segment.
        leaves: Index after the last descendant of each segment.
        depths: Number of tokens before each segment on its path.
        places: For each token its index in the forest, (N,).
        moved: For each token of the forest its index here, (N,).
    """

    def __init__(self, parents: Ints) -> None:
        """Lay out the tokens of a forest, whose `parents` are (N,), -1 at a root."""
        size = len(parents)
        # segments in the order of the forest
        branches = parents != np.arange(size) - 1
        branches[0] = True
        branching = np.zeros(size + 1, bool)  # the last element is for the parents of roots, -1
        branching[parents[branches]] = True
        first = branches.copy()
        first[1:] |= branching[: size - 1]
        starts = np.flatnonzero(first)
        lengths = np.diff(starts, append=size)
        segments = np.cumsum(first) - 1
        above = np.full(len(starts), -1)
        inner = parents[starts] >= 0
        above[inner] = segments[parents[starts[inner]]]

        sizes = lengths.copy()  # of the subtrees
        children: list[list[int]] = [[] for _ in range(len(starts) + 1)]  # the last of no segment
        for k in reversed(range(len(starts))):
            children[above[k]].append(k)
            if above[k] >= 0:
                sizes[above[k]] += sizes[k]
        order: list[int] = []
        stack = sorted(children[-1], key=sizes.__getitem__)
        while stack:
            order.append(stack.pop())
            stack.extend(sorted(children[order[-1]], key=sizes.__getitem__))

        ranks = np.full(len(starts) + 1, -1)  # the last element is for no segment, -1
        ranks[order] = np.arange(len(order))
        self.parents: list[int] = ranks[above[order]].tolist()
        self.ends = np.cumsum(lengths[order])
        self.begins = self.ends - lengths[order]
        self.leaves = self.begins + sizes[order]
        self.depths = np.zeros(len(order), np.int64)
        for k, parent in enumerate(self.parents):
            if parent >= 0:
                length = self.ends[parent] - self.begins[parent]
                self.depths[k] = self.depths[parent] + length
        self.places = np.repeat(starts[order] - self.begins, lengths[order]) + np.arange(size)
        self.moved = np.empty(size, np.int64)
        self.moved[self.places] = np.arange(size)


def _distinct_pairs(before: Ints, after: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the distinct pairs of `before` and `after`, (M,) each, and the pair of each, (E,)."""
    if not len(before):
        return np.zeros(1, np.int64), np.full(1, UNSCORED), before
    vocabulary = int(after.max()) + 1
    pairs, indices = np.unique(before * vocabulary + after, return_inverse=True)
    contexts, labels = np.divmod(pairs, vocabulary)
    return contexts, labels, indices


def _experts(rows: Sequence[Row], forest: _Forest) -> NDArray[np.int16]:
    """Return the experts of the forest's tokens, (N, layers, top_k), -1 for those without."""
    shape = next(row.experts.shape[1:] for row in rows if row.experts is not None)
    found = np.full((len(forest.ids), *shape), -1, np.int16)
    first = 0
    for i, start, end in forest.owners:
        experts = rows[i].experts
        if experts is not None:
            known = experts[start:end]
            found[first : first + len(known)] = known
        first += end - start
    return found


class PaddedRows:
    """The rows of sessions as one batch, padded on the right. It is used as a `Pack` is.

    There is no attention mask: under causal attention nothing on the right of a token changes it. A mask would make
    torch's attention build a matrix of T x T values for each row.
    """

    def __init__(self, sessions: Sequence[Sequence[Row]], device: torch.device) -> None:
        """Without a trained token there is one row of two tokens."""
        rows = [row for session in sessions for row in session if len(row.scored)]
        shape = (max(1, len(rows)), max([2, *(len(row.ids) for row in rows)]))
        ids = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, -100)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.from_numpy(row.ids)
            labels[i, row.scored] = torch.from_numpy(row.ids[row.scored]).long()
        self.tokens = ids.numel()
        self.experts = _padded_experts(rows, shape)
        self._ids = ids.to(device)
        self._labels = labels.to(device)
        counts = [sum(len(row.scored) for row in session) for session in sessions]
        self.mask = torch.zeros(len(sessions), max([1, *counts]), dtype=torch.bool, device=device)
        for i, count in enumerate(counts):
            self.mask[i, :count] = True

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of the model's forward pass."""
        return {"input_ids": self._ids, "labels": self._labels, "fused_lm_head": True, "use_cache": False}

    def unpack(self, values: Tensor) -> Tensor:
        """Return (B, S), a session's trained tokens row by row, then zeros, for the values of a pass (R, T - 1)."""
        scored = self._labels[:, 1:] != -100  # the value of position p is at p - 1
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values[scored])


def _padded_experts(rows: Sequence[Row], shape: tuple[int, int]) -> NDArray[np.int16] | None:
    """Return the experts of all positions (R * T, layers, k), or None if no row has any."""
    recorded = [row.experts for row in rows if row.experts is not None]
    if not recorded:
        return None
    experts = np.full((*shape, *recorded[0].shape[1:]), OWN, np.int16)
    for i, row in enumerate(rows):
        if row.experts is not None:
            experts[i, : len(row.experts)] = row.experts
    return experts.reshape(-1, *experts.shape[2:])
