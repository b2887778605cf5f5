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
from tests.factories import make_call
from tests.trainer.forests import (
    ROLES,
    STRATEGIES,
    account_by_definition,
    common,
    follow,
    forests,
    parents_by_definition,
    selections,
    trained_tokens,
)

MERGE_CASES = json.loads((Path(__file__).parent / "merge_cases.json").read_text())["cases"]


def tokens_of(sequence):
    return sequence.prompt_ids + sequence.completion_ids


def spans_of(*versions):
    """Return spans of names of versions, from the end of the one before to an end."""
    spans = []
    start = 0
    for name, end in versions:
        spans.append(VersionSpan(version=name, start=start, end=end))
        start = end
    return spans


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
        assert ledger.left_out == case["left_out"]
        for trace, wanted in zip(traces, case["traces"], strict=True):
            assert trace.call_ids == [str(number) for number in wanted["calls"]]
            assert trace.prompt_ids == wanted["prompt_ids"]
            assert trace.completion_ids == wanted["completion_ids"]
            assert trace.completion_mask == wanted["mask"]


class TestLeftOut:
    @pytest.mark.parametrize(
        ("reason", "fields"),
        [
            ("missing_logprobs", {"logprobs": [], "violation": "2 token ids but 0 logprobs"}),
            ("violation", {"logprobs": [-0.1, math.nan]}),
            ("violation", {"logprobs": [-0.1]}),
            ("violation", {"weight_versions": spans_of(("1", 1))}),
            ("aborted", {"violation": "damaged", "status": "aborted"}),
            ("failed", {"role": "auxiliary", "status": "failed"}),
        ],
    )
    def test_a_call_is_left_out_whole_with_one_reason(self, reason, fields):
        traces, ledger = build_traces([make_call(0, [1], [7, 8], **fields)])
        assert traces == []
        assert ledger == Ledger(sampled=2, left_out={reason: 2})

    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize(
        ("versions", "max_staleness", "trained"),
        [
            ([("1a2b3c4d.3.0", 4)], 0, [7, 8, 9, 10]),
            ([("1a2b3c4d.3.7", 4)], 0, [7, 8, 9, 10]),  # whatever the attempt
            ([("1a2b3c4d.2.0", 4)], 0, []),
            ([("1a2b3c4d.2.0", 4)], 1, [7, 8, 9, 10]),
            ([("1a2b3c4d.1.0", 1), ("1a2b3c4d.2.0", 2), ("1a2b3c4d.3.0", 4)], 1, [8, 9, 10]),
            ([("1a2b3c4d.2.0", 2), ("1a2b3c4d.3.0", 4)], 0, [9, 10]),
            # newer ones than those that are trained
            ([("1a2b3c4d.3.0", 2), ("1a2b3c4d.4.0", 4)], 3, []),
            ([("ffffffff.3.0", 4)], 3, []),
            ([("default", 3), ("1a2b3c4d.3.0", 4)], 3, [10]),
        ],
    )
    def test_tokens_of_older_or_other_weights_than_asked_for_are_context(
        self, strategy, versions, max_staleness, trained
    ):
        root = make_call(0, [1], [7, 8, 9, 10], weight_versions=spans_of(*versions))
        child = follow(1, root, [2], [11], weight_versions=spans_of(("1a2b3c4d.3.0", 1)))
        asked = Version("1a2b3c4d", 3, 5)
        traces, ledger = build_traces(
            [root, child], strategy, weights=asked, max_staleness=max_staleness
        )
        kept = []
        for trace in traces:
            masked = [i for i, trains in enumerate(trace.completion_mask) if trains]
            kept += [trace.completion_ids[i] for i in masked]
            spans = trace.weight_versions
            assert [i for span in spans for i in range(span.start, span.end)] == masked
        assert sorted(kept) == [*trained, 11]
        wanted = Ledger(sampled=5, trained=5)
        if len(trained) < 4:
            wanted = wanted.leave_out("stale", 4 - len(trained))
        assert ledger == wanted

    @pytest.mark.parametrize(
        ("fields", "left_out"),
        [
            ({"role": "auxiliary"}, {"stale": 1, "auxiliary": 2}),
            ({"role": "agent"}, {"stale": 1, "over_length": 1}),
            ({"status": "aborted"}, {"aborted": 3}),
        ],
    )
    def test_a_stale_token_of_a_call_that_is_not_trained_is_stale_and_the_others_have_its_reason(
        self, fields, left_out
    ):
        versions = spans_of(("1a2b3c4d.1.0", 1), ("1a2b3c4d.3.0", 3))
        call = make_call(0, [1], [7, 8, 9], weight_versions=versions, **fields)
        asked = Version("1a2b3c4d", 3, 0)
        _, ledger = build_traces([call], weights=asked, max_staleness=1, max_tokens=3)
        assert ledger.left_out == left_out

    def test_a_left_out_call_is_context_whatever_its_log_probabilities(self):
        root = make_call(0, [1], [7, 8], status="aborted", logprobs=[math.nan, -1.0])
        child = follow(1, root, [2], [9])
        [trace], _ = build_traces([root, child], "prefix_merging")
        assert trace.completion_ids == [7, 8, 2, 9]
        assert trace.logprobs == [0.0, 0.0, 0.0, *child.logprobs]

    def test_a_call_that_was_sampled_under_a_grammar_is_not_trained_whatever_its_role(self):
        held = '{"structured_outputs": {"json": {}}}'
        asked = '{"asked": {"structured_outputs": true}}'
        calls = [
            make_call(0, [1], [7, 8], sampling=held),
            make_call(1, [2], [7], sampling=held, role="auxiliary"),
            make_call(2, [3], [7], sampling=asked),
        ]
        _, ledger = build_traces(calls, roles=ROLES)
        assert ledger == Ledger(sampled=4, trained=1, left_out={"grammar": 3})


