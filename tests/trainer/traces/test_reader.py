import random
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from rolltap.addons.errors import RunError
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, Session, VersionSpan
from rolltap.addons.store.tables import TABLES, RunWriter, run_files
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def run(tmp_path):
    write_metadata(tmp_path, {"model": "tiny"})
    return tmp_path


def make_call(number, prompt_ids, completion_ids, **fields):
    return Call(
        session_id=fields.pop("session_id", "s"),
        call_id=str(number),
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=[-0.5] * len(completion_ids),
        weight_versions=[VersionSpan(version="1", start=0, end=len(completion_ids))],
        started_at=START + timedelta(seconds=number),
        **fields,
    )


def follow(number, parent, new_ids, completion_ids, **fields):
    """Return a call that continues `parent` and names it as its parent."""
    prefix = parent.prompt_ids + parent.completion_ids
    return make_call(
        number,
        prefix + new_ids,
        completion_ids,
        parent_id=parent.call_id,
        prefix_length=len(prefix),
        kind="bridged",
        **fields,
    )


def write(run, calls):
    writer = RunWriter(run)
    for call in calls:
        writer.add_call(call)
    writer.close()


@pytest.fixture
def chain():
    root = make_call(0, [1, 2], [3], sampling='{"temperature": 1.0}', reply='{"content": "hi"}')
    turn = follow(1, root, [4], [5, 6], messages='[{"role": "tool"}]')
    return [root, turn, follow(2, turn, [], [7], status="aborted", finish_reason="abort", finished_at=START)]


class TestLoadCalls:
    def test_calls_come_back_equal_with_their_full_prompts(self, run, chain):
        write(run, chain)
        assert RecordedCalls(run) == {"s": chain}

    def test_calls_come_back_in_the_order_in_which_they_started(self, run, chain):
        side = make_call(3, [9], [9])
        side.started_at = START - timedelta(seconds=1)
        write(run, [*chain, side])
        assert [call.call_id for call in RecordedCalls(run)["s"]] == ["3", "0", "1", "2"]

    def test_calls_are_kept_apart_by_session(self, run):
        mine, theirs = make_call(0, [1], [2]), make_call(0, [3], [4], session_id="t")
        write(run, [mine, follow(1, mine, [], [5])])
        write(run, [theirs, follow(1, theirs, [], [6], session_id="t")])
        calls = RecordedCalls(run)
        assert [call.prompt_ids for call in calls["s"]] == [[1], [1, 2]]
        assert [call.prompt_ids for call in calls["t"]] == [[3], [3, 4]]

    def test_parents_may_be_in_a_file_that_is_read_later(self, run, chain):
        root, turn, last = chain
        for row in (last, root, turn):
            write(run, [row])
        assert RecordedCalls(run) == {"s": chain}

    def test_thousands_of_turns_are_rebuilt_from_any_order(self, run):
        calls = [make_call(0, [1], [2])]
        for number in range(1, 1500):
            calls.append(follow(number, calls[-1], [], [number]))
        shuffled = random.Random(0).sample(calls, len(calls))
        write(run, shuffled)
        assert RecordedCalls(run)["s"][-1].prompt_ids == [1, 2, *range(1, 1499)]

    def test_a_rendered_call_does_not_need_its_recorded_parent(self, run, chain):
        rendered = make_call(3, [8, 8], [9], parent_id="0", kind="rendered")
        write(run, [*chain, rendered])
        assert RecordedCalls(run)["s"][-1] == rendered

    def test_a_call_whose_parent_is_missing_keeps_its_suffix_and_is_marked_with_its_descendants(self, run, chain):
        write(run, chain[1:])
        turn, last = RecordedCalls(run)["s"]
        assert turn.violation == "parent 0 is not in the run"
        assert (turn.prompt_ids, turn.completion_ids, turn.prefix_length) == ([4], [5, 6], 0)
        assert last.violation == "the prompt has 6 tokens, but 3 can be rebuilt"
        assert (last.prompt_ids, last.completion_ids) == ([], [7])

    def test_a_prompt_of_another_length_than_recorded_is_marked(self, run, chain):
        root, turn, _ = chain
        turn.prefix_length = 2
        write(run, [root, turn])
        kept = RecordedCalls(run)["s"][1]
        assert kept.violation == "the prompt has 4 tokens, but 5 can be rebuilt"
        assert kept.prompt_ids == [3, 4]

    def test_a_call_without_a_parent_whose_prompt_is_incomplete_is_marked(self, run):
        write(run, [make_call(0, [1, 2, 3], [4], prefix_length=1)])
        [kept] = RecordedCalls(run)["s"]
        assert kept.violation == "the prompt has 3 tokens, but 2 can be rebuilt"

    def test_calls_that_are_each_others_parents_are_marked(self, run):
        write(run, [make_call(0, [1], [2], parent_id="1"), make_call(1, [1], [2], parent_id="0")])
        assert [call.violation for call in RecordedCalls(run)["s"]] == [
            "parent 1 is not in the run",
            "parent 0 is not in the run",
        ]

    def test_a_recorded_violation_is_kept(self, run):
        write(run, [make_call(0, [1], [2], parent_id="gone", violation="log-probability 0 is nan")])
        assert RecordedCalls(run)["s"][0].violation == "log-probability 0 is nan"

    def test_a_call_that_is_recorded_twice_is_refused(self, run, chain):
        write(run, chain)
        write(run, chain[:1])
        with pytest.raises(RunError, match="holds call 0 of session s twice"):
            RecordedCalls(run)["s"]

    def test_a_run_without_calls_is_empty(self, run):
        assert RecordedCalls(run) == {}

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path):
        with pytest.raises(RunError, match=r"it has no run\.json"):
            RecordedCalls(tmp_path)


