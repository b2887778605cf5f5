import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import LedgerError
from rolltap.addons.store.records import VersionSpan
from rolltap.trainer.names import Version
from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.ledger import Ledger
from tests.deep import examples
from tests.trainer.forests import (
    ROLES,
    STRATEGIES,
    account_by_definition,
    common,
    follow,
    forests,
    make_call,
    parents_by_definition,
    selections,
    trained_tokens,
)

MERGE_CASES = json.loads((Path(__file__).parent / "merge_cases.json").read_text())["cases"]


def shown(traces):
    """Return traces in the form of a merge case."""
    return [
        {
            "calls": [int(call_id) for call_id in trace.call_ids],
            "prompt_ids": trace.prompt_ids,
            "completion_ids": trace.completion_ids,
            "mask": trace.completion_mask,
        }
        for trace in traces
    ]


@pytest.mark.parametrize("case", MERGE_CASES, ids=[case["name"] for case in MERGE_CASES])
@pytest.mark.parametrize("strategy", ["prefix_merging", "tree"])
def test_paths_are_the_traces_of_the_case(case, strategy):
    calls = []
    for number, call in enumerate(case["calls"]):
        # `make_call` has its own log-probabilities, which identify tokens; the case only says
        # whether there are any
        fields = {} if call["logprobs"] else {"logprobs": []}
        calls.append(make_call(number, call["prompt_ids"], call["completion_ids"], **fields))
    for seed in range(5):
        random.Random(seed).shuffle(calls)
        traces, ledger = build_traces(calls, strategy)
        assert (shown(traces), ledger.left_out) == (case["traces"], case["left_out"])


class TestLeftOut:
    @pytest.mark.parametrize(
        ("reason", "fields"),
        [
            ("missing_logprobs", {"logprobs": []}),
            (
                "missing_logprobs",
                {"logprobs": [], "violation": "2 token ids but 0 log-probabilities"},
            ),
            ("violation", {"violation": "parent x is not in the run"}),
            ("violation", {"logprobs": [-0.1, math.nan]}),
            ("violation", {"logprobs": [-0.1]}),
            ("violation", {"weight_versions": [VersionSpan(version="1", start=0, end=1)]}),
            ("aborted", {"violation": "damaged", "status": "aborted"}),
            ("aborted", {"status": "aborted"}),
            ("auxiliary", {"role": "auxiliary"}),
            ("failed", {"role": "auxiliary", "status": "failed"}),
            ("failed", {"status": "failed"}),
        ],
    )
    def test_a_call_is_left_out_whole_with_one_reason(self, reason, fields):
        traces, ledger = build_traces([make_call(0, [1], [7, 8], **fields)])
        assert traces == []
        assert ledger == Ledger(sampled=2, left_out={reason: 2})

    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize(
        ("spans", "max_staleness", "trained"),
        [
            ([("1a2b3c4d.3.0", 4)], 0, [7, 8, 9, 10]),
            ([("1a2b3c4d.3.7", 4)], 0, [7, 8, 9, 10]),  # whatever the attempt
            ([("1a2b3c4d.2.0", 4)], 0, []),
            ([("1a2b3c4d.2.0", 4)], 1, [7, 8, 9, 10]),
            ([("1a2b3c4d.1.0", 1), ("1a2b3c4d.2.0", 2), ("1a2b3c4d.3.0", 4)], 1, [8, 9, 10]),
            ([("1a2b3c4d.2.0", 2), ("1a2b3c4d.3.0", 4)], 0, [9, 10]),
            (
                [("1a2b3c4d.3.0", 2), ("1a2b3c4d.4.0", 4)],
                3,
                [],
            ),  # newer ones than those that are trained
            ([("ffffffff.3.0", 4)], 3, []),
            ([("default", 3), ("1a2b3c4d.3.0", 4)], 3, [10]),
        ],
    )
    def test_tokens_of_older_or_other_weights_than_asked_for_are_context(
        self, strategy, spans, max_staleness, trained
    ):
        starts = [0, *(end for _, end in spans)]
        versions = [
            VersionSpan(version=name, start=start, end=end)
            for start, (name, end) in zip(starts, spans, strict=False)
        ]
        root = make_call(0, [1], [7, 8, 9, 10], weight_versions=versions)
        child = follow(
            1,
            root,
            [2],
            [11],
            weight_versions=[VersionSpan(version="1a2b3c4d.3.0", start=0, end=1)],
        )
        traces, ledger = build_traces(
            [root, child], strategy, weights=Version("1a2b3c4d", 3, 5), max_staleness=max_staleness
        )
        kept = [
            token
            for trace in traces
            for token, mask in zip(trace.completion_ids, trace.completion_mask, strict=True)
            if mask
        ]
        assert sorted(kept) == [*trained, 11] or kept == [11, *trained]
        stale = 4 - len(trained)
        assert ledger == Ledger(
            sampled=5, trained=1 + len(trained), left_out={"stale": stale} if stale else {}
        )
        for trace in traces:
            named = [span for span in trace.weight_versions for _ in range(span.start, span.end)]
            assert len(named) == sum(trace.completion_mask)
            assert all(
                all(trace.completion_mask[span.start : span.end]) for span in trace.weight_versions
            )

    def test_a_stale_token_of_a_call_that_is_not_trained_is_stale_and_the_others_have_its_reason(
        self,
    ):
        versions = [
            VersionSpan(version="1a2b3c4d.1.0", start=0, end=1),
            VersionSpan(version="1a2b3c4d.3.0", start=1, end=3),
        ]
        asked = {"weights": Version("1a2b3c4d", 3, 0), "max_staleness": 1}
        for role, reasons in (
            ("auxiliary", {"stale": 1, "auxiliary": 2}),
            ("agent", {"stale": 1, "over_length": 1}),
        ):
            call = make_call(0, [1], [7, 8, 9], role=role, weight_versions=versions)
            assert build_traces([call], **asked, max_tokens=3)[1].left_out == reasons
        aborted = make_call(0, [1], [7, 8, 9], status="aborted", weight_versions=versions)
        assert build_traces([aborted], **asked)[1].left_out == {"aborted": 3}

    def test_a_left_out_call_is_context_for_its_descendants(self):
        root = make_call(0, [1], [7, 8], status="aborted", logprobs=[math.nan, -1.0])
        child = follow(1, root, [2], [9])
        [trace], ledger = build_traces([root, child], "prefix_merging")
        assert (trace.call_ids, trace.prompt_ids, trace.completion_ids) == (
            ["0", "1"],
            [1],
            [7, 8, 2, 9],
        )
        assert trace.completion_mask == [0, 0, 0, 1]
        assert trace.logprobs == [0.0, 0.0, 0.0, *child.logprobs]
        assert trace.weight_versions == [VersionSpan(version="1", start=3, end=4)]
        assert ledger == Ledger(sampled=3, trained=1, left_out={"aborted": 2})

    def test_a_call_that_was_sampled_under_a_grammar_is_not_trained_whatever_its_role(self):
        held = {"sampling": '{"structured_outputs": {"json": {}}}'}
        asked = {"sampling": '{"asked": {"structured_outputs": true}}'}
        calls = [
            make_call(0, [1], [7, 8], **held),
            make_call(1, [2], [7], **held, role="auxiliary"),
        ]
        _, ledger = build_traces([*calls, make_call(2, [3], [7], **asked)], roles=ROLES)
        assert ledger == Ledger(sampled=4, trained=1, left_out={"grammar": 3})


