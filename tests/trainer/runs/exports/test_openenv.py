import json

import pytest

from rolltap.trainer.runs.exports.openenv import export
from rolltap.trainer.traces.sessions import TraceOptions, trace_session
from tests.trainer.runs.exports import recording
from tests.trainer.runs.exports.openenv_schema import check_trace, training_trace
from tests.trainer.runs.exports.recording import CASES, Recording, says, tool, user, write


def sampled(trace):
    """Return a map of call ids to the masks of their completions."""
    return {turn["node_id"]: turn["loss_mask"][len(turn["prompt_token_ids"]) :] for turn in trace["turns"]}


class TestTrainingTrace:
    @pytest.mark.parametrize("case", CASES)
    def test_it_follows_the_contract_and_trains_what_the_ledger_says(self, case):
        recorded = case().recorded()
        trace = json.loads(json.dumps(training_trace(recorded), allow_nan=False))
        check_trace(trace)
        ledger = trace_session(recorded, TraceOptions()).rewarded().ledger
        assert sum(map(sum, sampled(trace).values())) == ledger.trained

    def test_a_turn_has_the_calls_tokens_and_conversation(self):
        recorded = recording.turns_with_tools().recorded()
        call, turn = recorded.calls[1], training_trace(recorded)["turns"][1]
        assert turn["prompt_token_ids"] == call.prompt_ids
        assert turn["completion_token_ids"] == call.completion_ids
        assert turn["per_token_logps"] == call.logprobs
        asked = says("", reasoning="I look.", calls={1: '{"command": "ls"}'})
        assert turn["request"]["messages"] == [recording.SYSTEM, user("List."), asked, tool(1, "a.txt")]
        assert turn["request"]["tools"] == [recording.BASH]
        assert turn["response"]["choices"] == [{"message": says("a.txt"), "finish_reason": "stop"}]

    @pytest.mark.parametrize(
        ("case", "left_out"),
        [
            (recording.side_question, {"c1": "auxiliary"}),
            (recording.superseded_retry, {"c1": "superseded"}),
            (recording.aborted, {"c1": "aborted"}),
            (recording.unrewarded, {"c0": "no_reward", "c1": "auxiliary"}),
            (recording.turns_with_tools, {}),
        ],
    )
    def test_a_call_that_is_left_out_has_mask_zero_and_the_reason(self, case, left_out):
        trace = training_trace(case().recorded())
        masks = sampled(trace)
        for turn in trace["turns"]:
            reason = left_out.get(turn["node_id"])
            assert turn["metadata"]["left_out"] == reason
            assert masks[turn["node_id"]] == [int(reason is None)] * 2

    @pytest.mark.parametrize(
        ("case", "order", "index"),
        [
            (recording.subagent, ["c1", "c2", "c0", "c3"], [1, 2, 0, 3]),
            (recording.late_subagent, ["c1", "c3", "c0", "c2"], [1, 3, 0, 2]),
        ],
    )
    def test_branches_are_not_interleaved_and_the_agents_is_last_though_another_ends_later(self, case, order, index):
        turns = training_trace(case().recorded())["turns"]
        assert [turn["node_id"] for turn in turns] == order
        assert [turn["metadata"]["index"] for turn in turns] == index

    def test_the_sampling_used_is_distinct_from_the_harnesss_request(self):
        made = Recording()
        made.ask(user("Go."), sampling='{"temperature": 1.0, "asked": {"temperature": 0.2, "top_p": NaN}}')
        (turn,) = training_trace(made.recorded())["turns"]
        assert turn["metadata"]["sampling_params"] == {"temperature": 1.0}
        assert turn["metadata"]["requested_sampling_params"]["temperature"] == 0.2


@pytest.fixture
def exported(tmp_path):
    """Return a function that exports recordings to `tmp_path/out`, and returns the lines of the index."""

    def exported(*recordings):
        run = write(tmp_path / "run", *recordings)
        (tmp_path / "out").mkdir()
        done = []
        assert export(run, tmp_path / "out", lambda _, *at: done.append(at)) == len(recordings)
        assert done == [(number, len(recordings)) for number in range(1, len(recordings) + 1)]
        return [json.loads(line) for line in (tmp_path / "out" / "sessions.jsonl").read_text().splitlines()]

    return exported


