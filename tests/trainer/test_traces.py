import json
import math
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.addons.calls import Call, Session, VersionSpan
from rolltap.trainer.traces import Ledger, LedgerError, build_traces, label, leave_out_unrewarded

START = datetime(2026, 1, 1, tzinfo=UTC)
STRATEGIES = ["per_request", "prefix_merging"]
MERGE_CASES = json.loads((Path(__file__).parent / "merge_cases.json").read_text())["cases"]


def make_call(number, prompt_ids, completion_ids, **fields):
    """The `number`-th call to start; every sampled token has its own log-probability."""
    fields.setdefault("logprobs", [-(number + 1) - i / 64 for i in range(len(completion_ids))])
    fields.setdefault("weight_versions", [VersionSpan("1", 0, len(completion_ids))])
    return Call(
        session_id="s",
        call_id=str(number),
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        started_at=START + timedelta(seconds=number),
        **fields,
    )


def follow(number, parent, new_ids, completion_ids, **fields):
    """A call that continues `parent`."""
    return make_call(number, parent.prompt_ids + parent.completion_ids + new_ids, completion_ids, **fields)


def shown(traces):
    """What a merge case says about traces."""
    return [
        {
            "calls": [int(call_id) for call_id in trace.call_ids],
            "prompt_ids": trace.prompt_ids,
            "completion_ids": trace.completion_ids,
            "mask": trace.completion_mask,
        }
        for trace in traces
    ]


class TestMergeCases:
    @pytest.mark.parametrize("case", MERGE_CASES, ids=[case["name"] for case in MERGE_CASES])
    def test_prefix_merging_gives_the_traces_of_the_case(self, case):
        calls = [
            make_call(number, call["prompt_ids"], call["completion_ids"], logprobs=call["logprobs"] or [])
            for number, call in enumerate(case["calls"])
        ]
        for seed in range(5):
            random.Random(seed).shuffle(calls)
            traces, ledger = build_traces(calls, "prefix_merging")
            assert shown(traces) == case["traces"]
            assert ledger.left_out == case["left_out"]


class TestCallTree:
    def test_a_recorded_parent_decides_between_identical_candidates(self):
        first, second = make_call(0, [1, 2], [7]), make_call(1, [1, 2], [7])
        child = follow(2, second, [9], [20], parent_id="1")
        traces, _ = build_traces([first, second, child], "prefix_merging")
        assert [trace.call_ids for trace in traces] == [["1", "2"]]

    @pytest.mark.parametrize("parent_id", ["1", "3", "unknown"], ids=["no prefix", "started later", "unknown"])
    def test_a_recorded_parent_that_is_not_one_is_ignored(self, parent_id):
        first, other = make_call(0, [1, 2], [7]), make_call(1, [1, 3], [7])
        child = follow(2, first, [9], [20], parent_id=parent_id)
        late = make_call(3, [1, 2], [7])
        traces, _ = build_traces([first, other, child, late], "prefix_merging")
        assert [trace.call_ids for trace in traces] == [["0", "2"], ["1"]]

    def test_a_recorded_parent_does_not_beat_a_longer_prefix(self):
        root = make_call(0, [1], [7])
        turn = follow(1, root, [2], [8])
        child = follow(2, turn, [3], [9], parent_id="0")
        traces, _ = build_traces([root, turn, child], "prefix_merging")
        assert [trace.call_ids for trace in traces] == [["0", "1", "2"]]

    def test_a_call_that_started_later_is_no_parent(self):
        child, root = make_call(0, [1, 7, 2], [8]), make_call(1, [1], [7])
        traces, _ = build_traces([root, child], "prefix_merging")
        assert [trace.call_ids for trace in traces] == [["0"], ["1"]]

    def test_a_prompt_that_ends_inside_the_completion_is_another_root(self):
        traces, _ = build_traces([make_call(0, [1], [7, 8, 9]), make_call(1, [1, 7, 8], [5])], "prefix_merging")
        assert [trace.call_ids for trace in traces] == [["0"], ["1"]]

    def test_siblings_with_the_same_prompt_are_both_trained_when_neither_is_extended(self):
        traces, ledger = build_traces([make_call(0, [1], [7]), make_call(1, [1], [8])], "prefix_merging")
        assert [trace.call_ids for trace in traces] == [["0"], ["1"]]
        assert ledger == Ledger(sampled=2, trained=2)

    def test_siblings_with_other_prompts_supersede_nothing(self):
        root = make_call(0, [1], [7])
        side, main = follow(1, root, [2], [8]), follow(2, root, [3], [9])
        traces, ledger = build_traces([root, side, main, follow(3, main, [4], [5])], "prefix_merging")
        assert [trace.call_ids for trace in traces] == [["0", "1"], ["0", "2", "3"]]
        assert ledger == Ledger(sampled=4, trained=4)

    def test_hash_collisions_do_not_link_calls(self, monkeypatch):
        monkeypatch.setattr("rolltap.trainer.traces.HASH_BASE", np.uint64(0))
        root, stranger = make_call(0, [1], [7]), make_call(1, [2], [7])
        child, twin = follow(2, stranger, [3], [8]), follow(3, root, [3], [9])
        traces, ledger = build_traces([root, stranger, child, twin], "prefix_merging")
        assert [trace.call_ids for trace in traces] == [["0", "3"], ["1", "2"]]
        assert ledger.left_out == {}

    def test_thousands_of_turns_make_one_trace(self):
        calls = [make_call(0, [1], [2])]
        for number in range(1, 5000):
            calls.append(follow(number, calls[-1], [], [number % 7]))
        for strategy, traces_expected in (("prefix_merging", 1), ("per_request", 5000)):
            traces, ledger = build_traces(calls, strategy)
            assert len(traces) == traces_expected
            assert ledger == Ledger(sampled=5000, trained=5000)


