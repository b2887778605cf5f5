"""The beginnings that token sequences have in common.

Tokens are packed into bytes, four a token, so that one `memcmp` says whether a sequence begins another. Sorted by
their bytes, a sequence comes after those that begin it, and next to those with which it shares most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolltap.trainer.traces.tokens import TOKEN_BYTES, pack


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The beginning that a sequence has in common with an earlier one."""

    index: int
    """The earlier sequence."""
    length: int
    """In tokens, at least 1."""


def shared_prefixes(sequences: Sequence[Sequence[int]]) -> list[SharedPrefix | None]:
    """For each sequence of token ids the longest beginning that it shares with one before it in the list.

    It names the first of those that share the longest. None where no earlier sequence begins with the same token. A
    forward over a whole batch needs to compute each sequence only from there on. The time is that of sorting.
    """
    packed = [pack(sequence) for sequence in sequences]
    order = sorted(range(len(packed)), key=packed.__getitem__)
    shared: list[SharedPrefix | None] = [None] * len(packed)
    # The branches of the prefix tree on the way to the current sequence. A branch is the first of its sequences, and
    # the length of what they share with the branch before it.
    branches: list[tuple[int, int]] = []
    for k, i in enumerate(order):
        length = common_length(packed[order[k - 1]], packed[i]) if k else 0
        _join(branches, length, shared)
        branches.append((i, length))
    _join(branches, 0, shared)
    return shared


def _join(branches: list[tuple[int, int]], length: int, shared: list[SharedPrefix | None]) -> None:
    """Join the branches that part after more than `length` tokens: nothing that comes shares so much with them."""
    while branches and (depth := branches[-1][1]) > length:
        joined = []
        while branches[-1][1] == depth:
            joined.append(branches.pop()[0])
        last, above = branches.pop()
        first = min(last, *joined)
        for i in (last, *joined):
            if i != first:
                shared[i] = SharedPrefix(first, depth)
        branches.append((first, above))


def common_length(a: bytes, b: bytes) -> int:
    """Number of tokens that two packed sequences share at their beginnings."""
    shorter = min(len(a), len(b)) // TOKEN_BYTES
    different = np.flatnonzero(np.frombuffer(a, np.int32, shorter) != np.frombuffer(b, np.int32, shorter))
    return int(different[0]) if len(different) else shorter
