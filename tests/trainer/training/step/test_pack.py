"""The layout of packs, whatever their rows share and wherever they are scored."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.training.step.pack import Pack, TraceRow
from tests.trainer.training.step.small_models import make_row


@st.composite
def many_rows(draw) -> list[TraceRow]:
    """Rows that begin with earlier rows, of two tokens: they share prefixes by chance as well."""
    rows: list[TraceRow] = []
    recorded = draw(st.booleans())
    for _ in range(draw(st.integers(0, 8))):
        ids: list[int] = []
        if rows and draw(st.integers(0, 3)):
            before = draw(st.sampled_from(rows)).ids.tolist()
            ids = before[: draw(st.integers(0, len(before)))]
        ids = ids + draw(st.lists(st.sampled_from([7, 8]), min_size=1, max_size=30))
        last = len(ids) - 1
        positions = st.integers(1, max(1, last))
        scored = set()
        if last:
            scored = draw(st.sets(positions))
            if draw(st.integers(0, 3)):
                scored.add(last)
        experts = None
        if recorded and draw(st.booleans()):
            # those of other rows that begin with these tokens, but for some
            experts = np.array(ids[:-1], np.uint8).reshape(-1, 1, 1) % 2
            experts[[p - 1 for p in draw(st.sets(positions, max_size=1)) if p < len(ids)]] = 3
        one = make_row(ids, sorted(scored))
        rows.append(TraceRow(one.ids, one.scored, experts))
    return rows


@st.composite
def many_sessions(draw) -> list[list[TraceRow]]:
    """Rows in sessions, some of which have none."""
    rows = draw(many_rows())
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    return [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]


def tokens_of(row: TraceRow, end: int) -> tuple:
    """The first tokens of a row, each with its expert."""
    experts = [-1] * len(row.ids)
    if row.experts is not None:
        experts[: len(row.experts)] = row.experts[:, 0, 0].tolist()
    return tuple(zip(row.ids[:end].tolist(), experts[:end], strict=True))


def path(pack: Pack, token: int) -> list[int]:
    """A token's ancestors and the token itself, from the root on."""
    found = []
    while token >= 0:
        found.append(token)
        token = int(pack.above[token])
    return found[::-1]


def ancestors(pack: Pack) -> torch.Tensor:
    """Tokens on whose path each token is, (N, N)."""
    seen = torch.zeros(pack.tokens, pack.tokens, dtype=torch.bool)
    for token in range(pack.tokens):
        seen[token, path(pack, token)] = True
    return seen


def assert_few_stretches(pack: Pack) -> None:
    for token in range(pack.tokens):
        steps = np.diff(path(pack, token))
        assert (steps > 1).sum() <= math.log2(pack.tokens)


@given(many_sessions())
def test_each_session_has_its_scored_tokens_after_the_tokens_before_them(sessions):
    pack = Pack(sessions)
    contexts = pack.unpack(pack.contexts[None])
    labels = pack.unpack(pack.labels)
    for session, mask, before, after in zip(sessions, pack.mask, contexts, labels, strict=True):
        wanted = [(tokens_of(row, p), int(row.ids[p])) for row in session for p in row.scored]
        assert mask.tolist() == [1] * len(wanted) + [0] * (len(mask) - len(wanted))
        assert not before[len(wanted) :].any()
        for (tokens, label), context, found in zip(wanted, before, after, strict=False):
            at = path(pack, int(context))
            assert pack.ids[0, at].tolist() == [token for token, _ in tokens]
            assert found == label
            if pack.experts is not None:
                assert pack.experts[at, 0, 0].tolist() == [expert for _, expert in tokens]


@given(many_sessions())
def test_no_shared_token_and_no_shared_pair_is_there_twice(sessions):
    pack = Pack(sessions)
    rows = [row for session in sessions for row in session if len(row.scored)]
    tokens = {tokens_of(row, end) for row in rows for end in range(1, row.scored[-1] + 1)}
    pairs = {(tokens_of(row, p), int(row.ids[p])) for row in rows for p in row.scored}
    if rows:
        assert (pack.tokens, pack.labels.numel()) == (len(tokens), len(pairs))
    else:
        # a process without tokens takes part in collective operations
        assert (pack.tokens, pack.labels.tolist()) == (2, [[-100]])


@pytest.mark.parametrize("aside", [7, 9], ids=["first", "last"])
def test_the_ancestors_of_a_token_lie_in_few_stretches_because_the_largest_child_comes_first(aside):
    rows = [make_row([8] * length + [aside, 8], [length + 1]) for length in range(1, 64)]
    assert_few_stretches(Pack([[*rows, make_row([8] * 65, [64])]]))


@given(many_sessions())
def test_a_query_sees_exactly_its_ancestors_and_its_position_is_their_number(sessions):
    pack = Pack(sessions)
    every = torch.arange(pack.tokens)
    found = (every <= every[:, None]) & (every[:, None] < pack.subtree_end)
    assert torch.equal(found, ancestors(pack))
    assert torch.equal(pack.positions[0], found.sum(1) - 1)
    assert pack.depth == found.sum(1).max()


@given(many_sessions())
def test_segments_are_the_unbranched_pieces(sessions):
    pack = Pack(sessions)
    assert pack.begins.tolist() == [0, *pack.ends[:-1]]
    assert pack.ends[-1] == pack.tokens
    children = np.bincount(pack.above[pack.above >= 0], minlength=pack.tokens)
    for k, (begin, end) in enumerate(zip(pack.begins, pack.ends, strict=True)):
        assert pack.above[begin + 1 : end].tolist() == list(range(begin, end - 1))
        assert (children[begin : end - 1] == 1).all()
        # a piece with one that continues it alone would be one with it
        assert children[end - 1] != 1
        parent = pack.parents[k]
        assert pack.above[begin] == (-1 if parent < 0 else pack.ends[parent] - 1)


@given(many_sessions())
def test_the_ancestors_of_a_token_lie_in_few_stretches(sessions):
    assert_few_stretches(Pack(sessions))