class TestExport:
    def test_each_session_has_a_trace_and_a_line_with_its_reward_if_it_has_a_row(self, exported, tmp_path):
        without_row = Recording("u")
        without_row.ask(user("Go."))
        without_row.session = None
        lines = exported(Recording("a", reward=0.5), recording.turns_with_tools(), without_row)
        assert {line["session_id"]: line["reward"] for line in lines} == {"a": 0.5, "s": 1.0, "u": None}
        traces = {line["session_id"]: json.loads((tmp_path / "out" / line["file"]).read_text()) for line in lines}
        s, u = (training_trace(made.recorded()) for made in (recording.turns_with_tools(), without_row))
        assert traces == {"a": {"schema_version": 1, "turns": []}, "s": s, "u": u}

    @pytest.mark.parametrize(
        ("case", "refused"),
        [
            (recording.broken_logprobs, ("c0", "violation", "a log-probability is positive or not finite")),
            (recording.positive_logprob, ("c0", "violation", "a log-probability is positive or not finite")),
            (recording.without_logprobs, ("c0", "missing_logprobs", "2 token ids but 0 log-probabilities")),
            (recording.missing_ancestor, ("c1", "violation", "the prompt cannot be rebuilt")),
        ],
    )
    def test_calls_that_the_contract_refuses_are_named(self, exported, case, refused):
        made = case()
        [line] = exported(made)
        call_id, left_out, why = refused
        assert line["left_out"] == [{"call_id": call_id, "left_out": left_out, "why": why, "tokens": 2}]
        assert line["turns"] == len(made.calls) - 1

    def test_a_session_id_does_not_choose_the_folder(self, exported, tmp_path):
        exported(Recording("../../a b"))
        assert [path.name for path in (tmp_path / "out" / "traces").iterdir()] == ["%2E.%2F..%2Fa%20b.json"]


@pytest.mark.parametrize("case", CASES)
def test_the_rows_that_trl_makes_are_the_traces_of_prefix_merging(case, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

    recorded = case().recorded()
    trace = training_trace(recorded)
    names = ("prompt_token_ids", "completion_token_ids", "per_token_logps")
    turns = [TurnRecord(*(turn[name] for name in names), sampled(trace)[turn["node_id"]]) for turn in trace["turns"]]
    ours = []
    for trace in trace_session(recorded, TraceOptions()).rewarded().traces:
        before = len(trace.prompt_ids)
        masks = [0] * before + trace.completion_mask, [0.0] * before + trace.logprobs
        ours.append((trace.prompt_ids + trace.completion_ids, *masks))
    rows = _chain_to_sequences(turns, "rollout", 0)[0]
    theirs = [(row.input_ids, row.completion_mask, row.old_log_probs) for row in rows]
    assert sorted(theirs) == sorted(ours)


@pytest.mark.parametrize(("threshold", "trained"), [(0, 4), (1024, 3)])
def test_above_a_threshold_of_zero_trl_masks_the_end_of_a_rewritten_reply(threshold, trained, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

    rewritten = [TurnRecord([1], [2, 3], [-1.0, -1.0]), TurnRecord([1, 2, 9, 4], [5, 6], [-1.0, -1.0])]
    rows = _chain_to_sequences(rewritten, "rollout", threshold)[0]
    assert sum(sum(row.completion_mask) for row in rows) == trained


def test_trls_worker_reads_the_trace_by_openenvs_own_models(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    reason = "openenv needs an environment of its own"
    training = pytest.importorskip("openenv.core.harness.training", reason=reason)
    from trl.experimental.async_grpo import openenv_harness

    for case in CASES:
        recorded = case().recorded()
        trace = training.TrainingTrace.model_validate_json(json.dumps(training_trace(recorded)))
        turns = openenv_harness._turns_from_training_trace(trace)
        assert [turn.output_ids for turn in turns] == [turn.completion_token_ids for turn in trace.turns]
        entries = trace.to_trace_entries()
        completion = openenv_harness._messages_from_trace(entries)
        assert not entries or completion[-1]["role"] == "assistant"
        openenv_harness._tool_call_counts_by_name(entries)
        openenv_harness._tool_failures_by_name(entries)
