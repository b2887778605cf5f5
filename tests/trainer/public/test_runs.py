import io
import json

import pytest
from datasets import load_dataset, load_from_disk
from rich.console import Console

import rolltap
from rolltap.errors import InputError, LedgerError, RunError
from rolltap.types import Totals
from tests.factories import add_rows, make_session
from tests.factories import write_run as write_rows
from tests.trainer.forests import forget_a_call
from tests.trainer.outgoing import METADATA, make_call, write_run


@pytest.fixture
def recorded(tmp_path):
    """The calls of a run in `tmp_path / "run"`."""
    return write_run(tmp_path / "run")


@pytest.fixture
def run(recorded, tmp_path):
    return rolltap.open_run(tmp_path / "run")


class TestRun:
    def test_a_run_names_its_folder_and_its_metadata_and_another_folder_is_refused(
        self, run, tmp_path
    ):
        assert rolltap.open_run(str(tmp_path / "run")).path == run.path == tmp_path / "run"
        assert run.metadata["model"] == METADATA["model"]
        with pytest.raises(RunError, match=r"it has no run\.json"):
            rolltap.open_run(tmp_path)

    def test_sessions_without_a_row_are_there_with_the_status_unknown(self, run):
        sessions = {
            session.session_id: (session.status, session.reward) for session in run.sessions()
        }
        assert sessions == {
            "t": ("timeout", None),
            "s": ("completed", 0.25),
            "u": ("unknown", None),
        }
        assert run.sessions() == run.sessions()
        assert run.sessions()[-1].started_at == run.calls["u"][0].started_at

    def test_calls_are_a_mapping_from_session_to_its_calls(self, run, recorded):
        assert run.calls == recorded
        assert list(run.calls) == ["t", "s", "u"]
        assert len(run.calls) == 3
        with pytest.raises(KeyError):
            run.calls["nobody"]

    def test_json_columns_are_parsed(self, run):
        call = run.calls["s"][0]
        assert (
            call.parsed_messages == json.loads(call.messages) == [{"role": "user", "content": "Go"}]
        )
        assert (call.parsed_reply, call.parsed_tools, call.parsed_sampling) == (
            {"content": "x"},
            None,
            {},
        )
        assert run.calls["t"][0].parsed_reply is None

    def test_what_the_judge_said_of_a_session_is_values(self, run):
        add_rows(
            run.path,
            make_session(
                "j", parts={"speed": 0.5}, evidence={"log": "a"}, suspicions={"odd_files": 1}
            ),
        )
        judged = run.sessions()[-1]
        assert (judged.parts, judged.evidence, judged.suspicions) == (
            {"speed": 0.5},
            {"log": "a"},
            {"odd_files": 1},
        )
        assert run.verify().sound

    def test_what_a_notebook_shows_has_no_tokens_and_is_short(self, tmp_path):
        ids = list(range(7000, 8000))
        evidence = {"tests": {f"t.py::{i}": "passed" for i in ids}}
        write_rows(tmp_path, make_call("s", 0, ids, ids), make_session("s", evidence=evidence))
        run = rolltap.open_run(tmp_path)
        shown = [
            run,
            run.calls,
            run.calls["s"][0],
            *run.sessions(),
            run.traces(),
            *run.traces(),
            run.traces().batch(),
        ]
        shown += [run.ledger(), run.summary(), *run.traces().by_session(progress=False)]
        shown += [run.inspect_session("s"), run.inspect_call("s", "s-0")]
        assert [
            text
            for text in map(repr, shown)
            if len(text) > 1000 or "7500" in text or " at 0x" in text
        ] == []

    @pytest.mark.parametrize(
        ("mistake", "message"),
        [
            (
                lambda run, _: run.export("hub", "out"),
                "unknown format 'hub': choose .*; push_to_hub for the Hub",
            ),
            (
                lambda run, full: run.export("messages", full),
                "exists and is not an empty folder: choose a new one",
            ),
            (
                lambda run, full: run.traces().save(full),
                "exists and is not an empty folder: choose a new one",
            ),
            (
                lambda run, _: run.filter("out", min_reward="1"),
                "min_reward is 1: give a finite number",
            ),
            (lambda run, _: run.inspect_session("nobody"), "has no session 'nobody', only u, t, s"),
            (lambda run, _: run.reward("s", "1"), "the reward is 1: give a finite number"),
        ],
    )
    def test_a_mistake_is_one_line_that_says_what_to_do(self, run, mistake, message):
        with pytest.raises(rolltap.RolltapError, match=message) as refused:
            mistake(run, run.path.parent)
        assert "\n" not in str(refused.value)

    def test_the_ledger_leaves_sessions_without_a_reward_out(self, run):
        assert run.ledger() == run.summary().ledger == run.traces().batch().ledger
        assert run.ledger().left_out == {"aborted": 1, "auxiliary": 1, "no_reward": 5}

    @pytest.mark.parametrize(
        "view", [rolltap.Run.summary, lambda run: run.inspect_session("s"), rolltap.Run.ledger]
    )
    def test_rich_prints_what_a_person_looks_at(self, run, view):
        Console(file=(printed := io.StringIO()), width=100).print(view(run))
        assert "sampled tokens" in printed.getvalue()

    def test_an_export_is_a_folder_with_a_number_of_records(self, run, tmp_path):
        assert run.export("parquet", tmp_path / "parquet", progress=False) == 4 + 7 + 2 + 1
        assert len(load_dataset(str(tmp_path / "parquet"), "calls", split="train")) == 7
        with pytest.raises(
            InputError, match="unknown format 'csv': choose parquet, atif, messages"
        ):
            run.export("csv", tmp_path / "other")

    def test_filter_and_split_return_the_new_runs(self, run, tmp_path):
        def ids(part):
            return [session.session_id for session in part.sessions()]

        assert ids(run.filter(tmp_path / "a", min_reward=0.1)) == ["s"]
        assert ids(run.filter(tmp_path / "b", statuses=["unknown"])) == ["u"]
        parts = run.split(tmp_path / "c", by="harness")
        assert {name: ids(part) for name, part in parts.items()} == {
            "codex": ["t"],
            "pi": ["s"],
            "_none": ["u"],
        }
        with pytest.raises(InputError, match="'completed' is not a collection"):
            run.filter(tmp_path / "d", statuses="completed")
        with pytest.raises(TypeError, match="unknown criterion 'min_rewards'"):
            run.filter(tmp_path / "d", min_rewards=1)

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ({}, "give either by= or parts="),
            ({"parts": 0}, "parts=0: give at least 1"),
            ({"by": "reward"}, "by='reward': choose"),
        ],
    )
    def test_a_wrong_split_is_refused(self, run, tmp_path, how, message):
        with pytest.raises(InputError, match=message):
            run.split(tmp_path / "d", **how)

    def test_merged_runs_are_a_run(self, run, tmp_path):
        parts = run.split(tmp_path / "parts", parts=2)
        merged, left_behind = rolltap.merge_runs(
            [part.path for part in parts.values()], tmp_path / "merged"
        )
        assert (merged.calls, left_behind) == (run.calls, [])
        for wrong, message in (
            ([], "the list of runs is empty"),
            (str(run.path), "is not a collection"),
        ):
            with pytest.raises(InputError, match=message):
                rolltap.merge_runs(wrong, tmp_path / "none")

    def test_a_run_verifies_itself(self, run):
        assert run.verify().sound
        assert rolltap.verify_run(run.path, progress=False).rows["calls"] == 7

    def test_calls_of_others_are_imported_from_a_path_or_a_stream(self, tmp_path):
        line = {
            "session_id": "s",
            "call_id": "c",
            "prompt_ids": [1],
            "completion_ids": [2],
            "logprobs": [-1.0],
        }
        text = json.dumps({**line, "finish_reason": "stop"}).encode()
        (tmp_path / "calls.jsonl").write_bytes(text)
        assert rolltap.import_calls(tmp_path / "calls.jsonl", tmp_path / "a").calls == 1
        assert rolltap.import_calls(io.BytesIO(text), tmp_path / "b").calls == 1
        assert rolltap.open_run(tmp_path / "a").calls["s"][0].completion_ids == [2]


