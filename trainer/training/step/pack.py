"""Traces as rows of token ids, and the rows of a micro-batch as one packed row, or padded.

The rows are the paths of a prefix forest, in which each shared token is once. The forest is laid
out depth first. So the descendants of token k are the tokens after it and before `subtree_end[k]`,
and a query q sees a key k if k <= q < subtree_end[k]. The child with the largest subtree comes
first: then the ancestors of a token lie in at most 1 + log2(N) stretches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import Trace
from rolltap.trainer.traces.tokens import TOKEN_BYTES, common_length

PACK_ARGUMENT = "prefix_pack"
"""Name of the argument with which a pack goes through a model to its layers."""
UNSCORED = -100
"""Label of a token that is not scored, as in transformers."""
OWN = -1
"""In place of an expert: the trainer's router chooses the experts of the token."""
FEWEST_TOKENS = 2
"""Tokens of a pack without a scored one: kernels of linear attention have no gradient for one."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Token ids of one trace, and which of them are scored."""

    ids: NDArray[np.int32]
    """Prompt and completion, shape (T,)."""
    scored: Ints
    """Ascending positions p of the n trained tokens, shape (n,), at least 1. `ids[p]` is scored
    given `ids[:p]`."""
    experts: NDArray[np.integer[Any]] | None = None
    """Experts that the engine chose for each token but the last, shape (T - 1, layers, top_k)."""


NOTHING = TraceRow(np.zeros(FEWEST_TOKENS + 1, np.int32), np.array([FEWEST_TOKENS]))
"""Takes the place of rows without any scored token. Its scored token gets the label -100."""


def trace_row(trace: Trace) -> TraceRow:
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
    return TraceRow(ids, scored, trace.routing)


