import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.traces.tree import link_calls, parents_first, split_lines, start_order
from tests.deep import examples
from tests.factories import START
from tests.trainer.forests import (
    follow,
    forests,
    make_call,
    parents_by_definition,
    superseded_by_definition,
)


def linked(calls):
    """Return a map of call ids to the parents' call ids or None, and the ids of the superseded
    calls."""
    calls = sorted(calls, key=start_order)
    parents, superseded = link_calls(calls)
    ids = [call.call_id for call in calls]
    tree = {}
    for call_id, parent in zip(ids, parents, strict=True):
        tree[call_id] = None if parent is None else ids[parent]
    return tree, {ids[i] for i in superseded}


@given(forests(), st.randoms(use_true_random=False))
@examples(500)
def test_the_tree_follows_the_definition_for_any_order_of_the_calls(calls, rng):
    rng.shuffle(calls)
    parents = parents_by_definition(calls)
    assert linked(calls) == (parents, superseded_by_definition(calls, parents))


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
def test_thousands_of_turns_and_of_siblings_are_linked(recorded):
    parents = {"0": None}
    calls = [make_call(0, [1], [2])]

    def add(number, parent, *tokens):
        known = parent.call_id if recorded else None
        calls.append(follow(number, parent, *tokens, parent_id=known))
        parents[str(number)] = parent.call_id

    for number in range(1, 2000):
        add(number, calls[-1], [], [number % 7])
    for number in range(2000, 3000):
        add(number, calls[99], [100 + number % 50], [3])
    random.Random(0).shuffle(calls)
    assert linked(calls) == (parents, set())


def test_turns_that_were_recorded_backwards_are_roots():
    calls = [make_call(0, [1], [2])]
    for number in range(1, 2000):
        before = START - timedelta(seconds=number)
        calls.append(follow(number, calls[-1], [], [3], started_at=before))
    parents, _ = linked(calls)
    assert set(parents.values()) == {None}


NAMES = st.sampled_from("abcdefgh")


@given(st.dictionaries(NAMES, st.none() | NAMES))
def test_every_call_is_there_once_and_after_its_parent(recorded):
    ordered = parents_first(recorded)
    assert sorted(call for call, _ in ordered) == sorted(recorded)
    seen = set()
    for call, parent in ordered:
        assert parent is None or (parent in seen and parent == recorded[call])
        seen.add(call)


def test_calls_of_a_cycle_and_their_descendants_come_last_without_parents():
    recorded = {"after": "x", "x": "y", "y": "x", "self": "self", "root": "gone", "child": "root"}
    first = [("root", None), ("child", "root")]
    cycles = [("after", None), ("x", None), ("y", None), ("self", None)]
    assert parents_first(recorded) == first + cycles


def test_each_call_is_owned_by_the_first_line_that_reaches_it():
    parents = (None, 0, 1, 0, None, 3, 3)
    assert list(split_lines(parents, [6, 2, 5, 3])) == [
        ([0, 3, 6], 0),
        ([0, 1, 2], 1),
        ([0, 3, 5], 2),
        ([0, 3], 2),
    ]