class TestLeftOut:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize(
        ("reason", "fields"),
        [
            ("missing_logprobs", {"logprobs": []}),
            ("missing_logprobs", {"logprobs": [], "violation": "2 token ids but 0 log-probabilities"}),
            ("violation", {"violation": "parent x is not in the run"}),
            ("violation", {"logprobs": [-0.1, math.nan]}),
            ("violation", {"logprobs": [-0.1]}),
            ("violation", {"weight_versions": [VersionSpan("1", 0, 1)]}),
            ("aborted", {"violation": "damaged", "status": "aborted"}),
            ("aborted", {"status": "aborted"}),
            ("auxiliary", {"role": "auxiliary"}),
            ("failed", {"status": "failed"}),
        ],
    )
    def test_a_call_is_left_out_whole_with_one_reason(self, reason, fields, strategy):
        traces, ledger = build_traces([make_call(0, [1], [7, 8], **fields)], strategy)
        assert traces == []
        assert ledger == Ledger(sampled=2, left_out={reason: 2})

    def test_a_left_out_call_is_context_for_its_descendants(self):
        root = make_call(0, [1], [7, 8], status="aborted")
        child = follow(1, root, [2], [9])
        [trace], ledger = build_traces([root, child], "prefix_merging")
        assert trace.call_ids == ["0", "1"]
        assert trace.prompt_ids == [1]
        assert trace.completion_ids == [7, 8, 2, 9]
        assert trace.completion_mask == [0, 0, 0, 1]
        assert trace.logprobs == [0.0, 0.0, 0.0, *child.logprobs]
        assert trace.weight_versions == [VersionSpan("1", 3, 4)]
        assert ledger == Ledger(sampled=3, trained=1, left_out={"aborted": 2})

    def test_a_left_out_leaf_is_in_no_trace(self):
        root = make_call(0, [1], [7])
        leaf = follow(1, root, [2], [8], status="failed")
        [trace], _ = build_traces([root, leaf], "prefix_merging")
        assert trace.call_ids == ["0"]
        assert trace.completion_ids == [7]

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_a_call_that_sampled_nothing_gives_no_trace_and_no_reason(self, strategy):
        assert build_traces([make_call(0, [1], [], status="failed")], strategy) == ([], Ledger())

    def test_nan_never_reaches_a_trace(self):
        root = make_call(0, [1], [7], logprobs=[math.nan])
        [trace], _ = build_traces([root, follow(1, root, [], [8])], "prefix_merging")
        assert trace.logprobs == [0.0, -2.0]


