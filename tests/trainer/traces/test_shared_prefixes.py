import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.traces.tokens import pack
from rolltap.trainer.traces.tree import SharedPrefix, common_length, shared_prefixes
from tests.deep import examples
from tests.trainer.forests import TOKEN, common

SEQUENCES = st.lists(st.lists(TOKEN, max_size=5), max_size=12)


def shared_by_definition(sequences):
    shared = []
    for i, sequence in enumerate(sequences):
        lengths = [common(sequence, earlier) for earlier in sequences[:i]]
        longest = max(lengths, default=0)
        shared.append(SharedPrefix(lengths.index(longest), longest) if longest else None)
    return shared


class TestSharedPrefixes:
    def test_each_names_the_earlier_sequence_with_the_longest_common_prefix(self):
        system, other = [1, 2, 3], [9]
        sequences = [[*system, 4], [*other, 5], [*system, 4, 6], other, [*system, 7], [8]]
        assert shared_prefixes(sequences) == [
            None,
            None,
            SharedPrefix(0, 4),
            SharedPrefix(1, 1),
            SharedPrefix(0, 3),
            None,
        ]

    def test_of_several_with_equally_long_prefixes_it_names_the_first(self):
        assert shared_prefixes([[1, 3], [1, 4], [1, 2], [1, 2]])[1:] == [
            SharedPrefix(0, 1),
            SharedPrefix(0, 1),
            SharedPrefix(2, 2),
        ]

    def test_arrays_are_sequences(self):
        assert shared_prefixes([np.array([1, 2]), np.array([1, 3])]) == [None, SharedPrefix(0, 1)]

    def test_thousands_of_sequences_that_are_prefixes_of_each_other_are_quick(self):
        sequences = [list(range(n)) for n in range(1, 3000)]
        assert shared_prefixes(sequences) == [None, *(SharedPrefix(n - 1, n) for n in range(1, 2999))]
        assert shared_prefixes(sequences[::-1]) == [None, *(SharedPrefix(0, n) for n in range(2998, 0, -1))]

    @given(SEQUENCES)
    @examples(1000)
    def test_it_is_the_longest_common_prefix_with_any_earlier_sequence(self, sequences):
        assert shared_prefixes(sequences) == shared_by_definition(sequences)


class TestPackedTokens:
    @given(st.lists(TOKEN), st.lists(TOKEN))
    @examples(500)
    def test_packed_sequences_have_the_prefixes_of_their_tokens(self, a, b):
        assert common_length(pack(a), pack(b)) == common(a, b)
        assert pack(a).startswith(pack(b)) == (a[: len(b)] == b)

    def test_an_id_beyond_32_bits_is_refused(self):
        with pytest.raises(OverflowError):
            pack([2**31])
