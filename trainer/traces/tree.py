"""The call tree of one session, and paths through it. `build` has a drawing of one.

A call's parent is the earlier call with the longest prompt and completion that are a prefix of the call's prompt,
token for token. A call without such an earlier call is a root. A prompt that differs in one token is not matched.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from rolltap.addons.store.records import Call
from rolltap.trainer.traces.tokens import TOKEN_BYTES, Tokens, common_length, pack

T = TypeVar("T")
Parents = Sequence[int | None]
"""The index of each call's parent, None for a root."""


def start_order(call: Call) -> tuple[datetime, int, str]:
    """Return the key that sorts a session's calls by start time, then prompt length, then call id.

    So a parent precedes its children when they have the same start time.
    """
    return call.started_at, len(call.prompt_ids), call.call_id


def link_calls(calls: Sequence[Call]) -> tuple[list[int | None], set[int]]:
    """Return the index of each call's parent, None for a root; and the indices of the superseded calls.

    `calls` are those of one session, in `start_order`. When several earlier calls have the same prompt and completion,
    the recorded parent is taken if it is one of them, else the first. A call is superseded when no call continues it
    and a call continues a sibling with the same prompt: the harness has asked again.

    A call that continues its recorded parent or the call before it takes O(n) time and memory for its n tokens after
    that call's prompt. Any other call, and each prompt that is not `Tokens`, takes O(N) time for its N tokens.
    """
    root = _Node()
    index: dict[str | None, int] = {}
    prompt_nodes: list[_Node] = []
    end_nodes: list[_Node] = []
    parents: list[int | None] = []
    for i, call in enumerate(calls):
        node, known = root, 0
        recorded = index.get(call.parent_id)
        for j in (recorded, i - 1 if i else None):
            if j is not None and _continues(call, calls[j]):
                node, known = end_nodes[j], len(calls[j].prompt_ids) + len(calls[j].completion_ids)
                break
        prompt, longest = _insert(node, pack(call.prompt_ids[known:]))
        if recorded is not None and end_nodes[recorded] is longest:
            parents.append(recorded)
        else:
            parents.append(longest.first_call if longest else None)
        end, _ = _insert(prompt, pack(call.completion_ids))
        if end.first_call is None:
            end.first_call = i
        prompt_nodes.append(prompt)
        end_nodes.append(end)
        index[call.call_id] = i
    return parents, _superseded(prompt_nodes, parents)


def parents_first(parents: Mapping[str, str | None]) -> list[tuple[str, str | None]]:
    """Return (call id, parent id) pairs, each parent before its children. `parents` are the recorded ones.

    The parent is None for a root, for a call whose parent is not among the calls, and for a call in or below a cycle.
    Calls of the last kind are at the end.
    """
    children: defaultdict[str | None, list[str]] = defaultdict(list)
    for call_id, parent_id in parents.items():
        children[parent_id if parent_id in parents else None].append(call_id)
    ordered: list[tuple[str, str | None]] = [(root, None) for root in children[None]]
    for call_id, _ in ordered:  # breadth first: the loop appends to the list it iterates over
        ordered += [(child, call_id) for child in children[call_id]]
    reached = {call_id for call_id, _ in ordered}
    return ordered + [(call_id, None) for call_id in parents if call_id not in reached]


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
    """Yield the path from the root to each end, and how many of its first calls are on earlier paths."""
    owned: set[int] = set()
    for end in ends:
        path = path_to(end, parents.__getitem__)
        shared = next((n for n, call in enumerate(path) if call not in owned), len(path))
        owned.update(path)
        yield path, shared


@dataclass(slots=True, eq=False)
class _Node:
    """A node of the radix tree of the calls' token sequences: a prompt or a call ends here, or sequences diverge."""

    edge: bytes = b""
    """The packed tokens between the parent node and this one."""
    children: "dict[bytes, _Node]" = field(default_factory=dict)
    """First token of a child's edge, packed -> the child."""
    first_call: int | None = None
    """The first call whose prompt and completion end here."""


def _insert(node: _Node, packed: bytes) -> tuple[_Node, _Node | None]:
    """Insert the `packed` tokens below `node`, and return the node where they end.

    Also return the deepest node between `node` and that one, both included, where a call ends; None if there is none.
    """
    position = 0
    longest = None if node.first_call is None else node
    while position < len(packed):
        child = node.children.get(first := packed[position : position + TOKEN_BYTES])
        if child is None:
            node.children[first] = child = _Node(packed[position:])
        elif not packed.startswith(child.edge, position):
            rest = packed[position : position + len(child.edge)]
            child = node.children[first] = _split(child, common_length(child.edge, rest) * TOKEN_BYTES)
        node = child
        position += len(node.edge)
        if node.first_call is not None:
            longest = node
    return node, longest


def _split(node: _Node, length: int) -> _Node:
    """Split the edge to `node` after `length` bytes, and return the new node there. `node` keeps its sequence."""
    middle = _Node(node.edge[:length])
    node.edge = node.edge[length:]
    middle.children[node.edge[:TOKEN_BYTES]] = node
    return middle


def _continues(call: Call, parent: Call) -> bool:
    sampled = len(parent.prompt_ids)
    end = sampled + len(parent.completion_ids)
    if call.prompt_ids[sampled:end] != parent.completion_ids:
        return False
    if isinstance(call.prompt_ids, Tokens):
        return call.prompt_ids.startswith(parent.prompt_ids)
    return call.prompt_ids[:sampled] == parent.prompt_ids


def _superseded(prompt_nodes: Sequence[_Node], parents: Sequence[int | None]) -> set[int]:
    siblings: defaultdict[tuple[int | None, _Node], list[int]] = defaultdict(list)
    for i, key in enumerate(zip(parents, prompt_nodes, strict=True)):
        siblings[key].append(i)
    continued = set(parents)
    superseded: set[int] = set()
    for group in siblings.values():
        if not continued.isdisjoint(group):
            superseded.update(i for i in group if i not in continued)
    return superseded
