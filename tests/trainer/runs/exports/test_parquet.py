import json
import os
import re
import subprocess
from datetime import UTC
from operator import itemgetter

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
from rolltap.trainer.runs.exports.parquet import TRACE_FEATURES, export, save_traces
from rolltap.trainer.traces.build import Ledger
from rolltap.trainer.traces.reader import RecordedCalls, recorded_ids
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces
from tests import factories
from tests.factories import START, add_rows, make_session
from tests.trainer.cli.program import ROLLTAP
from tests.trainer.outgoing import code_blocks, facts, write_run


def exported(folder, run=None):
    """Export a run, by default that of `write_run`, to `folder/out`. Return a function that loads a
    config."""
    if run is None:
        run = folder / "run"
        write_run(run)
    out = folder / "out"
    out.mkdir()
    told = []
    counted = export(run, out, lambda *progress: told.append(progress))
    sessions = len(recorded_ids(run))
    assert told == [("sessions", done, sessions) for done in range(1, sessions + 1)]
    assert counted == sum(pq.read_metadata(path).num_rows for path in out.rglob("*.parquet"))

    def load(config):
        cache = str(folder / "cache")
        return load_dataset(str(out), config, split="train", cache_dir=cache).to_list()

    return load


def save(run, out, strategy="prefix_merging"):
    options = TraceOptions(strategy)
    return save_traces(run, iter_traces(run, options), out, options)


def traces_of(run, strategy="prefix_merging"):
    traces = []
    for traced in iter_traces(run, TraceOptions(strategy)):
        traces += [trace.to_json() for trace in traced.traces]
    return traces


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
    def test_every_config_holds_what_was_recorded_and_a_prompt_once(self, folder, load):
        assert load("traces") == traces_of(folder / "run")
        stored = {call["call_id"]: call["prompt_tail_ids"] for call in load("calls")}
        assert len(stored) == 7
        assert stored["s-0"] == [1, 2]
        assert stored["s-1"] == [5]
        assert stored["s-2"] == [8]
        rewarded, other = sorted(load("sessions"), key=itemgetter("session_id"))
        assert rewarded["harness"] == "pi"
        assert rewarded["reward"] == 0.25
        assert rewarded["started_at"] == START
        assert other["harness"] == "codex"
        assert other["reward"] is None
        assert other["status"] == "timeout"
        [event] = load("events")
        assert event["kind"] == "refused"
        assert event["host"] == "example.com"
        assert event["at"].astimezone(UTC) == START

    def test_the_code_of_the_card_gives_every_call_with_its_full_prompt(self, folder, load):
        names = {"cache_dir": str(folder / "cache")}
        open_it, rebuild = code_blocks(folder / "out" / "README.md")
        open_it = open_it.replace("path/to/this/folder", str(folder / "out"))
        open_it = open_it.replace('split="train"', 'split="train", cache_dir=cache_dir')
        exec(open_it + rebuild, names)
        rebuilt = {
            call["call_id"]: call["prompt_ids"] for call in names["full_prompts"](names["calls"])
        }
        recorded = {}
        for calls in RecordedCalls(folder / "run").values():
            recorded |= {call.call_id: list(call.prompt_ids) for call in calls}
        assert rebuilt == recorded

    def test_only_the_last_row_of_a_session_is_exported(self, run, tmp_path):
        add_rows(run, make_session("t"))
        rows = exported(tmp_path, run)("sessions")
        rewards = {session["session_id"]: session["reward"] for session in rows}
        assert rewards == {"s": 0.25, "t": 1.0}

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
        out = tmp_path / "out"
        assert get_dataset_config_names(str(out)) == ["traces", "calls"]
        assert {path.name for path in out.iterdir()} == {"README.md", "calls", "traces"}
        assert len(load("traces")) == 4

    def test_neither_engines_nor_paths_of_this_machine_are_exported(self, run, tmp_path):
        evidence = {"changed": ["src/a.py"], "log": "/home/me/runs/logs/v.judge.log"}
        judged = {
            "error": "http://gpu-7.internal:8000 (its output is in /home/me/runs/logs/v.log)",
            "evidence": evidence,
            "parts": {"speed": 0.5},
            "suspicions": {"git_history": 1},
            "harness_version": "1.2.3",
            "runtime": "sandbox",
        }
        why = "Cannot connect to host {} ssl:default [Connect call failed {}]"
        failed = why.format("gpu-8.internal:8000", "('10.0.0.8', 8000)")
        detail = f"the engine at http://gpu-8.internal:8000: {failed}"
        rejected = Event(kind="rejected", session_id="s", detail=detail)
        add_rows(run, make_session("v", "failed", **judged), rejected)
        add_recorder(run, {"engines": ["http://gpu-7.internal:8000", "http://gpu-8.internal:8000"]})
        load = exported(tmp_path, run)
        calls = load("calls")
        assert calls[0].keys() == set(CALL_SCHEMA.names) - {"engine", "digest"}
        errors = {call["error"] for call in calls}
        assert errors == {None, "the engine at http://ENGINE failed: ENGINE"}
        details = {event["kind"]: event["detail"] for event in load("events")}
        expected = why.format("ENGINE", "ENGINE")
        assert details["rejected"] == f"the engine at http://ENGINE: {expected}"
        row = {session["session_id"]: session for session in load("sessions")}["v"]
        assert row["error"] == "http://ENGINE (its output is in …/v.log)"
        assert json.loads(row["evidence"]) == evidence | {"log": "…/v.judge.log"}
        assert json.loads(row["parts"]) == judged["parts"]
        assert json.loads(row["suspicions"]) == judged["suspicions"]
        assert row["harness_version"] == "1.2.3"
        assert row["runtime"] == "sandbox"
        card = tmp_path / "out" / "README.md"
        assert facts(card)["with suspicions of cheating"] == "1 sessions"
        assert facts(card)["ran in"] == "sandbox (1)"
        assert "gpu-7" not in card.read_text()


