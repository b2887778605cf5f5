"""The rows of a step."""

from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.grpo.order import rows_of_step


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 9))
def test_each_pass_takes_as_many_rows_as_fill_steps_each_once(rows, per_step, seed):
    rows += per_step
    steps = rows // per_step
    for number in range(3):
        taken = [i for step in range(steps) for i in rows_of_step(number * steps + step, rows, per_step, seed=seed)]
        assert len(taken) == len(set(taken)) == steps * per_step
        assert set(taken) <= set(range(rows))


def test_passes_and_seeds_have_orders_of_their_own():
    orders = [
        [rows_of_step(first + step, 12, 3, seed=seed) for step in range(4)] for first, seed in [(0, 0), (4, 0), (0, 1)]
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] == [rows_of_step(step, 12, 3, seed=0) for step in range(4)]


def test_without_shuffling_rows_keep_their_order():
    assert [rows_of_step(step, 5, 2, seed=7, shuffle=False) for step in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]
