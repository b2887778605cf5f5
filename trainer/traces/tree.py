"""The calls of one session -> call tree, and the ways through it.

A call's parent is the longest earlier call whose prompt and completion begin its prompt, token for token. Anything
else is another branch or another root: nothing is repaired.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from rolltap.addons.store.records import Call
from rolltap.trainer.traces.shared_prefixes import common_length
from rolltap.trainer.traces.tokens import TOKEN_BYTES, Tokens, pack

T = TypeVar("T")
Parents = Sequence[int | None]
"""The index of each call's parent, None for a root."""


def start_order(call: Call) -> tuple[datetime, int, str]:
    """The key that sorts a session's calls by when they started; of calls of one instant the shorter prompt is first,
    so that a parent comes before its children."""
    return call.started_at, len(call.prompt_ids), call.call_id


def link_calls(calls: Sequence[Call]) -> tuple[list[int | None], set[int]]:
    """The call tree of one session's calls, which are in `start_order`.

    Returns the index of each call's parent, None for a root; and the indices of the superseded calls. Among earlier
    calls with the same tokens the recorded parent is the parent, else the first. A call is superseded when nothing
    extends it while something extends a sibling with the same prompt: the harness asked again.

    Time and memory are linear in a call's tokens after those of its recorded parent or of the call before it; in all
    of its tokens where it continues neither.
    """
    root = _Node()
    index: dict[str | None, int] = {}
    prompts: list[_Node] = []
    ends: list[_Node] = []
    parents: list[int | None] = []
    for i, call in enumerate(calls):
        node, known = root, 0
        recorded = index.get(call.parent_id)
        for j in (recorded, i - 1 if i else None):
            if j is not None and _continues(call, calls[j]):
                node, known = ends[j], len(calls[j].prompt_ids) + len(calls[j].completion_ids)
                break
        prompt, longest = _insert(node, pack(call.prompt_ids[known:]))
        if recorded is not None and ends[recorded] is longest:
            parents.append(recorded)
        else:
            parents.append(longest.first_call if longest else None)
        end, _ = _insert(prompt, pack(call.completion_ids))
        if end.first_call is None:
            end.first_call = i
        prompts.append(prompt)
        ends.append(end)
        index[call.call_id] = i
    return parents, _superseded(prompts, parents)


def parents_first(parents: Mapping[str, str | None]) -> list[tuple[str, str | None]]:
    """Call ids, each with its parent's, which stands before it; `parents` are the recorded ones.

    A call has None where it has no parent, where its parent is not among the calls, and where its ancestors form a
    circle; calls of a circle are last.
    """
    children: defaultdict[str | None, list[str]] = defaultdict(list)
    for call_id, parent_id in parents.items():
        children[parent_id if parent_id in parents else None].append(call_id)
    ordered: list[tuple[str, str | None]] = [(root, None) for root in children[None]]
    for call_id, _ in ordered:  # grows meanwhile
        ordered += [(child, call_id) for child in children[call_id]]
    reached = {call_id for call_id, _ in ordered}
    return ordered + [(call_id, None) for call_id in parents if call_id not in reached]


def path_to(node: T, parent_of: Callable[[T], T | None]) -> list[T]:
    """The path from the root of a tree to `node`."""
    path = []
    ancestor: T | None = node
    while ancestor is not None:
        path.append(ancestor)
        ancestor = parent_of(ancestor)
    return path[::-1]


def find_ends(parents: Parents, calls: Collection[int]) -> list[int]:
    """The calls that no other of `calls` descends from, in their order."""
    above: set[int] = set()
    for call in calls:
        node = parents[call]
        while node is not None and node not in above:
            above.add(node)
            node = parents[node]
    return [call for call in calls if call not in above]


def split_lines(parents: Parents, ends: Iterable[int]) -> Iterator[tuple[list[int], int]]:
    """The path to each end, and how many of its first calls earlier paths own."""
    owned: set[int] = set()
    for end in ends:
        path = path_to(end, parents.__getitem__)
        shared = next((n for n, call in enumerate(path) if call not in owned), len(path))
        owned.update(path)
        yield path, shared


@dataclass(slots=True, eq=False)
class _Node:
    """A position in the radix tree of the calls' token sequences, where prompts or calls end or sequences part."""

    edge: bytes = b""
    """The packed tokens between the node above and this one."""
    below: "dict[bytes, _Node]" = field(default_factory=dict)
    """First token of an edge, packed -> the node at its end."""
    first_call: int | None = None
    """The first call whose prompt and completion end here."""


def _insert(node: _Node, tokens: bytes) -> tuple[_Node, _Node | None]:
    """The node where the packed `tokens` after `node` end, and the last on the way, from `node` to it, where a call
    ends. It is made when there is none, as is the one where the tokens part from others."""
    position = 0
    ended = None if node.first_call is None else node
    while position < len(tokens):
        below = node.below.get(first := tokens[position : position + TOKEN_BYTES])
        if below is None:
            node.below[first] = below = _Node(tokens[position:])
        elif not tokens.startswith(below.edge, position):
            rest = tokens[position : position + len(below.edge)]
            below = node.below[first] = _split(below, common_length(below.edge, rest) * TOKEN_BYTES)
        node = below
        position += len(node.edge)
        if node.first_call is not None:
            ended = node
    return node, ended


def _split(node: _Node, length: int) -> _Node:
    """A new node after the first `length` bytes of the edge to `node`, which stays the node of its sequence."""
    middle = _Node(node.edge[:length])
    node.edge = node.edge[length:]
    middle.below[node.edge[:TOKEN_BYTES]] = node
    return middle


def _continues(call: Call, parent: Call) -> bool:
    sampled = len(parent.prompt_ids)
    end = sampled + len(parent.completion_ids)
    if call.prompt_ids[sampled:end] != parent.completion_ids:
        return False
    if isinstance(call.prompt_ids, Tokens):
        return call.prompt_ids.startswith(parent.prompt_ids)
    return call.prompt_ids[:sampled] == parent.prompt_ids


def _superseded(prompts: Sequence[_Node], parents: Sequence[int | None]) -> set[int]:
    siblings: defaultdict[tuple[int | None, _Node], list[int]] = defaultdict(list)
    for i, key in enumerate(zip(parents, prompts, strict=True)):
        siblings[key].append(i)
    extended = set(parents)
    superseded: set[int] = set()
    for group in siblings.values():
        if not extended.isdisjoint(group):
            superseded.update(i for i in group if i not in extended)
    return superseded