class TestSavedTraces:
    def test_the_dataset_opens_from_disk_with_the_columns_that_trl_expects(self, saved):
        assert load_from_disk(saved).features == TRACE_FEATURES
        main, helper, alone, unknown = sorted(load_from_disk(saved), key=itemgetter("prompt_ids"))
        weights = [(0, 2), (3, 5)]
        kinds = {"root": (0, 2), "bridged": (3, 5)}
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
            "weight_versions": [{"version": "1", "start": a, "end": b} for a, b in weights],
            "continuity": [{"kind": kind, "start": a, "end": b} for kind, (a, b) in kinds.items()],
            "shared_trace_id": None,
            "shared_tokens": 0,
        }
        assert helper["role"] == "subagent"
        assert helper["completion_ids"] == [22, 23, 24]
        assert helper["reward"] == 0.25
        assert alone["reward"] is None
        assert alone["task_id"] == "task"
        assert unknown["reward"] is None
        assert unknown["task_id"] == unknown["group_id"] == ""

    def test_the_folder_is_what_datasets_itself_saves(self, saved, tmp_path):
        Dataset.from_list(list(load_from_disk(saved))).save_to_disk(tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert {path.name for path in saved.iterdir()} == names | {"README.md"}
        for name in ("state.json", "dataset_info.json"):
            ours = json.loads((saved / name).read_text())
            theirs = json.loads((tmp_path / name).read_text())
            assert ours.keys() == theirs.keys()
            if name == "state.json":
                assert ours == theirs | {"_fingerprint": ours["_fingerprint"]}

    def test_a_run_without_calls_is_a_dataset_without_rows(self, run, tmp_path):
        for path in run.glob("*.arrow"):
            path.unlink()
        save(run, tmp_path / "out")
        assert load_from_disk(tmp_path / "out").num_rows == 0

    def test_the_rows_are_the_traces_and_sampled_tokens_are_accounted_for(
        self, run, tmp_path, saved
    ):
        save(run, tmp_path / "each", "per_request")
        assert list(load_from_disk(tmp_path / "each")) == traces_of(run, "per_request")
        totals = save(run, tmp_path / "out")
        left_out = {"aborted": 1, "auxiliary": 1, "no_reward": 5}
        assert totals.ledger == Ledger(sampled=14, trained=7, left_out=left_out)
        assert (totals.sessions, totals.calls, totals.traces) == (3, 7, 4)
        rows = load_from_disk(tmp_path / "out")
        rewarded = [trace for trace in rows if trace["reward"] is not None]
        trained = sum(sum(trace["completion_mask"]) for trace in rewarded)
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
            for name in TRACE_FEATURES:
                assert f"`{name}`" in text
            for private in ("someone", str(folder), "gpu-7"):
                assert private not in text

    def test_its_code_loads_the_dataset_and_makes_sequences_for_sft(self, saved):
        load, sft = code_blocks(saved / "README.md")
        names = {}
        exec(load.replace("path/to/this/folder", str(saved)) + sft, names)
        rows = {str(row["input_ids"]): row["assistant_masks"] for row in names["sft"]}
        assert rows["[1, 2, 3, 4, 5, 6, 7]"] == [0, 0, 1, 1, 0, 1, 1]
        # what the card counts as to train, and nothing of sessions without a reward
        trained = sum(map(sum, rows.values()))
        counted = facts(saved / "README.md")["sampled tokens"]
        assert counted.startswith(f"14: {trained} to train")

    @pytest.mark.parametrize(
        ("model", "cell"), [("a|b", "a\\|b"), ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B")]
    )
    def test_a_bar_in_a_name_does_not_break_the_table_and_a_model_of_the_hub_keeps_its_name(
        self, tmp_path, model, cell
    ):
        save(factories.write_run(tmp_path / "run", model=model), tmp_path / "out")
        assert facts(tmp_path / "out" / "README.md")["model"] == cell


def test_shards_are_of_bounded_size(run, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "SHARD_BYTES", 300)
    save(run, tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("data-*.arrow"))) > 1
    load = exported(tmp_path, run)
    files = sorted(path.name for path in (tmp_path / "out" / "traces").iterdir())
    assert len(files) > 1
    for number, name in enumerate(files):
        assert name.startswith(f"train-{number:05}-of-{len(files):05}-")
    assert load("traces") == list(load_from_disk(tmp_path / "saved"))


@pytest.mark.parametrize("arguments", [["traces"], ["export", "--to", "parquet"]], ids=str)
def test_the_users_cache_stays_empty_and_no_progress_bar_is_shown(run, tmp_path, arguments):
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "HF_HOME": str(home / "hf")}
    del environment["HF_DATASETS_CACHE"]
    command = [ROLLTAP, *arguments, run, "--out", tmp_path / "out"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert not re.search("examples|ba/s", ended.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out", "run"]
