import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.traces.tree import (
    find_ends,
    link_calls,
    parents_first,
    path_to,
    split_lines,
    start_order,
)
from tests.deep import examples
from tests.trainer.forests import (
    START,
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
    tree = {call_id: None if i is None else ids[i] for call_id, i in zip(ids, parents, strict=True)}
    return tree, {ids[i] for i in superseded}


class TestParents:
    @pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
    def test_thousands_of_turns_and_of_siblings_are_linked(self, recorded):
        calls = [make_call(0, [1], [2])]
        for number in range(1, 2000):
            calls.append(
                follow(
                    number,
                    calls[-1],
                    [],
                    [number % 7],
                    parent_id=str(number - 1) if recorded else None,
                )
            )
        side = [
            follow(
                number, calls[99], [100 + number % 50], [3], parent_id="99" if recorded else None
            )
            for number in range(2000, 3000)
        ]
        random.Random(0).shuffle(calls)
        parents, superseded = linked(calls + side)
        chain = {str(number): str(number - 1) for number in range(1, 2000)}
        assert parents == {"0": None, **chain, **dict.fromkeys(map(str, range(2000, 3000)), "99")}
        assert superseded == set()

    def test_turns_that_were_recorded_backwards_are_roots(self):
        calls = [make_call(0, [1], [2])]
        for number in range(1, 2000):
            calls.append(
                follow(number, calls[-1], [], [3], started_at=START - timedelta(seconds=number))
            )
        assert set(linked(calls)[0].values()) == {None}


class TestParentsFirst:
    def test_a_parent_that_is_not_among_the_calls_is_none(self):
        assert parents_first({"a": "gone", "b": "a"}) == [("a", None), ("b", "a")]

    def test_calls_of_a_cycle_and_their_descendants_come_last_without_parents(self):
        recorded = {"after": "x", "x": "y", "y": "x", "self": "self", "root": None}
        assert parents_first(recorded) == [
            ("root", None),
            *((call, None) for call in ("after", "x", "y", "self")),
        ]

    @given(st.dictionaries(st.sampled_from("abcdefgh"), st.none() | st.sampled_from("abcdefgh")))
    def test_every_call_is_there_once_and_after_its_parent(self, recorded):
        ordered = parents_first(recorded)
        assert sorted(call for call, _ in ordered) == sorted(recorded)
        seen = set()
        for call, parent in ordered:
            assert parent is None or (parent in seen and parent == recorded[call])
            seen.add(call)


class TestLines:
    PARENTS = (None, 0, 1, 0, None, 3, 3)

    def test_a_path_goes_from_the_root_to_the_call(self):
        assert path_to(6, self.PARENTS.__getitem__) == [0, 3, 6]

    def test_the_ends_of_some_calls_are_those_without_descendants_among_them(self):
        assert find_ends(self.PARENTS, range(7)) == [2, 4, 5, 6]
        assert find_ends(self.PARENTS, [0, 1, 3, 6]) == [1, 6]
        assert find_ends(self.PARENTS, [0, 6]) == [6]

    def test_each_call_is_owned_by_the_first_line_that_reaches_it(self):
        assert list(split_lines(self.PARENTS, [6, 2, 5, 3])) == [
            ([0, 3, 6], 0),
            ([0, 1, 2], 1),
            ([0, 3, 5], 2),
            ([0, 3], 2),
        ]


class TestProperties:
    @given(forests(), st.randoms(use_true_random=False))
    @examples(500)
    def test_the_tree_follows_the_definition_for_any_order_of_the_calls(self, calls, rng):
        rng.shuffle(calls)
        parents = parents_by_definition(calls)
        assert linked(calls) == (parents, superseded_by_definition(calls, parents))