def change_rows(run, table, which, **values):
    """Change rows of a table after they were written, and leave their digests as they are."""
    for path in run_files(run, table):
        rows = pa.ipc.open_stream(path.read_bytes()).read_all().to_pylist()
        for row in rows:
            row.update(values if which(row) else {})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, TABLES[table]) as writer:
            writer.write_table(pa.Table.from_pylist(rows, TABLES[table]))


class TestChangedRows:
    def test_a_changed_call_and_those_that_continue_it_are_marked_and_others_are_not(self, run, chain, caplog):
        rendered = make_call(3, [8, 8], [9], parent_id="1", kind="rendered")
        write(run, [*chain, rendered])
        change_rows(run, "calls", lambda row: row["call_id"] == "1", completion_ids=[5, 7])
        root, changed, last, other = RecordedCalls(run)["s"]
        assert (root.violation, other.violation) == (None, None)
        assert changed.violation == "its row was changed after it was written"
        assert last.violation == "its prompt continues call 1, whose row was changed"
        assert "1 rows of session s were changed after they were written (call 1): not trained on" in caplog.text

    def test_what_continues_a_continuation_of_a_changed_call_is_marked_too(self, run, chain):
        write(run, chain)
        change_rows(run, "calls", lambda row: row["call_id"] == "0", reply="other")
        assert [call.violation for call in RecordedCalls(run)["s"]] == [
            "its row was changed after it was written",
            "its prompt continues call 0, whose row was changed",
            "its prompt continues call 1, whose row was changed",
        ]

    def test_none_of_their_tokens_is_trained(self, run, chain):
        write(run, chain[:2])
        change_rows(run, "calls", lambda row: row["call_id"] == "0", logprobs=[-0.25])
        [traced] = iter_traces(run, TraceOptions())
        assert traced.traces == []
        assert traced.ledger.left_out == {"violation": 3}

    def test_a_changed_session_has_no_reward_and_says_why(self, run, caplog):
        with RunWriter(run) as writer:
            for name in ("s", "t"):
                writer.add_session(Session(session_id=name, status="completed", reward=0.0, started_at=START))
        change_rows(run, "sessions", lambda row: row["session_id"] == "s", reward=1.0)
        changed, other = load_sessions(run).values()
        assert (changed.reward, changed.error) == (None, "its row was changed after it was written")
        assert (other.reward, other.error) == (0.0, None)
        assert "the rows of 1 sessions were changed after they were written (s, ...)" in caplog.text

    def test_a_later_sound_row_of_the_session_counts(self, run, caplog):
        with RunWriter(run) as writer:
            writer.add_session(Session(session_id="s", status="completed", reward=0.0, started_at=START))
        change_rows(run, "sessions", lambda row: True, reward=1.0)
        with RunWriter(run) as writer:
            writer.add_session(Session(session_id="s", status="completed", reward=0.5, revision=1, started_at=START))
        assert load_sessions(run)["s"].reward == 0.5
        assert caplog.text == ""


class TestLoadSessions:
    def test_the_last_row_of_a_session_wins(self, run):
        started = Session(
            session_id="s", task_id="task", group_id="group", harness="harness", status="failed", started_at=START
        )
        other = Session(
            session_id="t", task_id="task", group_id="group", harness="harness", status="timeout", started_at=START
        )
        judged = Session(
            session_id="s",
            task_id="task",
            group_id="group",
            harness="harness",
            status="completed",
            exit_status=0,
            reward=0.5,
            policy_version="3",
            started_at=START,
        )
        writer = RunWriter(run)
        for session in (started, other, judged):
            writer.add_session(session)
        writer.close()
        assert load_sessions(run) == {"s": judged, "t": other}

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path):
        with pytest.raises(RunError, match=r"it has no run\.json"):
            load_sessions(tmp_path)
