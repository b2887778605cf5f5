import copy
import json
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.traces.tokens import Tokens, common_length, to_bytes
from tests.deep import examples
from tests.trainer.forests import TOKEN, common

IDS = st.lists(st.integers(0, 4), max_size=5)
BOUND = st.none() | st.integers(-8, 8)


def chain(parts):
    """Return the sequence of all parts, each of which extends the one before."""
    tokens = None
    for part in parts:
        tokens = Tokens(part, tokens)
    return tokens


@st.composite
def tokens_and_lists(draw):
    """Draw a sequence, possibly one that extends others, and the list of its ids."""
    parts = draw(st.lists(IDS, min_size=1, max_size=4))
    return chain(parts), [token for part in parts for token in part]


class TestAsAList:
    @given(tokens_and_lists(), IDS)
    @examples(300)
    def test_it_reads_as_the_list_of_its_ids(self, both, more):
        tokens, ids = both
        assert list(tokens) == ids
        assert len(tokens) == len(ids)
        assert repr(tokens) == repr(ids)
        assert bool(tokens) == bool(ids)
        assert [tokens[i] for i in range(-len(ids), len(ids))] == ids + ids
        assert [token in tokens for token in range(6)] == [token in ids for token in range(6)]
        assert tokens + more == ids + more
        assert more + tokens == more + ids
        assert tokens + tokens == ids + ids
        assert np.array(tokens).tolist() == np.asarray(tokens, np.int64).tolist() == ids
        assert json.dumps(tokens[:]) == json.dumps(ids)
        assert to_bytes(tokens) == to_bytes(ids)

    @given(tokens_and_lists(), BOUND, BOUND, st.none() | st.integers(-3, 3).filter(bool))
    @examples(500)
    def test_its_slices_are_those_of_the_list(self, both, start, stop, step):
        tokens, ids = both
        assert tokens[start:stop:step] == ids[start:stop:step]

    @given(tokens_and_lists(), tokens_and_lists())
    @examples(500)
    def test_it_equals_and_begins_with_a_sequence_as_its_list_does(self, both, others):
        tokens, ids = both
        other, other_ids = others
        same = ids == other_ids
        for one, two in ((tokens, other), (tokens, other_ids), (other_ids, tokens)):
            assert (one == two) == same
            assert (one != two) == (not same)
        starts = ids[: len(other_ids)] == other_ids
        assert tokens.startswith(other) == tokens.startswith(other_ids) == starts

    def test_another_type_is_not_equal_and_what_a_list_of_ids_refuses_is_refused(self):
        assert Tokens([1, 2]) != (1, 2)
        for index in (2, -3):
            with pytest.raises(IndexError):
                Tokens([1, 2])[index]
        for make in (Tokens, to_bytes):
            with pytest.raises(OverflowError):
                make([2**31])

    def test_a_long_chain_is_copied_whole(self):
        last = chain([number] for number in range(2000))
        for copied in (copy.copy(last), copy.deepcopy(last), pickle.loads(pickle.dumps(last))):
            assert copied == list(range(2000))


def held(make):
    """Return what a function makes, and the bytes that it holds."""
    tracemalloc.start()
    made = make()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return made, size


class TestSharing:
    @given(st.lists(st.tuples(st.integers(0, 7), IDS), max_size=8))
    @examples(500)
    def test_sequences_that_continue_the_same_one_have_each_their_own_ids(self, parts):
        tokens = [Tokens([])]
        lists = [[]]
        for place, own in parts:
            before = place % len(tokens)
            tokens.append(Tokens(own, tokens[before]))
            lists.append(lists[before] + own)
        assert tokens == lists
        for one, ids in zip(tokens, lists, strict=True):
            starts = [ids[: len(other)] == other for other in lists]
            assert [one.startswith(other) for other in tokens] == starts

    def test_a_chain_holds_its_ids_once(self):
        parts = [list(range(1000 * number, 1000 * number + 20)) for number in range(1000)]
        last, size = held(lambda: chain(parts))
        assert size < 10 * len(last) * 4

    def test_branches_of_a_prompt_hold_it_once(self):
        root = Tokens(range(100_000))
        branches, size = held(lambda: [Tokens([number], root) for number in range(100)])
        assert branches[-1][-2:] == [99_999, 99]
        assert size < 100_000


@given(st.lists(TOKEN), st.lists(TOKEN))
@examples(500)
def test_packed_sequences_have_the_prefixes_of_their_tokens(a, b):
    assert common_length(to_bytes(a), to_bytes(b)) == common(a, b)
    assert to_bytes(a).startswith(to_bytes(b)) == (a[: len(b)] == b)
