import io
import json

import pytest
from datasets import load_dataset, load_from_disk
from rich.console import Console

import rolltap
from rolltap.errors import LedgerError, RunError
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


def names(run):
    return [session.session_id for session in run.sessions()]


def test_a_run_names_its_folder_and_its_metadata_and_another_folder_is_refused(run, tmp_path):
    assert rolltap.open_run(str(tmp_path / "run")).path == run.path == tmp_path / "run"
    assert run.metadata["model"] == METADATA["model"]
    with pytest.raises(RunError, match=r"it has no run\.json"):
        rolltap.open_run(tmp_path)


def test_sessions_without_a_row_are_there_with_the_status_unknown(run):
    sessions = run.sessions()
    ends = [(each.session_id, each.status, each.reward) for each in sessions]
    assert ends == [("t", "timeout", None), ("s", "completed", 0.25), ("u", "unknown", None)]
    assert sessions[-1].started_at == run.calls["u"][0].started_at
    assert run.sessions() == sessions


def test_calls_are_a_mapping_from_session_to_its_calls(run, recorded):
    assert run.calls == recorded
    assert list(run.calls) == ["t", "s", "u"]
    assert len(run.calls) == 3
    with pytest.raises(KeyError):
        run.calls["nobody"]


def test_json_columns_are_parsed(run):
    call = run.calls["s"][0]
    assert call.parsed_messages == [{"role": "user", "content": "Go"}]
    assert call.parsed_reply == {"content": "x"}
    assert call.parsed_tools is None
    assert call.parsed_sampling == {}
    assert run.calls["t"][0].parsed_reply is None


def test_what_the_judge_said_of_a_session_is_values(run):
    said = {"parts": {"speed": 0.5}, "evidence": {"log": "a"}, "suspicions": {"odd_files": 1}}
    add_rows(run.path, make_session("j", **said))
    judged = run.sessions()[-1]
    assert {name: getattr(judged, name) for name in said} == said
    assert run.verify().sound


def test_what_a_notebook_shows_has_no_tokens_and_is_short(tmp_path):
    ids = list(range(7000, 8000))
    evidence = {"tests": {f"t.py::{i}": "passed" for i in ids}}
    write_rows(tmp_path, make_call("s", 0, ids, ids), make_session("s", evidence=evidence))
    run = rolltap.open_run(tmp_path)
    traces = run.traces()
    shown = [run, run.calls, run.calls["s"][0], *run.sessions(), traces, *traces, traces.batch()]
    shown += [run.ledger(), run.summary(), *traces.by_session(progress=False)]
    shown += [run.inspect_session("s"), run.inspect_call("s", "s-0")]
    for value in shown:
        text = repr(value)
        assert len(text) <= 1000
        assert "7500" not in text
        assert " at 0x" not in text


