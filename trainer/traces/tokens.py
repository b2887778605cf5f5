"""Token ids that take no memory twice: sequences that share what they begin with, and ids packed into bytes."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

TOKEN_BYTES = 4
"""Bytes of a token in what `pack` returns."""


class Tokens(Sequence[int]):
    """Token ids, shape (N,): all those of an earlier sequence, and what follows them.

    Only what follows is held, so that the prompts of a chain of T turns take O(T) memory. It reads as a list does, and
    equals a list of the same ids; a slice or a sum is a list. It never changes. What is read costs the time of all
    that comes after it, so that the end of a long chain is read at once, and a loop over indices should be one over
    the ids.
    """

    __slots__ = ("_before", "_length", "_own")

    def __init__(self, own: Sequence[int], before: "Tokens | None" = None) -> None:
        """Raises `OverflowError` for an id beyond 32 bits."""
        self._own = pack(own)
        self._before = before
        self._length = len(own) + (0 if before is None else len(before))

    def packed(self, start: int = 0) -> bytes:
        """The ids from `start` on, as `pack` returns them."""
        parts = []
        end = self._length
        node: Tokens | None = self
        while node is not None and node._length > start:
            parts.append(node._own)
            node = node._before
            end = 0 if node is None else node._length
        # the first of the parts begins at `end`
        ids = b"".join(reversed(parts))
        return ids[(start - end) * TOKEN_BYTES :] if start > end else ids

    def startswith(self, other: Sequence[int]) -> bool:
        """Whether all of `other` begins the ids: known at once where they share it, else compared."""
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

    def __contains__(self, value: object) -> bool:
        return value in self[:]

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

    def __copy__(self) -> "Tokens":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tokens":
        return self

    def __reduce__(self) -> tuple[type["Tokens"], tuple[list[int]]]:
        return Tokens, (self[:],)


def pack(ids: Sequence[int]) -> bytes:
    """Token ids as bytes. Raises `OverflowError` for an id beyond 32 bits."""
    return ids.packed() if isinstance(ids, Tokens) else np.fromiter(ids, np.int32, len(ids)).tobytes()
