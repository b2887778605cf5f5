"""Which rows a step trains: a function of the seed and the step, so that a resumed run goes on with the next ones."""

import math
import random


def rows_of_step(step: int, num_rows: int, rows_per_step: int, *, seed: int, shuffle: bool = True) -> list[int]:
    """Return the indices of the `rows_per_step` rows of generation step `step`, counted from 0. They are all different.

    The rows are passed over again and again, each time in an order of its own; without `shuffle` in theirs. The steps
    take them one after the other. In a step that ends one pass and begins the next, the rows that it has already are
    at the end of the next pass.
    """
    passes = rows_per_step // math.gcd(num_rows, rows_per_step)  # fill steps: no step goes on after the last of them
    period, place = divmod(step, passes * num_rows // rows_per_step)
    end = (place + 1) * rows_per_step
    taken: list[int] = []
    for number in range(period * passes, (period + 1) * passes):
        order = list(range(num_rows))
        if shuffle:
            random.Random(f"{seed}/{number}").shuffle(order)
        begun = set(taken[len(taken) - len(taken) % rows_per_step :])
        taken += sorted(order, key=lambda row, begun=begun: row in begun)  # type: ignore[misc]
        if len(taken) >= end:
            break
    return taken[end - rows_per_step : end]
