"""A tree of calls as lines from a root to an end, each call owned by one of them."""

from collections.abc import Iterable, Iterator, Sequence

Parents = Sequence[int | None]
"""The index of each call's parent, None for a root."""


def find_ends(parents: Parents, calls: Sequence[int]) -> list[int]:
    """Those of `calls` that no other of them descends from, in their order."""
    above: set[int] = set()
    for call in calls:
        node = parents[call]
        while node is not None and node not in above:
            above.add(node)
            node = parents[node]
    return [call for call in calls if call not in above]


def find_path(parents: Parents, end: int) -> list[int]:
    """The calls from the root to `end`."""
    path = []
    node: int | None = end
    while node is not None:
        path.append(node)
        node = parents[node]
    return path[::-1]


def split_lines(parents: Parents, ends: Iterable[int]) -> Iterator[tuple[list[int], int]]:
    """The path to each end, and how many of its first calls earlier paths own."""
    owned: set[int] = set()
    for end in ends:
        path = find_path(parents, end)
        shared = next((n for n, call in enumerate(path) if call not in owned), len(path))
        owned.update(path)
        yield path, shared
