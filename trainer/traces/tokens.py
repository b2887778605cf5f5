"""Sequences of token ids: in little memory, and their common prefixes.

Ids are packed into bytes, so that `memcmp` compares them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

TOKEN_BYTES = 4
"""Size of a packed token id: an int32 in native byte order."""


class Tokens(Sequence[int]):
    """Immutable sequence of token ids, shape (N,): all ids of an earlier `Tokens`, and a suffix.

    Only the suffix is stored, with a reference to the earlier sequence. So the prompts of a tree of
    calls take O(total new tokens) memory. Reads as a list and equals a list of the same ids. A
    slice or a sum is a list.

    Reading `ids[i]` or `ids[i:]` is O(N - i), and the number of earlier sequences it crosses. To
    visit all ids, iterate: O(N).
    """

    __slots__ = ("_before", "_length", "_own")

    def __init__(self, own: Sequence[int], before: "Tokens | None" = None) -> None:
        """Append the suffix `own` to `before`. Raises `OverflowError` as `to_bytes`."""
        self._own = to_bytes(own)
        self._before = before
        self._length = len(own)
        if before is not None:
            self._length += len(before)

    def packed(self, start: int = 0) -> bytes:
        """Return the packed ids from position `start` on, as `to_bytes` does."""
        parts = []
        first = self._length  # position of the first id in `parts`
        node: Tokens | None = self
        while node is not None and node._length > start:
            parts.append(node._own)
            first = node._length - len(node._own) // TOKEN_BYTES
            node = node._before
        ids = b"".join(reversed(parts))
        return ids[max(start - first, 0) * TOKEN_BYTES :]

    def startswith(self, other: Sequence[int]) -> bool:
        """Return True when `other` is a prefix of the ids.

        Ids are compared, in O(N), only when `other` is not one of the earlier sequences that this
        one refers to.
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
            return self is other or self.packed() == other.packed()
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


def to_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, `TOKEN_BYTES` each.

    Raises `OverflowError` for an id that is not an int32.
    """
    if isinstance(ids, Tokens):
        return ids.packed()
    return np.fromiter(ids, np.int32, len(ids)).tobytes()


def common_length(a: bytes, b: bytes) -> int:
    """Return the length in tokens of the longest common prefix of two packed sequences."""
    shorter = min(len(a), len(b)) // TOKEN_BYTES
    first = np.frombuffer(a, np.int32, shorter)
    second = np.frombuffer(b, np.int32, shorter)
    different = np.flatnonzero(first != second)
    if len(different):
        return int(different[0])
    return shorter
