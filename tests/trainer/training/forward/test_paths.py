"""Paths of a forest: where the keys of a segment's ancestors lie."""

from math import log2

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.training.forward import paths as module
from rolltap.trainer.training.forward.forest import build_forest
from rolltap.trainer.training.forward.paths import Batch, Paths, Slice
from tests.trainer.training.forward.test_forest import many_rows, row


@given(many_rows(), st.integers(1, 40))
def test_a_segments_slices_hold_its_ancestors_in_order(rows, size):
    segments = build_forest(rows, size)
    paths = Paths(segments)
    for k, segment in enumerate(segments):
        if (own := paths.own(k)) is not None:
            pair = tuple(torch.tensor(segment.ids)[:, None, None] for _ in range(2))
            paths.write(own, 0, pair)
            paths.add(own, 0, tuple(x.float() for x in pair))
    for k, segment in enumerate(segments):
        ancestors, above = [], segment.parent
        while above >= 0:
            ancestors.insert(0, segments[above].ids)
            above = segments[above].parent
        slices = paths.before(k)
        assert len(slices) <= 1 + log2(len(segments))
        for read in (paths.read, paths.gradients):
            found = [read(at, 0, torch.device("cpu"))[1].flatten().long().numpy() for at in slices]
            assert np.array_equal(np.concatenate([[], *found]), np.concatenate([[], *ancestors]))


def test_gradients_add_up_in_float32_and_are_none_before():
    paths = Paths(build_forest([row([*range(40), i, i]) for i in (50, 51)], 100))
    own = paths.own(0)
    keys = torch.full((40, 1, 2), 1.0, dtype=torch.bfloat16)
    assert paths.gradients(own, 0, keys.device) is None
    for _ in range(512):
        paths.add(own, 0, (keys, keys))
    assert (paths.gradients(own, 0, keys.device)[0] == 512).all()
    paths.free(0)
    assert paths.tensors == []


def test_tokens_that_see_the_same_slice_see_it_together(monkeypatch):
    monkeypatch.setattr(module, "POSITIONS", 30)
    trunk = list(range(100, 140))
    segments = build_forest([row([*trunk, i, i, i]) for i in range(3)] + [row([*trunk[:20], 9, 9])], 100)
    paths = Paths(segments)
    leaves = sorted((k for k, one in enumerate(segments) if not one.inner), key=paths.before)
    batch = Batch(paths, leaves, [segments[k].start for k in leaves], [len(segments[k].ids) for k in leaves], rows=1)
    assert [(tokens, at) for tokens, at, _ in batch.views] == [
        (slice(0, 1), Slice(0, 0, 20)),
        (slice(1, 7), Slice(0, 0, 30)),
        (slice(1, 7), Slice(0, 30, 40)),
    ]


def test_a_window_shows_the_end_of_what_is_before():
    trunk = list(range(100, 140))
    segments = build_forest([row([*trunk, i, i, i]) for i in range(2)], 100)
    batch = Batch(Paths(segments), [1, 2], [40, 40], [2, 2], rows=1)
    spans, tails = batch.tails(8)
    assert tails == [[Slice(0, 33, 40)]] * 2
    assert (spans.queries, spans.keys, spans.window) == ([2, 2], [9, 9], 8)
    assert batch.tails(42) is None
