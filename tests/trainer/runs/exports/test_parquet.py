import json
import os
import re
import subprocess
import sys
from datetime import UTC

import pyarrow.parquet as pq
import pytest
from datasets import (
    Dataset,
    Features,
    List,
    Value,
    get_dataset_config_names,
    load_dataset,
    load_from_disk,
)

from rolltap.addons.store.metadata import add_recorder
from rolltap.addons.store.records import CALL_SCHEMA, Event
from rolltap.trainer.runs.exports import parquet
from rolltap.trainer.runs.exports.parquet import TRACE_FEATURES, Spool, export, save_traces
from rolltap.trainer.traces.build import Ledger
from rolltap.trainer.traces.reader import RecordedCalls, recorded_ids
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces
from tests import factories
from tests.factories import START, add_rows, make_session
from tests.trainer.outgoing import code_blocks, facts, write_run


def exported(folder, run=None):
    """Export a run, by default that of `write_run`, to `folder/out`. Return a function that loads a
    config."""
    if run is None:
        write_run(run := folder / "run")
    (folder / "out").mkdir()
    told = []
    counted = export(run, folder / "out", lambda *progress: told.append(progress))
    assert told == [
        ("sessions", done, len(recorded_ids(run))) for done in range(1, len(recorded_ids(run)) + 1)
    ]
    assert counted == sum(
        pq.read_metadata(path).num_rows for path in (folder / "out").rglob("*.parquet")
    )
    return lambda config: load_dataset(
        str(folder / "out"), config, split="train", cache_dir=str(folder / "cache")
    ).to_list()


def save(run, out, options=None):
    options = options or TraceOptions()
    return save_traces(run, iter_traces(run, options), out, options)