def test_ids_with_slashes_give_no_two_traces_the_same_id():
    names = set()
    for session_id, call_id in (("a/b", "c"), ("a", "b/c"), ("a", "b%2Fc")):
        call = make_call(0, [1], [2], session_id=session_id, call_id=call_id)
        [trace], _ = build_traces([call], "per_request")
        names.add(trace.trace_id)
    assert len(names) == 3


@pytest.mark.parametrize(
    ("fields", "strategy", "message"),
    [
        ({"session_id": "t"}, "per_request", r"one session at a time.*\['s', 't'\]"),
        ({"call_id": "0"}, "per_request", "session s has several calls named 0"),
        ({}, "merge", "choose per_request, prefix_merging, tree"),
    ],
)
def test_calls_of_two_sessions_repeated_ids_and_unknown_strategies_are_refused(
    fields, strategy, message
):
    calls = [make_call(0, [1], [7]), make_call(1, [1], [8], **fields)]
    with pytest.raises(ValueError, match=message):
        build_traces(calls, strategy)


def test_a_trace_that_trains_other_tokens_than_the_ledger_is_an_error(monkeypatch):
    monkeypatch.setattr("rolltap.trainer.traces.build.find_ends", lambda parents, trained: [0])
    with pytest.raises(LedgerError, match="the traces train 1 tokens, the ledger says 2"):
        build_traces([make_call(0, [1], [7]), make_call(1, [2], [8])], "prefix_merging")