def test_ids_with_slashes_give_no_two_traces_the_same_id():
    ids = [("a/b", "c"), ("a", "b/c"), ("a", "b%2Fc")]
    calls = [
        make_call(0, [1], [2], session_id=session_id, call_id=call_id)
        for session_id, call_id in ids
    ]
    traces = [trace for call in calls for trace in build_traces([call], "per_request")[0]]
    assert len({trace.trace_id for trace in traces}) == 3


class TestTrace:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_without_calls_there_are_no_traces(self, strategy):
        assert build_traces([], strategy) == ([], Ledger())

    @pytest.mark.parametrize(
        ("fields", "strategy", "message"),
        [
            ({"session_id": "t"}, "per_request", r"one session at a time.*\['s', 't'\]"),
            ({"call_id": "0"}, "per_request", "session s has several calls named 0"),
            ({}, "merge", "choose per_request, prefix_merging, tree"),
        ],
    )
    def test_calls_of_two_sessions_repeated_ids_and_unknown_strategies_are_refused(
        self, fields, strategy, message
    ):
        with pytest.raises(ValueError, match=message):
            build_traces([make_call(0, [1], [7]), make_call(1, [1], [8], **fields)], strategy)

    def test_a_trace_that_trains_other_tokens_than_the_ledger_is_an_error(self, monkeypatch):
        monkeypatch.setattr("rolltap.trainer.traces.build.find_ends", lambda parents, trained: [0])
        with pytest.raises(LedgerError, match="the traces train 1 tokens, the ledger says 2"):
            build_traces([make_call(0, [1], [7]), make_call(1, [2], [8])], "prefix_merging")


def tokens_of(trace):
    return trace.prompt_ids + trace.completion_ids


