"""The agreement of the weights of trainer and engine."""

import math

import pytest

from rolltap.trainer.engine.weights import FIXED_TEXT, fixed_ids, mean_difference


def test_the_difference_is_the_mean_of_rows_of_one_length():
    assert mean_difference([-1.0, -2.0, -3.0], [-1.0, -2.5, -2.5]) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="nothing to compare"):
        mean_difference([], [])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        mean_difference([-1.0], [-1.0, -2.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_never_agreement(bad):
    assert mean_difference([-1.0, bad], [-1.0, -2.0]) == math.inf
    assert mean_difference([-1.0, -2.0], [bad, -2.0]) == math.inf
    assert mean_difference([bad], [bad]) == math.inf


def test_the_text_is_encoded_without_special_tokens(tokenizer):
    ids = fixed_ids(tokenizer)
    assert tokenizer.decode(ids) == FIXED_TEXT
    assert len(ids) >= 150
    assert not set(ids) & set(tokenizer.all_special_ids)