@pytest.mark.parametrize("strategy", STRATEGIES)
class TestOfEachStrategy:
    def test_without_calls_there_are_no_traces(self, strategy):
        assert build_traces([], strategy) == ([], Ledger())

    @given(calls=forests(), options=selections())
    @examples(300)
    def test_every_sampled_token_is_trained_or_left_out_for_its_reason(
        self, strategy, calls, options
    ):
        trained, left_out = account_by_definition(calls, **options)
        sampled = sum(len(call.completion_ids) for call in calls)
        traces, ledger = build_traces(calls, strategy, **options)
        assert trained_tokens(traces, calls).keys() == trained
        assert ledger == Ledger(sampled=sampled, trained=len(trained), left_out=left_out)
        ledger.check()

    @given(calls=forests(), options=selections())
    @examples(300)
    def test_a_trained_token_is_where_it_was_sampled_in_one_trace(self, strategy, calls, options):
        def of_token(spans, i, name):
            return [getattr(span, name) for span in spans if span.start <= i < span.end]

        by_id = {call.call_id: call for call in calls}
        traces, _ = build_traces(calls, strategy, **options)
        by_trace = {trace.trace_id: trace for trace in traces}
        assert len(by_trace) == len(traces)
        for (call_id, i), (trace_id, position) in trained_tokens(traces, calls).items():
            call = by_id[call_id]
            trace = by_trace[trace_id]
            assert call_id in trace.call_ids
            assert position == len(call.prompt_ids) + i
            assert tokens_of(trace)[: position + 1] == tokens_of(call)[: position + 1]
            place = position - len(trace.prompt_ids)
            versions = of_token(call.weight_versions, i, "version")
            assert of_token(trace.weight_versions, place, "version") == versions
            assert of_token(trace.continuity, place, "kind") == [call.kind]

    @given(calls=forests(), options=selections())
    @examples(200)
    def test_masks_logprobs_and_spans_agree_and_a_trace_ends_with_a_trained_token(
        self, strategy, calls, options
    ):
        for trace in build_traces(calls, strategy, **options)[0]:
            mask = trace.completion_mask
            assert [int(logprob < 0) for logprob in trace.logprobs] == mask
            assert len(mask) == len(trace.completion_ids)
            assert mask[-1] == 1
            trained = [i for i, masked in enumerate(mask) if masked]
            for spans in (trace.weight_versions, trace.continuity):
                assert [i for span in spans for i in range(span.start, span.end)] == trained

    @given(calls=forests(), max_tokens=st.integers(1, 16))
    @examples(300)
    def test_cut_traces_are_the_beginnings_of_whole_ones(self, strategy, calls, max_tokens):
        whole = [tokens_of(trace) for trace in build_traces(calls, strategy)[0]]
        for trace in build_traces(calls, strategy, max_tokens=max_tokens)[0]:
            ids = tokens_of(trace)
            assert len(ids) <= max_tokens
            assert any(ids == other[: len(ids)] for other in whole)

    @given(calls=forests(), options=selections(), rng=st.randoms(use_true_random=False))
    @examples(300)
    def test_the_order_of_the_calls_does_not_matter(self, strategy, calls, options, rng):
        wanted = build_traces(calls, strategy, **options)
        rng.shuffle(calls)
        assert build_traces(calls, strategy, **options) == wanted


@given(forests(), selections())
@examples(300)
def test_merged_traces_are_paths_of_the_call_tree_with_the_tokens_of_their_calls(calls, options):
    by_id = {call.call_id: call for call in calls}
    parents = parents_by_definition(calls)
    for trace in build_traces(calls, "prefix_merging", **options)[0]:
        path = [by_id[call_id] for call_id in trace.call_ids]
        last = path[-1]
        assert [parents[call_id] for call_id in trace.call_ids] == [None, *trace.call_ids[:-1]]
        assert trace.prompt_ids == path[0].prompt_ids
        assert trace.role == last.role
        ids = tokens_of(trace)
        for call in path:
            sequence = tokens_of(call)
            assert ids[: len(sequence)] == sequence[: len(ids)]
        assert len(last.prompt_ids) < len(ids) <= len(tokens_of(last))


@given(forests(), selections())
@examples(300)
def test_the_tree_is_the_merged_traces_with_what_they_share(calls, options):
    traces, _ = build_traces(calls, "tree", **options)
    plain = [replace(trace, shared_trace_id=None, shared_tokens=0) for trace in traces]
    assert plain == build_traces(calls, "prefix_merging", **options)[0]
    for i, trace in enumerate(traces):
        lengths = {None: 0}
        for other in traces[:i]:
            lengths[other.trace_id] = common(tokens_of(trace), tokens_of(other))
        assert trace.shared_tokens == lengths[trace.shared_trace_id] == max(lengths.values())
        assert (trace.shared_trace_id is None) == (trace.shared_tokens == 0)
