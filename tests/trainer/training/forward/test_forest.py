"""The layout: rows of a prefix forest, whatever they share and wherever they are cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.training.forward import forest
from rolltap.trainer.training.forward.forest import (
    LEAST_SHARED,
    LEAST_SIZE,
    LEAST_WASTE,
    Row,
    Segment,
    batches,
    build_forest,
    leaves_before,
)


def row(ids, scored=None) -> Row:
    """A row whose tokens from the second on are scored, or those at `scored`."""
    return Row(np.array(ids, np.int32), np.array(range(1, len(ids)) if scored is None else scored, np.int64))


@st.composite
def many_rows(draw):
    """Rows that begin with earlier rows, of two tokens, so that they share prefixes by chance as well."""
    found: list[list[int]] = []
    for _ in range(draw(st.integers(0, 8))):
        shared = draw(st.sampled_from(found)) if found and draw(st.booleans()) else []
        shared = shared[: draw(st.integers(0, len(shared)))]
        found.append(shared + draw(st.lists(st.sampled_from([7, 8]), min_size=1, max_size=60)))
    return [
        row(ids, sorted(draw(st.sets(st.integers(1, len(ids) - 1), max_size=len(ids))) if len(ids) > 1 else ()))
        for ids in found
    ]


def before(segments: list[Segment], k: int) -> list[int]:
    """The tokens before a segment: those of its ancestors."""
    parent = segments[k].parent
    return [] if parent < 0 else before(segments, parent) + segments[parent].ids.tolist()


def prefixes(rows: list[Row]) -> int:
    """Number of tokens that a forest of these rows has, when none is computed twice."""
    return len({tuple(r.ids[: end + 1].tolist()) for r in rows if len(r.scored) for end in range(r.scored[-1])})


@given(many_rows(), st.integers(1, 70))
def test_each_scored_token_follows_its_row_and_is_scored_once(rows, size):
    segments = build_forest(rows, size)
    wanted = [(r.ids[:p].tolist(), int(r.ids[p])) for r in rows for p in r.scored]
    found: dict[int, tuple[list[int], int]] = {}
    for k, segment in enumerate(segments):
        context = before(segments, k)
        assert segment.start == len(context)
        for at, token, flat in zip(segment.at, segment.tokens, segment.flat, strict=True):
            assert int(flat) not in found
            found[int(flat)] = (context + segment.ids[: at + 1].tolist(), int(token))
    assert [found[flat] for flat in range(len(wanted))] == wanted


@given(many_rows(), st.integers(1, 70))
def test_segments_are_cut_follow_their_parents_and_lead_to_a_scored_token(rows, size):
    segments = build_forest(rows, size)
    parents = {segment.parent for segment in segments}
    for k, segment in enumerate(segments):
        # kernels of linear attention have no gradient for one token that continues a state
        assert 1 + segment.inner <= len(segment.ids) <= max(size, LEAST_SIZE)
        assert segment.parent < k
        assert segment.inner == (k in parents)
        assert segment.inner or segment.at[-1] == len(segment.ids) - 1


@given(many_rows(), st.integers(1, 70))
def test_no_shared_token_is_computed_twice(rows, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest, "LEAST_SHARED", 1)
        assert sum(len(segment.ids) for segment in build_forest(rows, size)) == prefixes(rows)


@given(many_rows())
def test_only_short_shared_pieces_are_computed_again_and_no_fork_leaves_a_short_segment(rows):
    segments = build_forest(rows, 1000)
    assert sum(len(s.ids) for s in segments) <= prefixes(rows) + (LEAST_SHARED - 1) * max(len(rows) - 1, 0)
    assert all(len(segment.ids) >= LEAST_SHARED for segment in segments if segment.inner)


def test_what_follows_the_last_scored_token_is_not_computed():
    shared = list(range(100))
    segments = build_forest([row([*shared, 1, 2, 3, 4], [100, 101]), row([*shared, 9, 9], [101])], 1000)
    assert [(s.parent, s.start, s.ids.tolist()) for s in segments] == [(-1, 0, shared), (0, 100, [1]), (0, 100, [9])]


def test_rows_that_are_prefixes_of_others_add_no_segment():
    ids = list(range(90))
    rows = [row(ids[:30], [29]), row(ids), row(ids[:60], [40, 59]), row(ids)]
    (segment,) = build_forest(rows, 1000)
    assert segment.ids.tolist() == ids[:89]
    assert len(segment.at) == 1 + 89 + 2 + 89


def test_a_long_row_is_cut_into_equal_parts():
    segments = build_forest([row(range(1001))], 300)
    assert [len(segment.ids) for segment in segments] == [250] * 4
    assert [segment.parent for segment in segments] == [-1, 0, 1, 2]


@pytest.mark.parametrize("rows", [[], [row([1])], [row([1, 2, 3], [])]], ids=["none", "one token", "nothing scored"])
def test_rows_without_a_scored_token_have_no_segment(rows):
    assert build_forest(rows, 10) == []


@given(many_rows(), st.integers(1, 70), st.integers(1, 300), st.sampled_from([None, 0, 9]))
def test_batches_run_parents_first_within_their_bounds(rows, size, tokens, of_a_row):
    segments = build_forest(rows, size)
    apart = of_a_row is not None
    found = batches(segments, tokens, apart=apart, row=of_a_row or 0)
    assert sorted(k for batch in found for k in batch) == list(range(len(segments)))
    when = {k: i for i, batch in enumerate(found) for k in batch}
    for i, batch in enumerate(found):
        lengths = [len(segments[k].ids) for k in batch]
        padded = len(batch) * max(lengths) if apart else sum(lengths)
        assert len(batch) == 1 or padded + len(batch) * (of_a_row or 0) <= tokens
        assert padded - sum(lengths) <= max(LEAST_WASTE, sum(lengths) / 4)
        assert all(segments[k].parent < 0 or when[segments[k].parent] < i for k in batch)
        inner = {segments[k].inner for k in batch}
        assert len(inner) == 1
        assert not apart or inner == {False} or len(set(lengths)) == 1
    kinds = [segments[batch[0]].inner for batch in found]
    assert kinds == sorted(kinds, reverse=True)


def test_a_row_branches_where_it_leaves_the_row_before_it():
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [1, 2, 6], [7, 8], [7, 8]]
    assert leaves_before([row(ids) for ids in rows]) == [False, True, False, False, False, False]
    assert leaves_before([]) == []


@pytest.mark.parametrize("apart", [False, True])
def test_many_short_rows_are_few_batches(apart):
    rng = np.random.default_rng(0)
    rows = [row(rng.integers(0, 1000, rng.integers(10, 60))) for _ in range(200)]
    found = batches(build_forest(rows, 4096), 4096, apart=apart)
    assert len(found) <= 3


def test_leaves_of_different_depths_are_one_batch():
    trunk = list(range(1000, 1120))
    segments = build_forest([row(trunk)] + [row([*trunk[:n], 7, 8, 9]) for n in (20, 40, 60, 80, 100)], 1000)
    assert [segment.start for segment in segments if segment.inner] == [0, 20, 40, 60, 80]
    assert len(batches(segments, 1000, apart=True)) == 5 + 1


def test_the_longest_way_goes_first_and_others_fill_its_batches():
    long = [row([*range(400), 1000 + i, 7]) for i in range(2)]
    short = [row([500 + j, *range(600, 630), 1000 + i, 7]) for j in range(8) for i in range(2)]
    segments = build_forest([*long, *short], 100)
    inner = [batch for batch in batches(segments, 140, apart=False) if segments[batch[0]].inner]
    # four segments of the long row, and beside each a short one
    assert [sorted(len(segments[k].ids) for k in batch) for batch in inner[:4]] == [[31, 100]] * 4
    assert len(inner) == 5
