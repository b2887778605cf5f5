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
    """Return the sequences of the first part, of the first two parts, and so on. Each extends the
    one before."""
    tokens = []
    for part in parts:
        tokens.append(Tokens(part, tokens[-1] if tokens else None))
    return tokens


@st.composite
def tokens_and_lists(draw):
    """Draw a sequence, possibly one that extends others, and the list of its ids."""
    parts = draw(st.lists(IDS, min_size=1, max_size=4))
    return chain(parts)[-1], [token for part in parts for token in part]


class TestAsAList:
    @given(tokens_and_lists(), IDS)
    @examples(300)
    def test_it_reads_as_the_list_of_its_ids(self, both, more):
        tokens, ids = both
        assert (len(tokens), list(tokens), repr(tokens), bool(tokens)) == (
            len(ids),
            ids,
            repr(ids),
            bool(ids),
        )
        assert [tokens[i] for i in range(-len(ids), len(ids))] == ids + ids
        assert [token in tokens for token in range(6)] == [token in ids for token in range(6)]
        assert (tokens + more, more + tokens, tokens + tokens) == (
            ids + more,
            more + ids,
            ids + ids,
        )
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
    def test_it_equals_a_sequence_with_the_same_ids(self, both, others):
        (tokens, ids), (other, other_ids) = both, others
        same = ids == other_ids
        assert (tokens == other, tokens == other_ids, other_ids == tokens) == (same, same, same)
        assert (tokens != other, tokens != other_ids, other_ids != tokens) == (
            not same,
            not same,
            not same,
        )

    def test_another_type_is_not_equal_and_what_a_list_of_ids_refuses_is_refused(self):
        assert Tokens([1, 2]) != (1, 2)
        for index in (2, -3):
            with pytest.raises(IndexError):
                Tokens([1, 2])[index]
        for make in (Tokens, to_bytes):
            with pytest.raises(OverflowError):
                make([2**31])

    @pytest.mark.parametrize(
        "copied", [copy.copy, copy.deepcopy, lambda tokens: pickle.loads(pickle.dumps(tokens))]
    )
    def test_a_long_chain_is_copied_whole(self, copied):
        last = chain([[n] for n in range(2000)])[-1]
        assert copied(last) == list(range(2000))


class TestSharing:
    @given(tokens_and_lists(), tokens_and_lists())
    @examples(500)
    def test_it_has_the_prefixes_of_its_list(self, both, others):
        (tokens, ids), (other, other_ids) = both, others
        starts = ids[: len(other_ids)] == other_ids
        assert tokens.startswith(other) == tokens.startswith(other_ids) == starts

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
        parts = [list(range(1000 * n, 1000 * n + 20)) for n in range(1000)]
        tracemalloc.start()
        tokens = chain(parts)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 10 * len(tokens[-1]) * 4

    def test_branches_of_a_prompt_hold_it_once(self):
        root = Tokens(range(100_000))
        tracemalloc.start()
        branches = [Tokens([n], root) for n in range(100)]
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert branches[-1][-2:] == [99_999, 99]
        assert held < 100_000


class TestPackedTokens:
    @given(st.lists(TOKEN), st.lists(TOKEN))
    @examples(500)
    def test_packed_sequences_have_the_prefixes_of_their_tokens(self, a, b):
        assert common_length(to_bytes(a), to_bytes(b)) == common(a, b)
        assert to_bytes(a).startswith(to_bytes(b)) == (a[: len(b)] == b)