class TestTrace:
    def test_weight_versions_are_positions_in_the_completion(self):
        root = make_call(0, [1, 1], [7, 8, 9], weight_versions=[VersionSpan("1", 0, 2), VersionSpan("2", 2, 3)])
        child = follow(1, root, [5, 5], [6], weight_versions=[VersionSpan("2", 0, 1)])
        [trace], _ = build_traces([root, child], "prefix_merging")
        assert trace.weight_versions == [VersionSpan("1", 0, 2), VersionSpan("2", 2, 3), VersionSpan("2", 5, 6)]

    def test_labels_come_from_the_session(self):
        traces, _ = build_traces([make_call(0, [1], [7])], "per_request")
        assert (traces[0].group_id, traces[0].reward) == ("", None)
        label(traces, Session("s", "task", "group", "harness", "completed", reward=0.5))
        assert (traces[0].group_id, traces[0].reward) == ("group", 0.5)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_no_calls_make_no_traces(self, strategy):
        assert build_traces([], strategy) == ([], Ledger())

    def test_calls_of_two_sessions_are_refused(self):
        other = make_call(1, [1], [7])
        other.session_id = "t"
        with pytest.raises(ValueError, match=r"one session at a time.*\['s', 't'\]"):
            build_traces([make_call(0, [1], [7]), other], "per_request")

    def test_a_repeated_call_id_is_refused(self):
        with pytest.raises(ValueError, match="session s has several calls named 0"):
            build_traces([make_call(0, [1], [7]), make_call(0, [1], [8])], "per_request")

    def test_an_unknown_strategy_is_refused(self):
        with pytest.raises(ValueError, match="choose per_request or prefix_merging"):
            build_traces([make_call(0, [1], [7])], "merge")


class TestLedger:
    def test_ledgers_add(self):
        total = Ledger(5, 2, {"failed": 3}) + Ledger(4, 1, {"failed": 1, "aborted": 2}) + Ledger()
        assert total == Ledger(9, 3, {"failed": 4, "aborted": 2})
        total.check()

    @pytest.mark.parametrize("ledger", [Ledger(5, 4), Ledger(5, 5, {"failed": 1}), Ledger(0, 1)])
    def test_a_ledger_that_does_not_add_up_is_an_error(self, ledger):
        with pytest.raises(LedgerError, match=f"{ledger.sampled} tokens sampled, {ledger.trained} trained"):
            ledger.check()

    def test_sessions_without_a_reward_move_to_no_reward(self):
        scored, scored_ledger = build_traces([make_call(0, [1], [7, 8])], "per_request")
        label(scored, Session("s", "task", "group", "harness", "completed", reward=0.0))
        unscored, unscored_ledger = build_traces(
            [make_call(1, [1], [7, 8, 9]), make_call(2, [2], [7], status="failed")], "per_request"
        )
        traces, ledger = leave_out_unrewarded(scored + unscored, scored_ledger + unscored_ledger)
        assert traces == scored
        assert ledger == Ledger(sampled=6, trained=2, left_out={"no_reward": 3, "failed": 1})

    def test_rewarded_sessions_keep_their_ledger(self):
        traces, ledger = build_traces([make_call(0, [1], [7, 8])], "per_request")
        label(traces, Session("s", "task", "group", "harness", "completed", reward=1.0))
        assert leave_out_unrewarded(traces, ledger) == (traces, ledger)


TOKENS = st.lists(st.integers(0, 2), max_size=3)


