"""The calls of one session -> call tree.

A call's parent is the longest earlier call whose prompt and completion begin its prompt, token for token. Anything
else is another branch or another root: nothing is repaired.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

from rolltap.addons.calls import Call
from rolltap.trainer.shared_prefixes import TOKEN_BYTES, pack


def start_order(call: Call) -> tuple[datetime, int, str]:
    """The key that sorts a session's calls by when they started; of calls of one instant the shorter prompt is first,
    so that a parent comes before its children."""
    return call.started_at, len(call.prompt_ids), call.call_id


def link_calls(calls: Sequence[Call]) -> tuple[list[int | None], set[int]]:
    """The call tree of one session's calls, which are in `start_order`.

    Returns the index of each call's parent, None for a root; and the indices of the superseded calls. Among earlier
    calls with the same tokens the recorded parent is the parent, else the first. A call is superseded when nothing
    extends it while something extends a sibling with the same prompt: the harness asked again.

    Time and memory are linear in the prompts' tokens, but for the sorting, which takes one comparison a call where
    calls continue one another.
    """
    tokens = _tokens(calls)
    parents = _parents(calls, tokens)
    return parents, _superseded(calls, tokens, parents)


def _tokens(calls: Sequence[Call]) -> list[bytes]:
    """Prompt and completion of each call, packed. A prompt that begins with the recorded parent's tokens takes over
    their bytes: lists that were read together share their numbers, and are compared faster than packed."""
    tokens: list[bytes] = []
    index: dict[str | None, int] = {}
    for i, call in enumerate(calls):
        known, begin = b"", 0
        if (recorded := index.get(call.parent_id)) is not None and _continues(call, calls[recorded]):
            known = tokens[recorded]
            begin = len(known) // TOKEN_BYTES
        tokens.append(known + pack(call.prompt_ids[begin:] + call.completion_ids))
        index[call.call_id] = i
    return tokens


def _continues(call: Call, parent: Call) -> bool:
    sampled = len(parent.prompt_ids)
    end = sampled + len(parent.completion_ids)
    return call.prompt_ids[sampled:end] == parent.completion_ids and call.prompt_ids[:sampled] == parent.prompt_ids


def _parents(calls: Sequence[Call], tokens: Sequence[bytes]) -> list[int | None]:
    index: dict[str | None, int] = {call.call_id: i for i, call in enumerate(calls)}
    parents: list[int | None] = [None] * len(calls)
    # each call's first twin: the first call with the same tokens, maybe itself
    first = list(range(len(calls)))
    # the first twins of all calls whose tokens begin the current one's, from the shortest up to its own
    prefixes: list[int] = []
    for i in sorted(range(len(calls)), key=tokens.__getitem__):
        while prefixes and not tokens[i].startswith(tokens[prefixes[-1]]):
            prefixes.pop()
        if prefixes and len(tokens[prefixes[-1]]) == len(tokens[i]):
            first[i] = prefixes[-1]
        else:
            prefixes.append(i)
        prompt_bytes = TOKEN_BYTES * len(calls[i].prompt_ids)
        parent = next((j for j in reversed(prefixes) if j < i and len(tokens[j]) <= prompt_bytes), None)
        recorded = index.get(calls[i].parent_id)
        if recorded is not None and recorded < i and first[recorded] == parent:
            parent = recorded
        parents[i] = parent
    return parents


def _superseded(calls: Sequence[Call], tokens: Sequence[bytes], parents: Sequence[int | None]) -> set[int]:
    siblings: defaultdict[tuple[int | None, int], list[int]] = defaultdict(list)
    for i, parent in enumerate(parents):
        siblings[parent, len(calls[i].prompt_ids)].append(i)
    extended = set(parents)
    superseded: set[int] = set()
    for (parent, length), group in siblings.items():
        if len(group) == 1 or extended.isdisjoint(group):
            continue
        start = 0 if parent is None else len(tokens[parent])
        retried = {tokens[i][start : length * TOKEN_BYTES] for i in group if i in extended}
        superseded.update(i for i in group if i not in extended and tokens[i][start : length * TOKEN_BYTES] in retried)
    return superseded