class TestRunTraces:
    def test_iterating_yields_the_labelled_traces(self, run):
        labels = [
            (trace.trace_id, trace.reward, trace.group_id) for trace in run.traces(roles=["agent"])
        ]
        assert labels == [("t/t-0", None, "g"), ("s/s-1", 0.25, "g"), ("u/u-0", None, "")]

    def test_a_batch_has_traces_rewards_and_a_checked_ledger(self, run):
        batch = run.traces("per_request").batch()
        assert [trace.call_ids for trace in batch.traces] == [["s-0"], ["s-1"], ["s-3"]]
        assert batch.rewards == {
            "s": rolltap.GroupReward(group_id="g", reward=0.25, task_id="task", harness="pi")
        }
        assert (
            batch.ledger.trained == sum(sum(trace.completion_mask) for trace in batch.traces) == 7
        )
        assert run.traces().batch(["t"]).ledger.left_out == {"no_reward": 2}

    def test_traces_that_lose_tokens_are_an_error(self, run, monkeypatch):
        forget_a_call(monkeypatch)
        with pytest.raises(LedgerError, match="the calls hold 2 sampled tokens"):
            run.traces().batch()

    def test_a_session_without_a_group_is_compared_with_no_other(self, tmp_path):
        fields = {"status": "completed", "reward": 1.0}
        rows = [rolltap.Session(session_id=name, **fields) for name in ("a", "b")]
        write_rows(tmp_path, *(make_call(name, 0, [1], [2]) for name in ("a", "b")), *rows)
        batch = rolltap.open_run(tmp_path).traces().batch()
        assert {trace.group_id for trace in batch.traces} == {"a", "b"}
        assert {name: labelled.group_id for name, labelled in batch.rewards.items()} == {
            "a": "a",
            "b": "b",
        }

    @pytest.mark.parametrize(
        ("ids", "message"), [("s", "'s' is not a collection"), (["s", "x"], "has no session 'x'")]
    )
    def test_a_batch_of_sessions_that_are_not_there_is_refused(self, run, ids, message):
        with pytest.raises(InputError, match=message):
            run.traces().batch(ids)

    def test_saved_traces_are_a_dataset_and_counts(self, run, tmp_path):
        seen = []
        totals = run.traces().save(tmp_path / "traces", seen.append, progress=False)
        assert load_from_disk(tmp_path / "traces")["trace_id"][:] == [
            trace.trace_id for trace in seen
        ]
        assert totals == run.traces().totals(progress=False)
        assert isinstance(totals, Totals)
        assert (totals.sessions, totals.traces, totals.ledger) == (3, len(seen), run.ledger())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"strategy": "all"},
                "unknown strategy 'all': choose per_request, prefix_merging, tree",
            ),
            (
                {"roles": ["boss"]},
                "unknown role 'boss': choose agent, subagent, compaction, auxiliary",
            ),
            ({"roles": "agent"}, "'agent' is not a collection: give a list"),
            ({"max_tokens": 0}, "max_tokens=0: give a number of at least 1"),
        ],
    )
    def test_arguments_that_do_not_exist_are_refused_before_anything_is_read(
        self, run, arguments, message
    ):
        with pytest.raises(InputError, match=message):
            run.traces(**arguments)
