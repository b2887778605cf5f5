import json

import pytest
from datasets import Dataset, Features, List, Value, load_from_disk

from rolltap.trainer.runs.exports.card import trace_row, traces_card
from rolltap.trainer.runs.exports.traces import save_traces
from rolltap.trainer.traces.build import Ledger
from rolltap.trainer.traces.reader import count_sessions
from rolltap.trainer.traces.sessions import Totals, TraceOptions, iter_traces
from tests.trainer.outgoing import code_blocks, facts, write_run

PREFIX_MERGING = TraceOptions()


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


def save(run, out, options=PREFIX_MERGING):
    totals = Totals()

    def sessions():
        for traced in iter_traces(run, options):
            totals.add(traced)
            yield traced

    save_traces(sessions(), out, lambda: traces_card(run, options, totals))
    return totals


def test_the_dataset_opens_from_disk_with_the_columns_that_trl_expects(run, tmp_path):
    save(run, tmp_path / "out")
    traces = load_from_disk(tmp_path / "out")
    main, helper, alone, unknown = sorted(traces, key=lambda trace: trace["prompt_ids"])
    assert main == {
        "session_id": "s",
        "trace_id": "s/s-1",
        "group_id": "g",
        "task_id": "task",
        "harness": "pi",
        "role": "agent",
        "reward": 0.25,
        "call_ids": ["s-0", "s-1"],
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5, 6, 7],
        "completion_mask": [1, 1, 0, 1, 1],
        "logprobs": [-0.5, -1.5, 0.0, -0.5, -1.5],
        "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "1", "start": 3, "end": 5}],
        "continuity": [{"kind": "root", "start": 0, "end": 2}, {"kind": "bridged", "start": 3, "end": 5}],
        "shared_trace_id": None,
        "shared_tokens": 0,
    }
    assert (helper["role"], helper["completion_ids"], helper["reward"]) == ("subagent", [22, 23, 24], 0.25)
    assert (alone["session_id"], alone["task_id"], alone["reward"]) == ("t", "task", None)
    assert (unknown["session_id"], unknown["task_id"], unknown["group_id"], unknown["reward"]) == ("u", "", "", None)


def test_ids_masks_and_logprobs_have_small_types(run, tmp_path):
    save(run, tmp_path / "out")
    features = load_from_disk(tmp_path / "out").features
    assert features["prompt_ids"] == features["completion_ids"] == List(Value("int32"))
    assert features["completion_mask"] == List(Value("int8"))
    assert features["logprobs"] == List(Value("float32"))


def test_the_rows_are_the_traces_of_the_sessions(run, tmp_path):
    save(run, tmp_path / "out", TraceOptions("per_request"))
    built = [trace_row(trace) for traced in iter_traces(run, TraceOptions("per_request")) for trace in traced.traces]
    assert list(load_from_disk(tmp_path / "out")) == built
    assert len(built) == 5


