"""A generation batch on its way to the loss."""

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import GroupReward, KindSpan, TraceBatch
from rolltap.trainer.traces.ledger import Ledger
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
from tests.trainer.training.step.small_models import make_row
from tests.trainer.training.step.tiny import make_trace

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
CPU = torch.device("cpu")
REWARDS = {
    "a0": GroupReward(group_id="a", reward=1.0),
    "a1": GroupReward(group_id="a", reward=1.0),
    "b0": GroupReward(group_id="b", reward=0.0),
    "b1": GroupReward(group_id="b", reward=1.0),
    "c0": GroupReward(group_id="c", reward=0.5),
}


def sessions_of(traces, routing=False, **advantages):
    """Return the sessions of traces, whose advantages are 1 but for those that are given."""
    every = {trace.session_id: 1.0 for trace in traces}
    return session_tokens(traces, every | advantages, routing=routing, embeddings=100)


def parts_of(sessions, accumulation=1, processes=1, loss_type="grpo"):
    return micro_batches(
        sessions,
        accumulation=accumulation,
        processes=processes,
        loss_type=loss_type,
        total_sessions=len(sessions),
        total_tokens=sum(session.length for session in sessions),
    )


class TestSignal:
    def test_tokens_of_equal_rewards_and_of_a_session_alone_are_left_out_by_name_and_their_rewards_stay(
        self,
    ):
        traces = [make_trace("a0", (1, 1)), make_trace("b0"), make_trace("c0", (0, 1))]
        ledger = Ledger(sampled=6, trained=4, left_out={"aborted": 2})
        batch = with_signal(TraceBatch(traces=traces, rewards=REWARDS, ledger=ledger))
        assert batch.traces == traces[1:2]
        assert batch.rewards == REWARDS
        assert batch.ledger == Ledger(sampled=6, trained=1, left_out={"aborted": 2, "no_signal": 3})
        batch.ledger.check()

    @pytest.mark.parametrize(
        ("session", "trained", "message"),
        [
            ("x", 1, r"sessions without a reward must be left out.*'x'"),
            ("a0", 5, "1 sampled tokens in 1 traces, but the batch's ledger says 5"),
        ],
    )
    def test_a_trace_without_a_reward_and_a_ledger_of_other_traces_are_refused(
        self, session, trained, message
    ):
        ledger = Ledger(sampled=trained, trained=trained)
        batch = TraceBatch(traces=[make_trace(session)], rewards=REWARDS, ledger=ledger)
        with pytest.raises(InputError, match=message):
            check_batch(batch)


class TestSessions:
    def test_a_session_is_one_row_of_the_loss_with_the_trained_tokens_of_all_its_traces(self):
        first = make_trace("a", (1, 0, 1), (1, 2), logprobs=[-0.5, float("nan"), -0.25])
        first.completion_ids = [3, 4, 5]
        first.continuity = [
            KindSpan(kind="root", start=0, end=1),
            KindSpan(kind="rendered", start=2, end=3),
        ]
        traces = [
            first,
            make_trace("b", (0, 1), logprobs=[9.0, -2.0]),
            make_trace("a", completion_ids=[8], logprobs=[-0.125]),
        ]
        [[part]] = parts_of(sessions_of(traces, a=0.5, b=-1.0))
        places = [session.traces for session in part.sessions]
        assert sorted(places) == [[0, 2], [1]]
        order = [places.index([0, 2]), places.index([1])]
        inputs = {}
        for name, tensor in part.tensors(CPU).items():
            if isinstance(tensor, torch.Tensor):
                inputs[name] = tensor[order].tolist()
        assert inputs["old_per_token_logps"] == [[-0.5, -0.25, -0.125], [-2.0, 0.0, 0.0]]
        assert inputs["completion_mask"] == [[1, 1, 1], [1, 0, 0]]
        assert inputs["advantages"] == [0.5, -1.0]
        assert inputs["kinds"][0] == [KINDS.index("root"), KINDS.index("rendered"), -1]
        rows = part.sessions[order[0]].rows
        assert [row.ids[row.scored].tolist() for row in rows] == [[3, 5], [8]]

    def test_a_log_probability_whose_ratio_would_be_infinite_is_bounded(self):
        [session] = sessions_of([make_trace("a", (1, 1), logprobs=[-200.0, -3.0])])
        assert session.tokens[0].tolist() == [-40.0, -3.0]

    def test_a_session_without_a_trained_token_is_no_row(self):
        assert sessions_of([make_trace("a", [0])]) == []

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"prompt_ids": []}, "trace a/0 trains its first token"),
            ({"logprobs": []}, "a/0 has 1 completion ids, 1 mask values and 0 log-prob"),
            ({"prompt_ids": [100]}, "has the token id 100, but the model has 100 embeddings"),
            ({"routing": None}, "routing=True"),
        ],
    )
    def test_a_trace_that_cannot_be_trained_on_is_refused(self, wrong, message):
        trace = replace(make_trace("a"), **wrong)
        with pytest.raises(InputError, match=message):
            sessions_of([trace], routing="routing" in wrong)


