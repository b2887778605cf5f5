"""A generation batch on its way to the loss."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import GroupReward, KindSpan, TraceBatch
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.training.forward.forest import Row, trace_row
from rolltap.trainer.training.grpo.advantages import rewards_differ
from rolltap.trainer.training.grpo.batch import (
    flatten,
    limited_weights,
    rows_of_step,
    session_weights,
    spread_by_length,
    spread_by_prefix,
    token_kinds,
    tokens_by_session,
    with_signal,
)
from rolltap.trainer.training.grpo.metrics import KINDS
from tests.trainer.forests import common
from tests.trainer.training.grpo.tiny import make_trace

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def trace(session, prompt, completion, mask, logprobs=None):
    logprobs = [-1.0] * len(completion) if logprobs is None else logprobs
    return make_trace(session, mask, prompt, completion_ids=completion, logprobs=logprobs)


def row(ids):
    return Row(np.array(ids, np.int32), np.array([], np.int64))


def nodes(rows):
    """Return the number of nodes of the rows' prefix tree."""
    return len({tuple(ids[: n + 1]) for ids in rows for n in range(len(ids))})


REWARDS = {
    session: GroupReward(group_id=session[0], reward=reward)
    for session, reward in {"a0": 1.0, "a1": 1.0, "b0": 0.0, "b1": 1.0, "c0": 0.5}.items()
}


class TestSignal:
    def test_rewards_that_differ_by_rounding_are_equal(self):
        assert 0.3 != 0.1 + 0.2
        assert not rewards_differ([0.3, 0.1 + 0.2])
        assert rewards_differ([0.3, 0.1 + 0.2, 0.3 + 1e-5])

    def test_tokens_of_equal_rewards_and_of_a_session_alone_are_left_out_by_name_and_their_rewards_stay(self):
        traces = [trace("a0", [1], [2, 3], [1, 1]), trace("b0", [1], [2], [1]), trace("c0", [1], [2, 3], [0, 1])]
        ledger = Ledger(sampled=6, trained=4, left_out={"aborted": 2})
        batch = with_signal(TraceBatch(traces=traces, rewards=REWARDS, ledger=ledger))
        assert batch.traces == traces[1:2]
        assert batch.rewards == REWARDS
        assert batch.ledger == Ledger(sampled=6, trained=1, left_out={"aborted": 2, "no_signal": 3})
        batch.ledger.check()

    def test_a_trace_without_a_reward_is_refused(self):
        with pytest.raises(InputError, match=r"sessions without a reward must be left out.*'x'"):
            with_signal(TraceBatch(traces=[trace("x", [1], [2], [1])], rewards=REWARDS))


class TestWeights:
    @given(st.dictionaries(st.text(max_size=2), st.integers(1, 50), min_size=1), st.integers(1, 100))
    def test_the_mean_over_tokens_becomes_the_mean_that_was_asked_for(self, tokens, constant):
        total, sessions = sum(tokens.values()), len(tokens)

        def loss(normalise):
            """Return the loss where each token's is 1 in the first session and 0 in the others."""
            weights = session_weights(tokens, normalise, constant)
            return tokens[first] * weights[first] / total

        first = next(iter(tokens))
        assert loss("tokens") == pytest.approx(tokens[first] / total)
        assert loss("sessions") == pytest.approx(1 / sessions)
        assert loss("constant") == pytest.approx(tokens[first] / (sessions * constant))

    def test_a_session_counts_with_the_tokens_of_all_its_traces(self):
        traces = [trace("a", [1], [2, 3], [1, 0]), trace("a", [1], [4], [1]), trace("b", [1], [2], [0])]
        assert tokens_by_session(traces) == {"a": 2}


