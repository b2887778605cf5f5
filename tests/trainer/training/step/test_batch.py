"""A generation batch on its way to the loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import GroupReward, KindSpan, TraceBatch
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.training.step.advantages import rewards_differ
from rolltap.trainer.training.step.batch import (
    KINDS,
    check_batch,
    loss_weight,
    micro_batches,
    rows_of_step,
    session_tokens,
    spread,
    with_signal,
)
from rolltap.trainer.training.step.pack import TraceRow
from tests.trainer.training.step.tiny import make_trace

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def trace(session, prompt, completion, mask, logprobs=None):
    logprobs = [-1.0] * len(completion) if logprobs is None else logprobs
    return make_trace(session, mask, prompt, completion_ids=completion, logprobs=logprobs)


def row(ids):
    return TraceRow(np.array(ids, np.int32), np.array([], np.int64))


def nodes(rows):
    """Return the number of nodes of the rows' prefix tree."""
    return len({tuple(ids[: n + 1]) for ids in rows for n in range(len(ids))})


def sessions_of(traces, advantages=None, routing=False):
    advantages = (
        dict.fromkeys([each.session_id for each in traces], 1.0)
        if advantages is None
        else advantages
    )
    return session_tokens(traces, advantages, routing=routing, embeddings=100)


def parts_of(sessions, accumulation=1, processes=1, loss_type="grpo"):
    return micro_batches(
        sessions,
        accumulation=accumulation,
        processes=processes,
        loss_type=loss_type,
        total_sessions=len(sessions),
        total_tokens=sum(session.length for session in sessions),
    )


REWARDS = {
    session: GroupReward(group_id=session[0], reward=reward)
    for session, reward in {"a0": 1.0, "a1": 1.0, "b0": 0.0, "b1": 1.0, "c0": 0.5}.items()
}


class TestSignal:
    def test_rewards_that_differ_by_rounding_are_equal(self):
        assert 0.3 != 0.1 + 0.2
        assert not rewards_differ([0.3, 0.1 + 0.2])
        assert not rewards_differ([0.0, 1e-7])
        assert rewards_differ([0.3, 0.1 + 0.2, 0.3 + 1e-5])

    def test_tokens_of_equal_rewards_and_of_a_session_alone_are_left_out_by_name_and_their_rewards_stay(
        self,
    ):
        traces = [
            trace("a0", [1], [2, 3], [1, 1]),
            trace("b0", [1], [2], [1]),
            trace("c0", [1], [2, 3], [0, 1]),
        ]
        ledger = Ledger(sampled=6, trained=4, left_out={"aborted": 2})
        batch = with_signal(TraceBatch(traces=traces, rewards=REWARDS, ledger=ledger))
        assert batch.traces == traces[1:2]
        assert batch.rewards == REWARDS
        assert batch.ledger == Ledger(sampled=6, trained=1, left_out={"aborted": 2, "no_signal": 3})
        batch.ledger.check()

    def test_a_trace_without_a_reward_is_refused(self):
        with pytest.raises(InputError, match=r"sessions without a reward must be left out.*'x'"):
            check_batch(TraceBatch(traces=[trace("x", [1], [2], [1])], rewards=REWARDS))

    def test_a_ledger_that_is_not_of_these_traces_is_refused(self):
        batch = TraceBatch(
            traces=[trace("a0", [1], [2], [1])],
            rewards=REWARDS,
            ledger=Ledger(sampled=5, trained=5),
        )
        with pytest.raises(
            InputError, match="1 sampled tokens in 1 traces, but the batch's ledger says 5"
        ):
            check_batch(batch)


