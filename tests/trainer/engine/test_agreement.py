import math

import pytest

from rolltap.trainer.engine.weights import FIXED_TEXT, LIMITS, fixed_ids, mean_difference


def test_the_difference_is_the_mean_over_the_tokens_whatever_its_sign():
    assert mean_difference([-1.0, -2.0, -3.0], [-1.0, -2.5, -2.5]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_never_agreement(bad):
    assert mean_difference([-1.0, bad], [-1.0, -2.0]) == math.inf
    assert mean_difference([-1.0, -2.0], [bad, -2.0]) == math.inf
    assert mean_difference([bad], [bad]) == math.inf


@pytest.mark.parametrize("rows", [([], []), ([-1.0], [-1.0, -2.0])])
def test_rows_that_do_not_belong_together_are_refused(rows):
    with pytest.raises(ValueError, match=r"nothing to compare|shorter|longer"):
        mean_difference(*rows)


def test_the_text_is_encoded_without_special_tokens(tokenizer):
    ids = fixed_ids(tokenizer)
    assert tokenizer.decode(ids) == FIXED_TEXT
    assert len(ids) >= 150
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_every_type_of_a_recipe_has_a_limit():
    assert set(LIMITS) == {"bfloat16", "float16", "float32"}