class TestSpread:
    @given(st.lists(IDS, max_size=12), st.integers(1, 5), st.sampled_from([spread_by_length, spread_by_prefix]))
    def test_every_row_is_in_exactly_one_part(self, ids, parts, spread):
        lists = spread([row(i) for i in ids], parts)
        assert len(lists) == parts
        assert sorted(i for part in lists for i in part) == list(range(len(ids)))

    @given(st.lists(IDS, min_size=1, max_size=7), st.integers(1, 4))
    def test_the_largest_part_is_as_small_as_cuts_of_the_prefix_order_allow(self, ids, parts):
        lists = spread_by_prefix([row(i) for i in ids], parts)
        sizes = [nodes([ids[i] for i in part]) for part in lists]
        assert sizes == sorted(sizes, reverse=True)
        ordered = sorted(ids, key=lambda i: np.array(i, np.int32).tobytes())

        def best(start, parts):
            if start == len(ordered):
                return 0
            if not parts:
                return 10**9
            cuts = range(start + 1, len(ordered) + 1)
            return min(max(nodes(ordered[start:cut]), best(cut, parts - 1)) for cut in cuts)

        assert max(sizes) == best(0, parts)

    def test_rows_of_a_group_stay_together(self):
        ids = [[1] * 50 + [i] for i in range(4)] + [[2] * 50 + [i] for i in range(4)]
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        lists = spread_by_prefix([row(ids[i]) for i in order], 2)
        assert {frozenset(order[i] // 4 for i in part) for part in lists} == {frozenset([0]), frozenset([1])}

    def test_rows_by_length_are_long_first(self):
        lists = spread_by_length([row([0] * n) for n in (3, 9, 1, 5, 7)], 2)
        lengths = [[(3, 9, 1, 5, 7)[i] for i in part] for part in lists]
        assert [length for part in lengths for length in part] == [9, 7, 5, 3, 1]


def test_weights_beyond_their_limits_are_truncated_or_masked():
    weights = torch.tensor([0.4, 0.5, 1.0, 2.0, 2.1, float("inf")])
    assert limited_weights(weights, "truncate", 0.5, 2.0).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert limited_weights(weights, "mask", 0.5, 2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0, 0.0]


class TestFlatten:
    def test_the_loss_sees_the_trained_tokens_of_all_traces_in_one_row(self):
        traces = [
            trace("a", [1, 2], [3, 4, 5], [1, 0, 1], [-0.5, float("nan"), -0.25]),
            trace("b", [1], [6, 7], [0, 1], [9.0, -2.0]),
        ]
        flat = flatten(traces, {"a": 0.5, "b": -1.0})
        assert flat["completion_ids"].tolist() == [[3, 5, 7]]
        assert flat["completion_mask"].tolist() == [[1, 1, 1]]
        assert flat["old_per_token_logps"].tolist() == [[-0.5, -0.25, -2.0]]
        assert flat["advantages"].tolist() == [[0.5, 0.5, -1.0]]
        assert flat["kinds"].tolist() == [[-1, -1, -1]]

    def test_its_order_is_that_of_the_scored_positions(self):
        one = trace("a", [1, 2], [3, 4, 5], [1, 0, 1])
        row = trace_row(one)
        assert (row.ids.tolist(), row.scored.tolist()) == ([1, 2, 3, 4, 5], [2, 4])
        assert row.ids[row.scored].tolist() == flatten([one], {"a": 1.0})["completion_ids"][0].tolist()

    def test_a_log_probability_whose_ratio_would_be_infinite_is_bounded(self):
        flat = flatten([trace("a", [1], [2, 3], [1, 1], [-200.0, -3.0])], {"a": 1.0})
        assert flat["old_per_token_logps"].tolist() == [[-40.0, -3.0]]

    @pytest.mark.parametrize("traces", [[], [trace("a", [1], [2], [0])]])
    def test_without_a_trained_token_there_is_one_that_does_not_count(self, traces):
        flat = flatten(traces, {})
        assert flat["completion_mask"].tolist() == [[0]]
        assert {tuple(value.shape) for value in flat.values()} == {(1, 1)}

    def test_a_first_token_cannot_be_trained(self):
        with pytest.raises(InputError, match="trace a/0 trains its first token"):
            trace_row(trace("a", [], [1, 2], [1, 1]))


def test_prefix_order_is_the_order_of_bytes_which_keeps_prefixes_adjacent():
    ids = sorted([[1, 2], [1], [256, 1], [1, 2, 3], [256]], key=lambda i: np.array(i, np.int32).tobytes())
    shared = [common(a, b) for a, b in pairwise(ids)]
    assert sum(shared) == 1 + 2 + 1


def test_a_trained_token_has_the_kind_of_its_call():
    spans = [KindSpan(kind="root", start=0, end=2), KindSpan(kind="rendered", start=4, end=5)]
    of_two_calls = replace(trace("a", [1], [2] * 5, [1, 1, 0, 0, 1]), continuity=spans)
    assert [KINDS[kind] for kind in token_kinds(of_two_calls)] == ["root", "root", "rendered"]
    assert token_kinds(trace("a", [1], [2] * 3, [0, 1, 1])).tolist() == [-1, -1]


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
    taken = [row for step in range(12) for row in rows_of_step(step, 10, 4, seed=0)]  # passes end within a step
    assert len({tuple(taken[start : start + 10]) for start in range(0, 40, 10)}) == 4


def test_without_shuffling_rows_keep_their_order():
    steps = [rows_of_step(step, 5, 2, seed=7, shuffle=False) for step in range(6)]
    assert steps == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]