class _Rows:
    """The rows of B sessions, as a model takes them.

    Session b has n_b scored tokens in all its rows. S is the largest n_b, or 1 if that is 0.

    Attributes:
        rows: Those with a scored token.
        mask: (B, S), where row b is True in its first n_b columns.
    """

    def __init__(self, sessions: Sequence[Sequence[TraceRow]], device: torch.device | str) -> None:
        self.rows = [row for session in sessions for row in session if len(row.scored)]
        counts = [sum(len(row.scored) for row in session) for session in sessions]
        columns = torch.arange(max([1, *counts]))
        self.mask = (columns < torch.tensor(counts)[:, None]).to(device)

    def _split(self, values: Tensor) -> Tensor:
        """Return (B, S), with zeros after the values of a session, for those of all tokens."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)


class Pack(_Rows):
    """The tokens of all rows as one row of N tokens, and its M scored pairs.

    A pair is a token and a scored token after it. Rows that score the same token after the same
    tokens share a pair.

    Attributes:
        tokens: The number N.
        ids: Ids of the tokens, (1, N).
        positions: The number of tokens before each token on its path, (1, N).
        depth: The number of tokens of the longest path.
        subtree_end: For each token the index after its last descendant, (N,).
        above: For each token the index of the token before it on its path, (N,), -1 at a root.
        parents: The segments are the unbranched pieces, in the order of their tokens. For each the
            index of the segment that it continues, -1 at a root.
        begins: Index of the first token of each segment.
        ends: Index after the last token of each segment.
        contexts: For each pair the index of the token before the scored one, (M,), ascending.
        labels: The scored token of each pair, (1, M). A pack without any has one pair with -100.
        mask: (B, S), for B sessions. Row b is True in its first n_b columns, n_b the number of
            scored tokens of session b. S is the largest n_b, or 1 if that is 0.
        experts: The recorded experts of each token, (N, layers, top_k) int16, -1 for tokens
            without. None if no row has them.
    """

    def __init__(
        self,
        sessions: Sequence[Sequence[TraceRow]],
        device: torch.device | str = "cpu",
    ) -> None:
        """Pack B sessions, each with its rows. A row ends before its last scored token.

        Without any scored token the pack has `FEWEST_TOKENS` tokens, so that a process with
        nothing to train takes part in collective operations.
        """
        super().__init__(sessions, device)
        self._derived: dict[Any, Any] = {}
        forest = _Forest(self.rows or [NOTHING])

        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.parents = forest.parents
        self.begins = np.array(forest.begins)
        self.ends = np.append(self.begins[1:], forest.size)
        self.tokens = forest.size
        lengths = self.ends - self.begins
        first_positions = np.array(forest.first_positions)
        self.depth = int((first_positions + lengths).max())
        positions = np.arange(self.tokens) + np.repeat(first_positions - self.begins, lengths)
        self.positions = tensor(positions)[None]
        self.subtree_end = tensor(np.repeat(forest.subtree_ends, lengths))
        parents = np.array(self.parents)
        self.above = np.arange(-1, self.tokens - 1)
        self.above[self.begins] = np.where(parents < 0, -1, self.ends[parents] - 1)
        after_last = first_positions + lengths
        pieces = [
            *zip(forest.row_of_segment, first_positions, after_last, self.begins, strict=True)
        ]
        ids = [row.ids[start:stop] for row, start, stop, _ in pieces]
        self.ids = tensor(np.concatenate(ids).astype(np.int64))[None]
        experts = _experts(pieces, self.tokens)
        self.experts = None if experts is None else tensor(experts)

        contexts = np.zeros(1, np.int64)
        labels = np.full(1, UNSCORED)
        pair_of_scored = np.empty(0, np.int64)
        if self.rows:
            scored_ids = np.concatenate([row.ids[row.scored] for row in self.rows])
            vocabulary = int(scored_ids.max()) + 1
            context_and_token = np.concatenate(forest.contexts) * vocabulary + scored_ids
            distinct, pair_of_scored = np.unique(context_and_token, return_inverse=True)
            contexts, labels = np.divmod(distinct, vocabulary)
        self.contexts = tensor(contexts)
        self.labels = tensor(labels)[None]
        self._pair_of_scored = tensor(pair_of_scored)
        """The pair of each scored token."""

    def inputs(self) -> dict[str, Any]:
        """Return arguments for a prepared model, whose output has values of the pairs, (1, M)."""
        return {
            "input_ids": self.ids,
            "position_ids": self.positions,
            "shift_labels": self.labels,
            PACK_ARGUMENT: self,
            # transformers makes no mask where it is given one of four dimensions
            "attention_mask": self.ids.new_ones(1, 1, 1, 1),
            "fused_lm_head": True,
            "use_cache": False,
        }

    def unpack(self, values: Tensor) -> Tensor:
        """Return (B, S) for `values` of the pairs, (1, M).

        A session has the values of its rows, one row after another, then zeros.
        """
        return self._split(values[0, self._pair_of_scored])

    def derive(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Return `make(self, *arguments)`, which is made once for all layers."""
        key = make, *arguments
        if key not in self._derived:
            self._derived[key] = make(self, *arguments)
        return self._derived[key]


KEY_BYTES = 8
"""Bytes of a token where rows are compared."""


def _key(row: TraceRow) -> bytes:
    """Return a row's tokens before its last scored token, `KEY_BYTES` each.

    Rows share states as far as their keys agree: a token counts with its experts. These take
    kilobytes, so a digest of them is added to the token's id; a token without experts adds 0.
    """
    length = row.scored[-1]
    tokens = row.ids[:length].astype(np.int64)
    if row.experts is not None:
        experts = row.experts[:length].reshape(length, -1).astype(np.int64)
        factors = np.random.default_rng(0).integers(2**63, size=experts.shape[1])
        tokens += (experts + 1) @ factors
    return tokens.tobytes()