def rows_of(run, options):
    return [trace.to_json() for traced in iter_traces(run, options) for trace in traced.traces]


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a run in `run`, exported to `out`, and its traces in `saved`."""
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def load(folder):
    return exported(folder)


@pytest.fixture(scope="module")
def saved(folder, load):
    save(folder / "run", folder / "saved")
    return folder / "saved"


class TestParquet:
    def test_traces_are_those_of_prefix_merging(self, folder, load):
        assert load("traces") == rows_of(folder / "run", TraceOptions())

    def test_the_code_of_the_card_gives_every_call_with_its_full_prompt(self, folder, load):
        names = {"cache_dir": str(folder / "cache")}
        open_it, rebuild = code_blocks(folder / "out" / "README.md")
        open_it = open_it.replace("path/to/this/folder", str(folder / "out"))
        exec(
            open_it.replace('split="train"', 'split="train", cache_dir=cache_dir') + rebuild, names
        )
        rebuilt = [
            (call["session_id"], call["prompt_ids"])
            for call in names["full_prompts"](names["calls"])
        ]
        recorded = RecordedCalls(folder / "run")
        assert rebuilt == [
            (session, call.prompt_ids) for session, calls in recorded.items() for call in calls
        ]

    def test_every_config_holds_what_was_recorded_and_a_prompt_once(self, load):
        stored = {call["call_id"]: call["prompt_tail_ids"] for call in load("calls")}
        assert (stored["s-0"], stored["s-1"], stored["s-2"]) == ([1, 2], [5], [8])
        s, t = sorted(load("sessions"), key=lambda session: session["session_id"])
        assert (s["harness"], s["reward"], s["started_at"]) == ("pi", 0.25, START)
        assert (t["harness"], t["reward"], t["status"]) == ("codex", None, "timeout")
        [event] = load("events")
        assert (event["kind"], event["host"], event["at"].astimezone(UTC)) == (
            "refused",
            "example.com",
            START,
        )
        rows = {config: len(load(config)) for config in ("traces", "calls", "sessions", "events")}
        assert rows == {"traces": 4, "calls": 7, "sessions": 2, "events": 1}

    def test_only_the_last_row_of_a_session_is_exported(self, run, tmp_path):
        add_rows(run, make_session("t"))
        rows = exported(tmp_path, run)("sessions")
        assert {session["session_id"]: session["reward"] for session in rows} == {
            "s": 0.25,
            "t": 1.0,
        }

    def test_every_file_carries_the_viewers_types_and_pages(self, folder, load):
        [path] = (folder / "out" / "calls").iterdir()
        features = Features.from_arrow_schema(pq.read_schema(path))
        embedded = json.loads(pq.read_schema(path).metadata[b"huggingface"])["info"]["features"]
        assert embedded.keys() == features.keys()
        assert features["started_at"] == Value("timestamp[us, tz=UTC]")
        assert features["completion_ids"] == List(Value("int32"))
        assert features["logprobs"] == List(Value("float32"))
        # the Hub stores only what changed, and the viewer finds a page
        metadata = pq.read_metadata(path)
        assert b"content_defined_chunking" in metadata.metadata
        assert metadata.row_group(0).column(0).has_offset_index

    def test_a_table_without_rows_is_no_config_as_datasets_cannot_open_it(self, run, tmp_path):
        for path in (*run.glob("events-*"), *run.glob("sessions-*")):
            path.unlink()
        load = exported(tmp_path, run)
        assert get_dataset_config_names(str(tmp_path / "out")) == ["traces", "calls"]
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
            "README.md",
            "calls",
            "traces",
        ]
        assert (len(load("traces")), len(load("calls"))) == (4, 7)

    def test_neither_engines_nor_paths_of_this_machine_are_exported(self, run, tmp_path):
        why = (
            "Cannot connect to host gpu-8.internal:8000 ssl:default [Connect call failed"
            " ('10.0.0.8', 8000)]"
        )
        evidence = {
            "changed": ["src/a.py"],
            "log": "/home/me/runs/logs/v.judge.log",
            "tests": {"t.py::a": "x"},
        }
        judged = {
            "error": "http://gpu-7.internal:8000 (its output is in /home/me/runs/logs/v.log)",
            "evidence": evidence,
            "parts": {"speed": 0.5},
            "suspicions": {"git_history": 1},
            "harness_version": "1.2.3",
            "runtime": "sandbox",
        }
        rejected = Event(
            kind="rejected",
            session_id="s",
            detail=f"the engine at http://gpu-8.internal:8000: {why}",
        )
        add_rows(run, make_session("v", "failed", **judged), rejected)
        add_recorder(run, {"engines": ["http://gpu-7.internal:8000", "http://gpu-8.internal:8000"]})
        load = exported(tmp_path, run)
        calls = load("calls")
        assert calls[0].keys() == set(CALL_SCHEMA.names) - {"engine", "digest"}
        assert [call["error"] for call in calls if call["error"]] == [
            "the engine at http://ENGINE failed: ENGINE"
        ]
        [detail] = [event["detail"] for event in load("events") if event["kind"] == "rejected"]
        why = "Cannot connect to host ENGINE ssl:default [Connect call failed ENGINE]"
        assert detail == f"the engine at http://ENGINE: {why}"
        [row] = [row for row in load("sessions") if row["session_id"] == "v"]
        assert row["error"] == "http://ENGINE (its output is in …/v.log)"
        assert json.loads(row["evidence"]) == evidence | {"log": "…/v.judge.log"}
        assert (json.loads(row["parts"]), json.loads(row["suspicions"])) == (
            judged["parts"],
            judged["suspicions"],
        )
        assert (row["harness_version"], row["runtime"]) == ("1.2.3", "sandbox")
        card = tmp_path / "out" / "README.md"
        assert facts(card)["with suspicions of cheating"] == "1 sessions"
        assert facts(card)["ran in"] == "sandbox (1)"
        assert "gpu-7" not in card.read_text()


class TestSavedTraces:
    def test_the_dataset_opens_from_disk_with_the_columns_that_trl_expects(self, saved):
        assert load_from_disk(saved).features == TRACE_FEATURES
        main, helper, alone, unknown = sorted(
            load_from_disk(saved), key=lambda trace: trace["prompt_ids"]
        )
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
            "logprobs": [-1.0, -1.015625, 0.0, -2.0, -2.015625],
            "weight_versions": [
                {"version": "1", "start": 0, "end": 2},
                {"version": "1", "start": 3, "end": 5},
            ],
            "continuity": [
                {"kind": "root", "start": 0, "end": 2},
                {"kind": "bridged", "start": 3, "end": 5},
            ],
            "shared_trace_id": None,
            "shared_tokens": 0,
        }
        assert (helper["role"], helper["completion_ids"], helper["reward"]) == (
            "subagent",
            [22, 23, 24],
            0.25,
        )
        labels = [
            (t["session_id"], t["task_id"], t["group_id"], t["reward"]) for t in (alone, unknown)
        ]
        assert labels == [("t", "task", "g", None), ("u", "", "", None)]

    def test_the_folder_is_what_datasets_itself_saves(self, saved, tmp_path):
        Dataset.from_list(list(load_from_disk(saved))).save_to_disk(tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert {path.name for path in saved.iterdir()} == names | {"README.md"}
        states, infos = (
            [json.loads((folder / name).read_text()) for folder in (saved, tmp_path)]
            for name in ("state.json", "dataset_info.json")
        )
        assert states[0] == states[1] | {"_fingerprint": states[0]["_fingerprint"]}
        assert infos[0].keys() == infos[1].keys()

    def test_a_run_without_calls_is_a_dataset_without_rows(self, run, tmp_path):
        for path in run.glob("*.arrow"):
            path.unlink()
        save(run, tmp_path / "out")
        assert load_from_disk(tmp_path / "out").num_rows == 0

    def test_the_rows_are_the_traces_and_sampled_tokens_are_accounted_for(
        self, run, tmp_path, saved
    ):
        per_request = TraceOptions("per_request")
        save(run, tmp_path / "each", per_request)
        assert list(load_from_disk(tmp_path / "each")) == rows_of(run, per_request)
        totals = save(run, tmp_path / "out")
        assert totals.ledger == Ledger(
            sampled=14, trained=7, left_out={"aborted": 1, "auxiliary": 1, "no_reward": 5}
        )
        assert (totals.sessions, totals.calls, totals.traces) == (len(recorded_ids(run)), 7, 4)
        rows = load_from_disk(tmp_path / "out")
        trained = sum(
            sum(trace["completion_mask"]) for trace in rows if trace["reward"] is not None
        )
        assert trained == totals.ledger.trained
        # the cache of datasets does not take two for one another
        assert rows._fingerprint != load_from_disk(saved)._fingerprint


class TestCard:
    def test_it_counts_what_is_inside(self, saved, folder):
        expected = {
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
        assert facts(saved / "README.md") == facts(folder / "out" / "README.md") == expected

    def test_it_names_every_column_and_no_path_of_this_machine(self, saved, folder):
        for card in (saved / "README.md", folder / "out" / "README.md"):
            text = card.read_text()
            assert [name for name in TRACE_FEATURES if f"`{name}`" not in text] == []
            assert [
                private for private in ("someone", str(folder), "gpu-7") if private in text
            ] == []

    def test_its_code_loads_the_dataset_and_makes_sequences_for_sft(self, saved):
        load, sft = code_blocks(saved / "README.md")
        names = {}
        exec(load.replace("path/to/this/folder", str(saved)) + sft, names)
        rows = {str(row["input_ids"]): row["assistant_masks"] for row in names["sft"]}
        assert rows["[1, 2, 3, 4, 5, 6, 7]"] == [0, 0, 1, 1, 0, 1, 1]
        # what the card counts as to train, and nothing of sessions without a reward
        assert facts(saved / "README.md")["sampled tokens"].startswith(
            f"14: {sum(map(sum, rows.values()))} to train"
        )

    def test_a_bar_in_a_name_does_not_break_the_table_and_a_model_of_the_hub_keeps_its_name(
        self, tmp_path
    ):
        for model, cell in (("a|b", "a\\|b"), ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B")):
            run = factories.write_run(tmp_path / "run" / cell, model=model)
            save(run, tmp_path / cell)
            assert facts(tmp_path / cell / "README.md")["model"] == cell


class TestSpool:
    def test_rows_are_in_a_file_in_their_order_and_the_file_is_deleted(self, tmp_path):
        rows = [{"name": f"row {i}", "ids": [i] * 4} for i in range(100)]
        features = Features({"name": Value("string"), "ids": List(Value("int32"))})
        with Spool(features, tmp_path / "out") as spooled:
            spooled.add(row | {"more": 1} for row in rows)
            dataset, shards = spooled.dataset()
            assert (list(dataset), dataset.features, shards) == (rows, features, 1)
            [file] = dataset.cache_files
            assert os.path.dirname(os.path.dirname(file["filename"])) == str(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_shards_are_of_bounded_size(self, run, tmp_path, monkeypatch):
        monkeypatch.setattr(parquet, "SHARD_BYTES", 300)
        save(run, tmp_path / "saved")
        assert len(list((tmp_path / "saved").glob("data-*.arrow"))) > 1
        load = exported(tmp_path, run)
        files = sorted(path.name for path in (tmp_path / "out" / "traces").iterdir())
        names = [f"train-{number:05}-of-{len(files):05}-" for number in range(len(files))]
        assert [file.removesuffix(".parquet")[:-16] for file in files] == names
        assert len(files) > 1
        assert load("traces") == list(load_from_disk(tmp_path / "saved"))


@pytest.mark.parametrize("arguments", [["traces"], ["export", "--to", "parquet"]], ids=str)
def test_the_users_cache_stays_empty_and_no_progress_bar_is_shown(run, tmp_path, arguments):
    home = tmp_path / "home"
    home.mkdir()
    program = os.path.join(os.path.dirname(sys.executable), "rolltap")
    environment = {**os.environ, "HOME": str(home), "HF_HOME": str(home / "hf")}
    del environment["HF_DATASETS_CACHE"]
    command = [program, *arguments, run, "--out", tmp_path / "out"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert not re.search("examples|ba/s", ended.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out", "run"]