@st.composite
def forests(draw):
    """Calls of one session: continuations, retries and unrelated prompts over few tokens, so that many coincide."""
    calls = []
    for number in range(draw(st.integers(1, 12))):
        earlier = draw(st.sampled_from(calls)) if calls else None
        shape = draw(st.sampled_from(["root", "follow", "follow", "retry"])) if earlier else "root"
        match shape:
            case "follow":
                prompt_ids = earlier.prompt_ids + earlier.completion_ids + draw(TOKENS)
            case "retry":
                prompt_ids = list(earlier.prompt_ids)
            case _:
                prompt_ids = [draw(st.integers(0, 2)), *draw(TOKENS)]
        fields = draw(
            st.sampled_from([{}, {}, {}, {"logprobs": []}, {"status": "aborted"}, {"violation": "damaged"}]),
        )
        parent_id = draw(st.sampled_from([None, *(call.call_id for call in calls)]))
        call = make_call(number, prompt_ids, draw(TOKENS), parent_id=parent_id, **fields)
        # several calls may start in the same instant
        call.started_at = START + timedelta(seconds=number // 2)
        calls.append(call)
    return calls


def parents_by_definition(calls):
    """Call id -> parent's call id or None, by comparing every pair."""
    calls = sorted(calls, key=lambda call: (call.started_at, call.call_id))
    parents = {}
    for i, call in enumerate(calls):
        sequences = {earlier.call_id: earlier.prompt_ids + earlier.completion_ids for earlier in calls[:i]}
        fitting = {k: ids for k, ids in sequences.items() if call.prompt_ids[: len(ids)] == ids}
        longest = [k for k, ids in fitting.items() if len(ids) == max(map(len, fitting.values()))]
        parents[call.call_id] = call.parent_id if call.parent_id in longest else next(iter(longest), None)
    return parents


def superseded_by_definition(calls, parents):
    by_id = {call.call_id: call for call in calls}
    extended = set(parents.values())
    return {
        call_id
        for call_id in by_id
        if call_id not in extended
        and any(
            parents[sibling] == parents[call_id] and by_id[sibling].prompt_ids == by_id[call_id].prompt_ids
            for sibling in by_id
            if sibling in extended
        )
    }


def trained_tokens(traces, calls):
    """How often each (call id, position in its completion) is trained; every logprob of `forests` names its token."""
    names = {logprob: (call.call_id, i) for call in calls for i, logprob in enumerate(call.logprobs)}
    return Counter(
        names[logprob]
        for trace in traces
        for masked, logprob in zip(trace.completion_mask, trace.logprobs, strict=True)
        if masked
    )


class TestProperties:
    @given(forests())
    @settings(max_examples=300, deadline=None)
    def test_every_trainable_token_is_trained_once_under_both_strategies(self, calls):
        superseded = superseded_by_definition(calls, parents_by_definition(calls))
        expected = Counter(
            (call.call_id, i)
            for call in calls
            if call.logprobs and not call.violation and call.status == "completed" and call.call_id not in superseded
            for i in range(len(call.completion_ids))
        )
        for strategy in STRATEGIES:
            traces, ledger = build_traces(calls, strategy)
            assert trained_tokens(traces, calls) == expected
            assert ledger.trained == expected.total()
            assert ledger.sampled == sum(len(call.completion_ids) for call in calls)
            assert ledger.sampled == ledger.trained + sum(ledger.left_out.values())

    @given(forests(), st.randoms(use_true_random=False))
    @settings(max_examples=200, deadline=None)
    def test_the_order_of_the_calls_does_not_matter(self, calls, rng):
        shuffled = list(calls)
        rng.shuffle(shuffled)
        for strategy in STRATEGIES:
            assert build_traces(shuffled, strategy) == build_traces(calls, strategy)

    @given(forests())
    @settings(max_examples=300, deadline=None)
    def test_merged_traces_are_paths_of_the_call_tree_with_the_tokens_of_the_last_call(self, calls):
        by_id = {call.call_id: call for call in calls}
        parents = parents_by_definition(calls)
        traces, _ = build_traces(calls, "prefix_merging")
        for trace in traces:
            root, last = by_id[trace.call_ids[0]], by_id[trace.call_ids[-1]]
            assert [parents[call_id] for call_id in trace.call_ids] == [None, *trace.call_ids[:-1]]
            assert trace.prompt_ids == root.prompt_ids
            assert trace.prompt_ids + trace.completion_ids == last.prompt_ids + last.completion_ids
            assert trace.completion_mask[-1] == 1
            ids = trace.prompt_ids + trace.completion_ids
            for call_id in trace.call_ids:
                sequence = by_id[call_id].prompt_ids + by_id[call_id].completion_ids
                assert ids[: len(sequence)] == sequence
        assert len({trace.trace_id for trace in traces}) == len(traces)

    @given(forests())
    @settings(max_examples=200, deadline=None)
    def test_masks_logprobs_and_versions_agree(self, calls):
        for strategy in STRATEGIES:
            for trace in build_traces(calls, strategy)[0]:
                length = len(trace.completion_ids)
                assert len(trace.completion_mask) == len(trace.logprobs) == length
                assert [int(logprob < 0) for logprob in trace.logprobs] == trace.completion_mask
                versioned = [i for span in trace.weight_versions for i in range(span.start, span.end)]
                assert versioned == [i for i in range(length) if trace.completion_mask[i]]
