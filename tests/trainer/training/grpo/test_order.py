"""The rows of a step."""

from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.training.grpo.trainer import rows_of_step


@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 9), st.booleans())
def test_every_pass_has_each_row_once_and_no_step_has_a_row_twice(more, per_step, seed, shuffle):
    rows = per_step + more
    steps = [rows_of_step(step, rows, per_step, seed=seed, shuffle=shuffle) for step in range(3 * rows)]
    assert all(len(set(step)) == len(step) == per_step for step in steps)
    taken = [row for step in steps for row in step]
    for start in range(0, len(taken), rows):
        assert sorted(taken[start : start + rows]) == list(range(rows))


def test_passes_and_seeds_have_orders_of_their_own():
    orders = [
        [rows_of_step(first + step, 12, 3, seed=seed) for step in range(4)] for first, seed in [(0, 0), (4, 0), (0, 1)]
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] == [rows_of_step(step, 12, 3, seed=0) for step in range(4)]


def test_passes_that_do_not_end_with_a_step_have_orders_of_their_own():
    taken = [row for step in range(12) for row in rows_of_step(step, 10, 4, seed=0)]
    orders = {tuple(taken[start : start + 10]) for start in range(0, 40, 10)}
    assert len(orders) == 4


def test_without_shuffling_rows_keep_their_order():
    steps = [rows_of_step(step, 5, 2, seed=7, shuffle=False) for step in range(6)]
    assert steps == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]
