"""Sequences of token ids: in little memory, and their shared prefixes.

Ids are packed into bytes, so that `memcmp` compares them. Sorted by their bytes, sequences with a common prefix are
adjacent, and a sequence follows its own prefixes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

TOKEN_BYTES = 4
"""Size of a packed token id: an int32 in native byte order."""


class Tokens(Sequence[int]):
    """Immutable sequence of token ids, shape (N,): all ids of an earlier `Tokens`, and a suffix.

    Only the suffix is stored, with a reference to the earlier sequence. So the prompts of a chain of T calls take
    O(total new tokens) memory. Reads as a list and equals a list of the same ids. A slice or a sum is a list.

    Reading `ids[i]` or `ids[i:]` is O(N - i), and the number of earlier sequences it crosses. To visit all ids,
    iterate: O(N).
    """

    __slots__ = ("_before", "_length", "_own")

    def __init__(self, own: Sequence[int], before: "Tokens | None" = None) -> None:
        """Append the suffix `own` to `before`. Raises `OverflowError` for an id that is not an int32."""
        self._own = pack(own)
        self._before = before
        self._length = len(own) + (0 if before is None else len(before))

    def packed(self, start: int = 0) -> bytes:
        """Return the packed ids from position `start` on, as `pack` does."""
        parts = []
        first = self._length  # position of the first id in `parts`
        node: Tokens | None = self
        while node is not None and node._length > start:
            parts.append(node._own)
            node = node._before
            first = 0 if node is None else node._length
        ids = b"".join(reversed(parts))
        return ids[(start - first) * TOKEN_BYTES :] if start > first else ids

    def startswith(self, other: Sequence[int]) -> bool:
        """Return True when `other` is a prefix of the ids.

        Ids are compared, in O(N), only when `other` is not one of the earlier sequences that this one refers to.
        """
        node: Tokens | None = self
        while node is not None and node._length > len(other):
            node = node._before
        return node is other or self[: len(other)] == other

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if not isinstance(index, slice):
            i = range(self._length)[index]
            return int(np.frombuffer(self.packed(i), np.int32, 1)[0])
        start, stop, step = index.indices(self._length)
        if step == 1:
            ids = np.frombuffer(self.packed(start), np.int32)[: max(stop - start, 0)]
        else:
            ids = np.frombuffer(self.packed(), np.int32)[index]
        found: list[int] = ids.tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tokens):
            return self is other or (len(self) == len(other) and self.packed() == other.packed())
        if isinstance(other, list):
            return len(self) == len(other) and self[:] == other
        return NotImplemented

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Sequence[int]) -> list[int]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(self[:])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(np.frombuffer(self.packed(), np.int32), dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tokens":
        return self

    def __reduce__(self) -> tuple[type["Tokens"], tuple[list[int]]]:
        return Tokens, (self[:],)


def pack(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, `TOKEN_BYTES` each. Raises `OverflowError` for an id that is not an int32."""
    return ids.packed() if isinstance(ids, Tokens) else np.fromiter(ids, np.int32, len(ids)).tobytes()


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