def test_the_folder_is_what_datasets_itself_saves(run, tmp_path):
    save(run, tmp_path / "ours")
    Dataset.from_list(list(load_from_disk(tmp_path / "ours"))).save_to_disk(tmp_path / "theirs")
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names | {"README.md"}
    ours, theirs = (json.loads((tmp_path / name / "state.json").read_text()) for name in ("ours", "theirs"))
    assert ours | {"_fingerprint": ""} == theirs | {"_fingerprint": ""}
    ours, theirs = (json.loads((tmp_path / name / "dataset_info.json").read_text()) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()


def test_two_datasets_are_not_taken_for_one_another_by_the_cache_of_datasets(run, tmp_path):
    save(run, tmp_path / "one")
    save(run, tmp_path / "two")
    assert load_from_disk(tmp_path / "one")._fingerprint != load_from_disk(tmp_path / "two")._fingerprint


def test_a_run_without_calls_is_a_dataset_without_rows(tmp_path):
    write_run(tmp_path / "run")
    for path in (tmp_path / "run").glob("*.arrow"):
        path.unlink()
    save(tmp_path / "run", tmp_path / "out")
    assert load_from_disk(tmp_path / "out").num_rows == 0


def test_sampled_tokens_are_counted_and_accounted_for(run, tmp_path):
    totals = save(run, tmp_path / "out")
    assert totals.ledger == Ledger(sampled=14, trained=7, left_out={"aborted": 1, "auxiliary": 1, "no_reward": 5})
    assert (totals.sessions, totals.calls, totals.traces) == (3, 7, 4)
    rows = load_from_disk(tmp_path / "out")
    trained = sum(sum(trace["completion_mask"]) for trace in rows if trace["reward"] is not None)
    assert trained == totals.ledger.trained


def test_sessions_with_calls_alone_are_counted_before_they_are_read(run):
    assert count_sessions(run) == len(list(iter_traces(run, TraceOptions()))) == 3


class TestCard:
    def test_it_counts_what_is_inside(self, run, tmp_path):
        save(run, tmp_path / "out")
        assert facts(tmp_path / "out" / "README.md") == {
            "sessions": "3",
            "tasks": "1",
            "outcomes": "completed (1), timeout (1)",
            "agent programs": "codex (1), pi (1)",
            "rewards": "1 of 3 sessions, mean 0.250",
            "model calls": "7",
            "traces": "4 by `prefix_merging` of agent, subagent, compaction calls",
            "sampled tokens": "14: 7 to train, left out: 1 aborted, 1 auxiliary, 5 no_reward",
            "model": "tiny",
            "tokenizer, SHA-256": "`aa11`",
            "chat template, SHA-256": "`bb22`",
        }

    def test_it_names_every_column(self, run, tmp_path):
        save(run, tmp_path / "out")
        card = (tmp_path / "out" / "README.md").read_text()
        for column in load_from_disk(tmp_path / "out").column_names:
            assert f"`{column}`" in card

    def test_it_contains_no_path_of_this_machine(self, run, tmp_path):
        save(run, tmp_path / "out")
        card = (tmp_path / "out" / "README.md").read_text()
        assert "someone" not in card
        assert str(tmp_path) not in card
        assert "gpu-7" not in card

    def test_its_code_loads_the_dataset_and_makes_sequences_for_sft(self, run, tmp_path):
        save(run, tmp_path / "out")
        load, sft = code_blocks(tmp_path / "out" / "README.md")
        names = {}
        exec(load.replace("path/to/this/folder", str(tmp_path / "out")) + sft, names)
        rows = {str(row["input_ids"]): row["assistant_masks"] for row in names["sft"]}
        assert rows["[1, 2, 3, 4, 5, 6, 7]"] == [0, 0, 1, 1, 0, 1, 1]

    def test_a_name_with_a_bar_does_not_break_the_table(self, tmp_path):
        write_run(tmp_path / "run")
        metadata = json.loads((tmp_path / "run" / "run.json").read_text()) | {"model": "a|b"}
        (tmp_path / "run" / "run.json").write_text(json.dumps(metadata))
        save(tmp_path / "run", tmp_path / "out")
        assert facts(tmp_path / "out" / "README.md")["model"] == "a\\|b"

    def test_a_model_on_the_hub_keeps_its_full_name(self, run, tmp_path):
        metadata = json.loads((run / "run.json").read_text()) | {"model": "Qwen/Qwen3-4B"}
        (run / "run.json").write_text(json.dumps(metadata))
        save(run, tmp_path / "out")
        assert facts(tmp_path / "out" / "README.md")["model"] == "Qwen/Qwen3-4B"


def test_features_are_those_of_the_trace_rows(run):
    from rolltap.trainer.runs.exports.card import TRACE_COLUMNS, TRACE_FEATURES

    documented = [name for names in TRACE_COLUMNS for name in names.split(", ")]
    assert documented == list(TRACE_FEATURES)
    [row, *_] = [trace_row(trace) for traced in iter_traces(run, TraceOptions()) for trace in traced.traces]
    assert Features(TRACE_FEATURES).encode_example(row) == row