NOT_EMPTY = "exists and is not an empty folder: choose a new one"
MISTAKES = {
    "run.export('hub', 'out')": "unknown format 'hub': choose .*; push_to_hub for the Hub",
    "run.export('csv', 'out')": "unknown format 'csv': choose parquet, atif, messages",
    "run.export('messages', full)": NOT_EMPTY,
    "run.traces().save(full)": NOT_EMPTY,
    "run.filter('out', min_reward='1')": "min_reward is 1: give a finite number",
    "run.filter('out', statuses='completed')": "'completed' is not a collection",
    "run.split('out')": "give either by= or parts=",
    "run.split('out', parts=0)": "parts=0: give at least 1",
    "run.split('out', by='reward')": "by='reward': choose",
    "run.inspect_session('nobody')": "has no session 'nobody', only u, t, s",
    "run.reward('s', '1')": "the reward is 1: give a finite number",
    "run.traces(strategy='all')": "choose per_request, prefix_merging, tree",
    "run.traces(roles=['boss'])": "choose agent, subagent, compaction, auxiliary",
    "run.traces(roles='agent')": "'agent' is not a collection: give a list",
    "run.traces(max_tokens=0)": "max_tokens=0: give a number of at least 1",
    "run.traces().batch('s')": "'s' is not a collection",
    "run.traces().batch(['s', 'x'])": "has no session 'x'",
    "rolltap.merge_runs([], 'out')": "the list of runs is empty",
    "rolltap.merge_runs('run', 'out')": "is not a collection",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_do(run, mistake):
    with pytest.raises(rolltap.RolltapError, match=MISTAKES[mistake]) as refused:
        eval(mistake, {"run": run, "full": run.path.parent, "rolltap": rolltap})
    assert "\n" not in str(refused.value)


def test_an_unknown_criterion_is_a_type_error(run, tmp_path):
    with pytest.raises(TypeError, match="unknown criterion 'min_rewards'"):
        run.filter(tmp_path / "d", min_rewards=1)


def test_the_ledger_leaves_sessions_without_a_reward_out(run):
    assert run.ledger() == run.summary().ledger == run.traces().batch().ledger
    assert run.ledger().left_out == {"aborted": 1, "auxiliary": 1, "no_reward": 5}


def test_rich_prints_what_a_person_looks_at(run):
    for view in (run.summary(), run.inspect_session("s"), run.ledger()):
        console = Console(file=io.StringIO(), width=100)
        console.print(view)
        assert "sampled tokens" in console.file.getvalue()


def test_an_export_is_a_folder_with_a_number_of_records(run, tmp_path):
    assert run.export("parquet", tmp_path / "parquet", progress=False) == 4 + 7 + 2 + 1
    assert len(load_dataset(str(tmp_path / "parquet"), "calls", split="train")) == 7


def test_filter_split_and_merge_return_the_new_runs(run, tmp_path):
    assert names(run.filter(tmp_path / "a", min_reward=0.1)) == ["s"]
    assert names(run.filter(tmp_path / "b", statuses=["unknown"])) == ["u"]
    parts = run.split(tmp_path / "c", by="harness")
    assert {name: names(part) for name, part in parts.items()} == {
        "codex": ["t"],
        "pi": ["s"],
        "_none": ["u"],
    }
    folders = [part.path for part in parts.values()]
    merged, left_behind = rolltap.merge_runs(folders, tmp_path / "merged")
    assert dict(merged.calls) == dict(run.calls)
    assert left_behind == []


def test_a_run_verifies_itself(run):
    assert run.verify().sound
    assert rolltap.verify_run(run.path, progress=False).rows["calls"] == 7


def test_calls_of_others_are_imported_from_a_path_or_a_stream(tmp_path):
    line = {"session_id": "s", "call_id": "c", "prompt_ids": [1], "completion_ids": [2]}
    text = json.dumps({**line, "logprobs": [-1.0], "finish_reason": "stop"}).encode()
    (tmp_path / "calls.jsonl").write_bytes(text)
    assert rolltap.import_calls(tmp_path / "calls.jsonl", tmp_path / "a").calls == 1
    assert rolltap.import_calls(io.BytesIO(text), tmp_path / "b").calls == 1
    for name in "ab":
        assert rolltap.open_run(tmp_path / name).calls["s"][0].completion_ids == [2]


def test_iterating_traces_yields_them_with_their_labels(run):
    traces = run.traces(roles=["agent"])
    labels = [(trace.trace_id, trace.reward, trace.group_id) for trace in traces]
    assert labels == [("t/t-0", None, "g"), ("s/s-1", 0.25, "g"), ("u/u-0", None, "")]


def test_a_batch_has_traces_rewards_and_a_checked_ledger(run):
    batch = run.traces("per_request").batch()
    assert [trace.call_ids for trace in batch.traces] == [["s-0"], ["s-1"], ["s-3"]]
    reward = rolltap.GroupReward(group_id="g", reward=0.25, task_id="task", harness="pi")
    assert batch.rewards == {"s": reward}
    assert batch.ledger.trained == sum(sum(trace.completion_mask) for trace in batch.traces) == 7
    assert run.traces().batch(["t"]).ledger.left_out == {"no_reward": 2}


def test_traces_that_lose_tokens_are_an_error(run, monkeypatch):
    forget_a_call(monkeypatch)
    with pytest.raises(LedgerError, match="the calls hold 2 sampled tokens"):
        run.traces().batch()


def test_a_session_without_a_group_is_compared_with_no_other(tmp_path):
    rows = []
    for name in "ab":
        session = rolltap.Session(session_id=name, status="completed", reward=1.0)
        rows += [make_call(name, 0, [1], [2]), session]
    write_rows(tmp_path, *rows)
    batch = rolltap.open_run(tmp_path).traces().batch()
    assert {trace.group_id for trace in batch.traces} == {"a", "b"}
    assert {name: label.group_id for name, label in batch.rewards.items()} == {"a": "a", "b": "b"}


def test_saved_traces_are_a_dataset_and_counts(run, tmp_path):
    seen = []
    totals = run.traces().save(tmp_path / "traces", seen.append, progress=False)
    saved = load_from_disk(tmp_path / "traces")
    assert saved["trace_id"][:] == [trace.trace_id for trace in seen]
    assert totals == run.traces().totals(progress=False)
    assert isinstance(totals, Totals)
    assert totals.sessions == 3
    assert totals.traces == len(seen)
    assert totals.ledger == run.ledger()
