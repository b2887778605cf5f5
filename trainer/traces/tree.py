"""The call tree of one session, and paths through it. `build` has a drawing of one.

A call's parent is the earlier call with the longest prompt and completion that are a prefix of the
call's prompt, token for token. A call without such an earlier call is a root. A prompt that differs
in one token is not matched.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any, TypeVar

from rolltap.addons.store.records import Call
from rolltap.trainer.traces.tokens import TOKEN_BYTES, Tokens, to_bytes

T = TypeVar("T")
Parents = Sequence[int | None]
"""The index of each call's parent, None for a root."""


def start_order(call: Call) -> tuple[datetime, int, str]:
    """Return the key that sorts a session's calls by start time, then prompt length, then call id.

    So a parent precedes its children when they have the same start time.
    """
    return call.started_at, len(call.prompt_ids), call.call_id


def link_calls(calls: Sequence[Call]) -> tuple[list[int | None], set[int]]:
    """Return the index of each call's parent, None for a root; and the indices of superseded calls.

    `calls` are those of one session, in `start_order`. When several earlier calls have the same
    prompt and completion, the recorded parent is taken if it is one of them, else the first. A call
    is superseded when no call continues it and a call continues a sibling with the same prompt: the
    harness has asked again.

    Sequences are compared by their BLAKE2b digests at the lengths at which earlier calls end. A
    call that continues its recorded parent or the call before it takes O(n) time for its n tokens
    after that call. Any other call, and each prompt that is not `Tokens`, takes O(N) time for its N
    tokens.
    """
    parents: list[int | None] = []
    siblings: defaultdict[tuple[int | None, bytes], list[int]] = defaultdict(list)
    numbers: dict[str | None, int] = {}
    first_call: dict[bytes, int] = {}  # digest of a prompt and completion -> the first call with it
    lengths: list[int] = []  # of these, sorted, each once
    hashes: list[Any] = []  # of each call's prompt and completion
    for number, call in enumerate(calls):
        recorded = numbers.get(call.parent_id)
        hashed = blake2b(digest_size=16)
        known = 0
        for before in (recorded, number - 1):
            if before is not None and before >= 0 and _continues(call, calls[before]):
                hashed = hashes[before].copy()
                known = _length(calls[before])
                break
        packed = to_bytes(call.prompt_ids[known:])
        parent = None
        done = 0
        first = bisect_left(lengths, known)
        last = bisect_right(lengths, len(call.prompt_ids))
        for length in lengths[first:last]:
            end = (length - known) * TOKEN_BYTES
            hashed.update(packed[done:end])
            done = end
            parent = first_call.get(hashed.digest(), parent)
        if recorded is not None and parent is not None:
            is_same = hashes[recorded].digest() == hashes[parent].digest()
            if is_same:
                parent = recorded
        parents.append(parent)
        hashed.update(packed[done:])
        siblings[parent, hashed.digest()].append(number)
        hashed.update(to_bytes(call.completion_ids))
        first_call.setdefault(hashed.digest(), number)
        if _length(call) not in lengths:
            insort(lengths, _length(call))
        hashes.append(hashed)
        numbers[call.call_id] = number
    continued = set(parents)
    superseded: set[int] = set()
    for group in siblings.values():
        if not continued.isdisjoint(group):
            superseded.update(group)
    return parents, superseded - continued


def _length(call: Call) -> int:
    return len(call.prompt_ids) + len(call.completion_ids)


def _continues(call: Call, parent: Call) -> bool:
    sampled = len(parent.prompt_ids)
    if call.prompt_ids[sampled : _length(parent)] != parent.completion_ids:
        return False
    if isinstance(call.prompt_ids, Tokens):
        return call.prompt_ids.startswith(parent.prompt_ids)
    return call.prompt_ids[:sampled] == parent.prompt_ids


def parents_first(parents: Mapping[str, str | None]) -> list[tuple[str, str | None]]:
    """Return (call id, parent id) pairs of the recorded `parents`, each parent before its children.

    The parent is None for a root, for a call whose parent is not among the calls, and for a call in
    or below a cycle. Calls of the last kind are at the end.
    """
    children: defaultdict[str | None, list[str]] = defaultdict(list)
    for call_id, parent_id in parents.items():
        if parent_id not in parents:
            parent_id = None
        children[parent_id].append(call_id)
    ordered: dict[str, str | None] = dict.fromkeys(children[None])
    waiting = list(ordered)
    for call_id in waiting:  # breadth first: the loop appends to the list it iterates over
        for child in children[call_id]:
            ordered[child] = call_id
            waiting.append(child)
    for call_id in parents:
        ordered.setdefault(call_id, None)
    return list(ordered.items())


def path_to(node: T, parent_of: Callable[[T], T | None]) -> list[T]:
    """Return the path from the root of a tree to `node`, both included."""
    path = []
    ancestor: T | None = node
    while ancestor is not None:
        path.append(ancestor)
        ancestor = parent_of(ancestor)
    return path[::-1]


def find_ends(parents: Parents, calls: Collection[int]) -> list[int]:
    """Return those of `calls` from which no other of `calls` descends, in the given order."""
    above: set[int] = set()
    for call in calls:
        node = parents[call]
        while node is not None and node not in above:
            above.add(node)
            node = parents[node]
    return [call for call in calls if call not in above]


def split_lines(parents: Parents, ends: Iterable[int]) -> Iterator[tuple[list[int], int]]:
    """Yield the path from the root to each end, and how many of its calls are on earlier paths."""
    owned: set[int] = set()
    for end in ends:
        path = path_to(end, parents.__getitem__)
        # the ancestors of a call that is on an earlier path are on it too
        yield path, len(owned.intersection(path))
        owned.update(path)
