"""The calls of one session -> call tree.

A call's parent is the longest earlier call whose prompt and completion begin its prompt, token for token. Anything
else is another branch or another root: nothing is repaired.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from rolltap.addons.store.records import Call
from rolltap.trainer.traces.shared_prefixes import common_length
from rolltap.trainer.traces.tokens import TOKEN_BYTES, Tokens, pack


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