def nodes(rows):
    """Return the number of nodes of the rows' prefix tree."""
    prefixes = set()
    for ids in rows:
        prefixes.update(tuple(ids[:end]) for end in range(1, len(ids) + 1))
    return len(prefixes)


class TestSpread:
    @given(st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=9), st.integers(1, 5))
    def test_every_session_is_in_exactly_one_part(self, sessions, parts):
        lists = spread([[make_row(ids, []) for ids in session] for session in sessions], parts)
        assert len(lists) == parts
        assert sorted(chain(*lists)) == list(range(len(sessions)))

    @given(st.lists(IDS, min_size=1, max_size=7), st.integers(1, 4))
    def test_the_largest_part_is_first_and_as_small_as_cuts_of_the_prefix_order_allow(
        self, rows, parts
    ):
        lists = spread([[make_row(ids, [])] for ids in rows], parts)
        sizes = [nodes([rows[i] for i in part]) for part in lists]
        assert sizes == sorted(sizes, reverse=True)
        ordered = sorted(rows, key=lambda ids: np.array(ids, np.int32).tobytes())

        def smallest(start, parts):
            if start == len(ordered):
                return 0
            if not parts:
                return math.inf
            found = math.inf
            for cut in range(start + 1, len(ordered) + 1):
                largest = max(nodes(ordered[start:cut]), smallest(cut, parts - 1))
                found = min(found, largest)
            return found

        assert max(sizes) == smallest(0, parts)


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=9)


class TestMicroBatches:
    @given(LENGTHS, st.integers(1, 3), st.integers(1, 3))
    def test_the_weights_make_the_mean_of_micro_batches_the_mean_over_all(
        self, lengths, accumulation, processes
    ):
        """The value of each token is the number of its session."""
        traces = [make_trace(str(i), [1] * length, [1, i]) for i, length in enumerate(lengths)]
        numbers = range(len(lengths))
        wanted = {"grpo": np.mean(numbers), "bnpo": np.average(numbers, weights=lengths)}
        for loss_type, mean in wanted.items():
            total = 0.0
            found = parts_of(sessions_of(traces), accumulation, processes, loss_type)
            for part in chain(*found):
                values = [session.traces[0] for session in part.sessions]
                loss = sum(values) / part.size
                if loss_type == "bnpo" and values:
                    weights = [session.length for session in part.sessions]
                    loss = np.average(values, weights=weights)
                total += loss * part.weight / accumulation / processes
            assert total == pytest.approx(mean)

    def test_rows_of_processes_are_as_many_and_empty_ones_count_nothing(self):
        traces = [make_trace(str(i), prompt=[1, i]) for i in range(3)]
        found = parts_of(sessions_of(traces), processes=2)
        assert [part.size for [part] in found] == [2, 2]
        numbers = [int(part.tensors(CPU)["completion_mask"].sum()) for [part] in found]
        assert sorted(numbers) == [1, 2]
        assert loss_weight("dapo", 4, 0.25, 0.25) == 1.0


def rows_of_steps(steps, rows, per_step, seed=0, **options):
    """Return the rows of the first steps, one after another."""
    taken = []
    for step in range(steps):
        found = rows_of_step(step, rows, per_step, seed=seed, **options)
        assert len(set(found)) == len(found) == per_step
        taken += found
    return taken


@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 9), st.booleans())
def test_every_pass_has_each_row_once_and_no_step_has_a_row_twice(more, per_step, seed, shuffle):
    rows = per_step + more
    taken = rows_of_steps(3 * rows, rows, per_step, seed, shuffle=shuffle)
    for start in range(0, len(taken), rows):
        assert sorted(taken[start : start + rows]) == list(range(rows))


def test_passes_and_seeds_have_orders_of_their_own():
    taken = rows_of_steps(12, 10, 4)  # passes end within a step
    passes = [tuple(taken[start : start + 10]) for start in range(0, 40, 10)]
    passes.append(tuple(rows_of_steps(2, 10, 5, seed=1)))
    assert len(set(passes)) == 5


def test_without_shuffling_rows_keep_their_order():
    assert rows_of_steps(5, 5, 2, seed=7, shuffle=False) == [*range(5)] * 2