class TestSessions:
    def test_a_session_is_one_row_of_the_loss_with_the_trained_tokens_of_all_its_traces(self):
        traces = [
            trace("a", [1, 2], [3, 4, 5], [1, 0, 1], [-0.5, float("nan"), -0.25]),
            trace("b", [1], [6, 7], [0, 1], [9.0, -2.0]),
            trace("a", [1], [8], [1], [-0.125]),
        ]
        [part] = parts_of(sessions_of(traces, {"a": 0.5, "b": -1.0}))[0]
        inputs = part.tensors(torch.device("cpu"))
        by_session = {session.traces[0]: i for i, session in enumerate(part.sessions)}
        first = by_session[0]
        second = by_session[1]
        assert part.sessions[first].traces == [0, 2]
        assert inputs["old_per_token_logps"][first].tolist() == [-0.5, -0.25, -0.125]
        assert inputs["old_per_token_logps"][second].tolist() == [-2.0, 0.0, 0.0]
        assert inputs["completion_mask"][second].tolist() == [1, 0, 0]
        assert inputs["advantages"][[first, second]].tolist() == [0.5, -1.0]
        scored = [r.ids[r.scored].tolist() for r in part.sessions[first].rows]
        assert scored == [[3, 5], [8]]

    def test_a_log_probability_whose_ratio_would_be_infinite_is_bounded(self):
        [session] = sessions_of([trace("a", [1], [2, 3], [1, 1], [-200.0, -3.0])])
        assert session.tokens[0].tolist() == [-40.0, -3.0]

    def test_a_session_without_a_trained_token_is_no_row(self):
        assert sessions_of([trace("a", [1], [2], [0])]) == []

    def test_a_trained_token_has_the_kind_of_its_call(self):
        spans = [KindSpan(kind="root", start=0, end=2), KindSpan(kind="rendered", start=4, end=5)]
        traces = [
            replace(trace("a", [1], [2] * 5, [1, 1, 0, 0, 1]), continuity=spans),
            trace("a", [1], [2], [1]),
        ]
        [session] = sessions_of(traces)
        root, rendered = KINDS.index("root"), KINDS.index("rendered")
        assert session.tokens[2].tolist() == [root, root, rendered, -1]

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (trace("a", [], [1, 2], [1, 1]), "trace a/0 trains its first token"),
            (
                trace("a", [1], [1, 2], [1, 1], [-1.0]),
                "a/0 has 2 completion ids, 2 mask values and 1 log-prob",
            ),
            (trace("a", [100], [2], [1]), "has the token id 100, but the model has 100 embeddings"),
        ],
    )
    def test_a_trace_that_cannot_be_trained_on_is_refused(self, wrong, message):
        with pytest.raises(InputError, match=message):
            sessions_of([wrong])

    def test_experts_that_are_to_be_replayed_must_be_there(self):
        with pytest.raises(InputError, match=r"routing=True"):
            sessions_of([trace("a", [1], [2], [1])], routing=True)


class TestSpread:
    @given(st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=9), st.integers(1, 5))
    def test_every_session_is_in_exactly_one_part_and_the_largest_is_first(self, ids, parts):
        lists = spread([[row(i) for i in session] for session in ids], parts)
        assert len(lists) == parts
        assert sorted(i for part in lists for i in part) == list(range(len(ids)))

    @given(st.lists(IDS, min_size=1, max_size=7), st.integers(1, 4))
    def test_the_largest_part_is_as_small_as_cuts_of_the_prefix_order_allow(self, ids, parts):
        lists = spread([[row(i)] for i in ids], parts)
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


class TestMicroBatches:
    @given(
        st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 3), st.integers(1, 3)
    )
    def test_the_weights_make_the_mean_of_micro_batches_the_mean_over_all(
        self, lengths, accumulation, processes
    ):
        traces = [trace(f"s{i}", [1, i], [2] * n, [1] * n) for i, n in enumerate(lengths)]
        sessions = sessions_of(traces)
        values = {f"s{i}": float(i) for i in range(len(lengths))}
        for loss_type in ("grpo", "bnpo"):
            total = 0.0
            for process in parts_of(sessions, accumulation, processes, loss_type):
                for part in process:
                    own = [
                        (values[traces[s.traces[0]].session_id], s.length) for s in part.sessions
                    ]
                    if loss_type == "grpo":
                        loss = sum(value for value, _ in own) / part.size
                    else:
                        loss = sum(value * n for value, n in own) / max(1, sum(n for _, n in own))
                    total += loss * part.weight / accumulation / processes
            if loss_type == "grpo":
                expected = np.mean([values[f"s{i}"] for i in range(len(lengths))])
            else:
                expected = np.average(
                    [values[f"s{i}"] for i in range(len(lengths))], weights=lengths
                )
            assert total == pytest.approx(expected)

    def test_rows_of_processes_are_as_many_and_empty_ones_count_nothing(self):
        traces = [trace(f"s{i}", [1, i], [2], [1]) for i in range(3)]
        found = parts_of(sessions_of(traces), processes=2)
        assert [part.size for [part] in found] == [2, 2]
        masks = [part.tensors(torch.device("cpu"))["completion_mask"].sum() for [part] in found]
        assert sorted(map(int, masks)) == [1, 2]
        assert loss_weight("dapo", 4, 0.25, 0.25) == 1.0


@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 9), st.booleans())
def test_every_pass_has_each_row_once_and_no_step_has_a_row_twice(more, per_step, seed, shuffle):
    rows = per_step + more
    steps = [
        rows_of_step(step, rows, per_step, seed=seed, shuffle=shuffle) for step in range(3 * rows)
    ]
    assert all(len(set(step)) == len(step) == per_step for step in steps)
    taken = [row for step in steps for row in step]
    for start in range(0, len(taken), rows):
        assert sorted(taken[start : start + rows]) == list(range(rows))


def test_passes_and_seeds_have_orders_of_their_own():
    orders = [
        [rows_of_step(first + step, 12, 3, seed=seed) for step in range(4)]
        for first, seed in [(0, 0), (4, 0), (0, 1)]
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    taken = [
        row for step in range(12) for row in rows_of_step(step, 10, 4, seed=0)
    ]  # passes end within a step
    assert len({tuple(taken[start : start + 10]) for start in range(0, 40, 10)}) == 4


def test_without_shuffling_rows_keep_their_order():
    steps = [rows_of_step(step, 5, 2, seed=7, shuffle=False) for step in range(6)]
    assert steps == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]