class _Forest:
    """The prefix forest of rows, depth first, the child with the largest subtree first.

    Attributes:
        size: The number of its tokens.
        parents: For each segment the index of the segment that it continues, -1 at a root.
        begins: Index of the first token of each segment.
        subtree_ends: Index after the last descendant of each segment.
        first_positions: Position of the first token of each segment.
        row_of_segment: For each segment a row with its tokens.
        contexts: For each given row the indices of the tokens before its scored ones, (n,).
    """

    def __init__(self, rows: Sequence[TraceRow]) -> None:
        self.size = 0
        self.parents: list[int] = []
        self.begins: list[int] = []
        self.subtree_ends: list[int] = []
        self.first_positions: list[int] = []
        self.row_of_segment: list[TraceRow] = []
        self.contexts = [np.empty(0, np.int64) for _ in rows]
        keys = [_key(row) for row in rows]
        # rows that no other row goes on from, in order, and the rows that each goes on from
        leaf_rows: list[int] = []
        members: list[list[int]] = []
        for i in sorted(range(len(rows)), key=keys.__getitem__, reverse=True):
            if leaf_rows and keys[leaf_rows[-1]].startswith(keys[i]):
                members[-1].append(i)
            else:
                leaf_rows.append(i)
                members.append([i])
        lengths = np.array([len(keys[i]) // KEY_BYTES for i in leaf_rows])
        shared = np.zeros_like(lengths)  # tokens of each leaf row that the one before has too
        for k, (before, leaf) in enumerate(pairwise(leaf_rows), 1):
            # `common_length` counts words of 4 bytes: half a key that agrees does not count
            shared[k] = common_length(keys[before], keys[leaf]) * TOKEN_BYTES // KEY_BYTES
        added = np.append(0, np.cumsum(lengths - shared))

        path = np.empty(lengths.max(), np.int64)  # indices of the tokens of the present path
        # (distinct tokens from position `start` on in `leaf_rows[first:last]`, first, last, start,
        # parent segment)
        stack = [(int(added[-1]), 0, len(leaf_rows), 0, -1)]
        while stack:
            tokens, first, last, start, parent = stack.pop()
            inner = shared[first + 1 : last]
            stop = int(inner.min(initial=lengths[first]))
            if stop > start:  # not where several roots begin
                self.parents.append(parent)
                self.begins.append(self.size)
                self.subtree_ends.append(self.size + tokens)
                self.first_positions.append(start)
                self.row_of_segment.append(rows[leaf_rows[first]])
                parent = len(self.parents) - 1
                begin = self.size
                self.size += stop - start
                path[start:stop] = np.arange(begin, self.size)
            if not len(inner):
                for i in members[first]:
                    self.contexts[i] = path[rows[i].scored - 1]
                continue
            bounds = [first, *(first + 1 + np.flatnonzero(inner == stop)).tolist(), last]
            children = []
            for a, b in pairwise(bounds):
                # `added` leaves out what row a shares with the row before it, which is outside
                tokens = int(added[b] - added[a] + shared[a]) - stop
                children.append((tokens, a, b, stop, parent))
            stack += sorted(children)  # last in, first out: the largest comes next


def _experts(
    pieces: Iterable[tuple[TraceRow, int, int, int]], size: int
) -> NDArray[np.int16] | None:
    """Return the experts of `size` tokens, (size, layers, top_k), `OWN` for those without.

    Each piece has a row, the positions where it begins and ends, and the index of its first token.
    """
    found: NDArray[np.int16] | None = None
    for row, start, stop, begin in pieces:
        if row.experts is None:
            continue
        if found is None:
            found = np.full((size, *row.experts.shape[1:]), OWN, np.int16)
        found[begin : begin + stop - start] = row.experts[start:stop]
    return found


class PaddedRows(_Rows):
    """The rows of sessions as one batch of R rows, padded on the right. It is used as a `Pack` is.

    There is no attention mask: under causal attention nothing on the right of a token changes it.
    A mask would make torch's attention build a matrix of T x T values for each row.
    """

    def __init__(self, sessions: Sequence[Sequence[TraceRow]], device: torch.device) -> None:
        """Without a trained token there is one row."""
        super().__init__(sessions, device)
        ids = [torch.from_numpy(row.ids).long() for row in self.rows or [NOTHING]]
        self._ids = pad_sequence(ids, batch_first=True).to(device)
        self._labels = torch.full_like(self._ids, UNSCORED)
        for i, row in enumerate(self.rows):
            self._labels[i, row.scored] = self._ids[i, row.scored]
        self.tokens = self._ids.numel()
        length = self._ids.shape[1]
        pieces = [(row, 0, len(row.ids) - 1, i * length) for i, row in enumerate(self.rows)]
        self.experts = _experts(pieces, self.tokens)
        """Of all positions, (R * T, layers, top_k)."""

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of the model's forward pass."""
        return {
            "input_ids": self._ids,
            "labels": self._labels,
            "fused_lm_head": True,
            "use_cache": False,
        }

    def unpack(self, values: Tensor) -> Tensor:
        """Return (B, S) for the values of a pass, (R, T - 1).

        A session has the values of its rows, one row after another, then zeros.
        """
        # the value of position p is at p - 1
        return self._split(values[self._labels[:, 1:] != UNSCORED])
