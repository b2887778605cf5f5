"""Sequences of token ids: in little memory, and their common prefixes.

Ids are packed into bytes, so that `memcmp` compares them.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

TOKEN_BYTES = 4
"""Size of a packed token id: an int32 in native byte order."""


class Tokens(Sequence[int]):
    """Immutable sequence of token ids, shape (N,): all ids of an earlier `Tokens`, and a suffix.

    The first sequence that continues another one shares its memory, further ones copy. So the
    prompts of a chain of T calls take O(total new tokens). Reads as a list and equals a list of the
    same ids. A slice or a sum is a list.

    Not thread-safe while it is continued.
    """

    __slots__ = ("_ids", "_length")

    def __init__(self, own: Sequence[int], before: "Tokens | None" = None) -> None:
        """Append the suffix `own` to `before`. Raises `OverflowError` as `pack`."""
        suffix = pack(own)
        self._ids = array("i")
        if before is not None:
            self._ids = before._ids
            if len(self._ids) > len(before):  # another sequence continues it
                self._ids = self._ids[: len(before)]
        self._ids.frombytes(suffix)
        self._length = len(self._ids)

    def packed(self, start: int = 0) -> bytes:
        """Return the packed ids from position `start` on, as `pack` does."""
        return self._ids[start : self._length].tobytes()

    def startswith(self, other: Sequence[int]) -> bool:
        """Return True when `other` is a prefix of the ids, in O(1) when they share memory."""
        if isinstance(other, Tokens) and other._ids is self._ids:
            return len(other) <= len(self)
        return self[: len(other)] == other

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return self._ids[: self._length][index].tolist()
        return self._ids[range(self._length)[index]]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tokens | list):
            return len(self) == len(other) and self[:] == other[:]
        return NotImplemented

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Sequence[int]) -> list[int]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(self[:])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._ids[: self._length], dtype)


def pack(ids: Sequence[int]) -> bytes:
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
