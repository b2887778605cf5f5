"""Shared prefixes of token sequences.

Token ids are packed into bytes, so that `memcmp` compares them. Sorted by their bytes, sequences with a common prefix
are adjacent, and a sequence follows its own prefixes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolltap.trainer.traces.tokens import TOKEN_BYTES, pack


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that a sequence shares with an earlier one."""

    index: int
    """Position of the earlier sequence in the list."""
    length: int
    """Number of shared tokens, at least 1."""


def shared_prefixes(sequences: Sequence[Sequence[int]]) -> list[SharedPrefix | None]:
    """Return for each sequence of token ids the longest prefix that it shares with an earlier sequence of the list.

    Of several earlier sequences that share it, the first is named. None when no earlier sequence begins with the same
    token. A forward pass over the batch needs to compute each sequence only from the end of that prefix on.

    Takes O(n log n) comparisons of n sequences, and O(total tokens) for the rest.
    """
    packed = [pack(sequence) for sequence in sequences]
    order = sorted(range(len(packed)), key=packed.__getitem__)
    shared: list[SharedPrefix | None] = [None] * len(packed)
    # A stack: the open branches of the prefix tree, from the root to the current sequence. Each entry is the smallest
    # index among the branch's sequences, and the number of tokens that they share with the entry below it.
    branches: list[tuple[int, int]] = []
    for k, i in enumerate(order):
        length = common_length(packed[order[k - 1]], packed[i]) if k else 0
        _join(branches, length, shared)
        branches.append((i, length))
    _join(branches, 0, shared)
    return shared


def _join(branches: list[tuple[int, int]], length: int, shared: list[SharedPrefix | None]) -> None:
    """Join the branches that diverge after more than `length` tokens. No later sequence shares that many with them."""
    while branches and (depth := branches[-1][1]) > length:
        joined = []
        while branches[-1][1] == depth:
            joined.append(branches.pop()[0])
        below, below_depth = branches.pop()
        first = min(below, *joined)
        for i in (below, *joined):
            if i != first:
                shared[i] = SharedPrefix(first, depth)
        branches.append((first, below_depth))


def common_length(a: bytes, b: bytes) -> int:
    """Return the length in tokens of the longest common prefix of two packed sequences."""
    shorter = min(len(a), len(b)) // TOKEN_BYTES
    different = np.flatnonzero(np.frombuffer(a, np.int32, shorter) != np.frombuffer(b, np.int32, shorter))
    return int(different[0]) if len(different) else shorter