class TestProperties:
    @given(forests(), selections())
    @examples(300)
    def test_every_sampled_token_is_trained_or_left_out_for_its_reason_under_every_strategy(
        self, calls, options
    ):
        trained, left_out = account_by_definition(calls, **options)
        sampled = sum(len(call.completion_ids) for call in calls)
        for strategy in STRATEGIES:
            traces, ledger = build_traces(calls, strategy, **options)
            assert trained_tokens(traces, calls).keys() == trained
            assert ledger == Ledger(sampled=sampled, trained=len(trained), left_out=left_out)
            assert sampled == len(trained) + sum(left_out.values())

    @given(forests(), selections())
    @examples(300)
    def test_a_trained_token_is_where_it_was_sampled_in_one_trace(self, calls, options):
        by_id = {call.call_id: call for call in calls}
        for strategy in STRATEGIES:
            traces, _ = build_traces(calls, strategy, **options)
            by_trace = {trace.trace_id: trace for trace in traces}
            assert len(by_trace) == len(traces)
            for (call_id, i), (trace_id, position) in trained_tokens(traces, calls).items():
                call, trace = by_id[call_id], by_trace[trace_id]
                assert call_id in trace.call_ids
                assert position == len(call.prompt_ids) + i
                assert (
                    tokens_of(trace)[: position + 1]
                    == call.prompt_ids + call.completion_ids[: i + 1]
                )
                (version,) = {
                    span.version for span in call.weight_versions if span.start <= i < span.end
                }
                k = position - len(trace.prompt_ids)
                assert [
                    span.version for span in trace.weight_versions if span.start <= k < span.end
                ] == [version]
                assert [span.kind for span in trace.continuity if span.start <= k < span.end] == [
                    call.kind
                ]

    @given(forests(), selections())
    @examples(300)
    def test_merged_traces_are_paths_of_the_call_tree_with_the_tokens_of_their_calls(
        self, calls, options
    ):
        by_id = {call.call_id: call for call in calls}
        parents = parents_by_definition(calls)
        for trace in build_traces(calls, "prefix_merging", **options)[0]:
            root, last = by_id[trace.call_ids[0]], by_id[trace.call_ids[-1]]
            assert [parents[call_id] for call_id in trace.call_ids] == [None, *trace.call_ids[:-1]]
            assert (trace.prompt_ids, trace.role) == (root.prompt_ids, last.role)
            ids = tokens_of(trace)
            for call_id in trace.call_ids:
                sequence = by_id[call_id].prompt_ids + by_id[call_id].completion_ids
                assert ids[: len(sequence)] == sequence[: len(ids)]
            assert len(last.prompt_ids) < len(ids) <= len(last.prompt_ids + last.completion_ids)

    @given(forests(), selections())
    @examples(200)
    def test_masks_logprobs_and_spans_agree_and_a_trace_ends_with_a_trained_token(
        self, calls, options
    ):
        for strategy in STRATEGIES:
            for trace in build_traces(calls, strategy, **options)[0]:
                mask = trace.completion_mask
                assert [int(logprob < 0) for logprob in trace.logprobs] == mask
                assert len(mask) == len(trace.completion_ids)
                assert mask[-1] == 1
                trained = [i for i, masked in enumerate(mask) if masked]
                for spans in (trace.weight_versions, trace.continuity):
                    assert [i for span in spans for i in range(span.start, span.end)] == trained

    @given(forests(), st.integers(1, 16))
    @examples(300)
    def test_cut_traces_are_the_beginnings_of_whole_ones(self, calls, max_tokens):
        for strategy in STRATEGIES:
            whole = [tokens_of(trace) for trace in build_traces(calls, strategy)[0]]
            cut = [
                tokens_of(trace)
                for trace in build_traces(calls, strategy, max_tokens=max_tokens)[0]
            ]
            assert all(len(ids) <= max_tokens for ids in cut)
            assert all(any(ids == other[: len(ids)] for other in whole) for ids in cut)

    @given(forests(), selections(), st.randoms(use_true_random=False))
    @examples(300)
    def test_the_order_of_the_calls_does_not_matter(self, calls, options, rng):
        shuffled = list(calls)
        rng.shuffle(shuffled)
        for strategy in STRATEGIES:
            assert build_traces(shuffled, strategy, **options) == build_traces(
                calls, strategy, **options
            )

    @given(forests(), selections())
    @examples(300)
    def test_the_tree_is_the_merged_traces_with_what_they_share(self, calls, options):
        traces, _ = build_traces(calls, "tree", **options)
        plain = [replace(trace, shared_trace_id=None, shared_tokens=0) for trace in traces]
        assert plain == build_traces(calls, "prefix_merging", **options)[0]
        for i, trace in enumerate(traces):
            lengths = {
                other.trace_id: common(tokens_of(trace), tokens_of(other)) for other in traces[:i]
            }
            assert trace.shared_tokens == max(lengths.values(), default=0)
            assert trace.shared_tokens == lengths.get(trace.shared_trace_id, 0)
            assert (trace.shared_trace_id is None) == (trace.shared_tokens == 0)
