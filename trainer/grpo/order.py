"""Which rows a step trains: a function of the seed and the step, so that a resumed run goes on with the next ones."""

import random


def rows_of_step(step: int, num_rows: int, rows_per_step: int, *, seed: int, shuffle: bool = True) -> list[int]:
    """Return the indices of the `rows_per_step` rows of generation step `step`, counted from 0.

    The rows are passed over again and again, each time in an order of its own; without `shuffle` in theirs. Rows that
    do not fill a step at the end of a pass are left out of that pass.
    """
    steps_per_pass = num_rows // rows_per_step
    number, place = divmod(step, steps_per_pass)
    order = list(range(num_rows))
    if shuffle:
        random.Random(f"{seed}/{number}").shuffle(order)
    return order[place * rows_per_step : (place + 1) * rows_per_step]
