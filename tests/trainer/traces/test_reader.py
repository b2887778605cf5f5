import random
from datetime import timedelta

import pytest

from rolltap.addons.errors import RunError
from rolltap.addons.store.rewards import make_session as make
from rolltap.trainer.traces import reader
from rolltap.trainer.traces.reader import RecordedCalls, SessionReader, SessionTable, load_sessions
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces
from tests.factories import START, add_rows, make_call, make_session, write_run
from tests.trainer.traces.changed import change_rows


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path)


@pytest.fixture
def chain():
    root = make_call(0, [1, 2], [3], sampling='{"temperature": 1.0}', reply='{"content": "hi"}')
    turn = make_call(1, [4], [5, 6], after=root, messages='[{"role": "tool"}]')
    return [
        root,
        turn,
        make_call(
            2, [], [7], after=turn, status="aborted", finish_reason="abort", finished_at=START
        ),
    ]


class TestLoadCalls:
    def test_calls_come_back_in_the_order_of_their_starts_and_apart_by_session(self, run, chain):
        early = make_call(3, [9], [9], started_at=START - timedelta(seconds=1))
        other = make_call(0, [3], [4], session_id="t")
        add_rows(run, *chain, other, early)
        add_rows(run, make_call(1, [], [6], after=other))
        calls = RecordedCalls(run)
        assert [call.call_id for call in calls["s"]] == ["3", "0", "1", "2"]
        assert [call.prompt_ids for call in calls["t"]] == [[3], [3, 4]]

    def test_calls_come_back_equal_with_their_full_prompts_even_if_parents_are_in_a_file_that_is_read_later(
        self, run, chain
    ):
        assert RecordedCalls(run) == {}
        root, turn, last = chain
        for row in (last, root, turn):
            add_rows(run, row)
        assert RecordedCalls(run) == {"s": chain}

    def test_thousands_of_turns_are_rebuilt_from_any_order(self, run):
        calls = [make_call(0, [1], [2])]
        for number in range(1, 1100):
            calls.append(make_call(number, [], [number], after=calls[-1]))
        shuffled = random.Random(0).sample(calls, len(calls))
        add_rows(run, *shuffled)
        assert RecordedCalls(run)["s"][-1].prompt_ids == [1, 2, *range(1, 1099)]

    def test_a_rendered_call_does_not_need_its_recorded_parent(self, run, chain):
        rendered = make_call(3, [8, 8], [9], parent_id="0", kind="rendered")
        add_rows(run, *chain, rendered)
        assert RecordedCalls(run)["s"][-1] == rendered

    def test_a_call_whose_parent_is_missing_keeps_its_suffix_and_is_marked_with_its_descendants(
        self, run, chain
    ):
        add_rows(run, *chain[1:])
        turn, last = RecordedCalls(run)["s"]
        assert turn.violation == "parent 0 is not in the run"
        assert (turn.prompt_ids, turn.completion_ids, turn.prefix_length) == ([4], [5, 6], 0)
        assert last.violation == "the prompt has 6 tokens, but 3 can be rebuilt"
        assert (last.prompt_ids, last.completion_ids) == ([], [7])

    def test_a_prompt_of_another_length_than_recorded_is_marked(self, run, chain):
        root, turn, _ = chain
        turn.prefix_length = 2
        add_rows(run, root, turn, make_call(2, [1, 2, 3], [4], prefix_length=1))
        _, turn, alone = RecordedCalls(run)["s"]
        assert (turn.violation, turn.prompt_ids) == (
            "the prompt has 4 tokens, but 5 can be rebuilt",
            [3, 4],
        )
        assert alone.violation == "the prompt has 3 tokens, but 2 can be rebuilt"

    def test_calls_that_are_each_others_parents_are_marked_and_a_recorded_violation_is_kept(
        self, run
    ):
        cycle = make_call(0, [1], [2], parent_id="1"), make_call(1, [1], [2], parent_id="0")
        add_rows(
            run,
            *cycle,
            make_call(2, [1], [2], parent_id="gone", violation="log-probability 0 is nan"),
        )
        violations = [
            "parent 1 is not in the run",
            "parent 0 is not in the run",
            "log-probability 0 is nan",
        ]
        assert [call.violation for call in RecordedCalls(run)["s"]] == violations

    def test_a_call_that_is_recorded_twice_is_refused(self, run, chain):
        add_rows(run, *chain)
        add_rows(run, *chain[:1])
        with pytest.raises(RunError, match="holds call 0 of session s twice"):
            RecordedCalls(run)["s"]


class TestChangedRows:
    def test_a_changed_call_and_those_that_continue_it_are_marked_and_others_are_not(
        self, run, chain, caplog
    ):
        rendered = make_call(3, [8, 8], [9], parent_id="1", kind="rendered")
        add_rows(run, *chain, rendered)
        change_rows(run, "calls", lambda row: row["call_id"] == "1", completion_ids=[5, 7])
        root, changed, last, other = RecordedCalls(run)["s"]
        assert (root.violation, other.violation) == (None, None)
        assert changed.violation == "its row was changed after it was written"
        assert last.violation == "its prompt continues call 1, whose row was changed"
        assert (
            "1 rows of session s were changed after they were written (call 1): not trained on"
            in caplog.text
        )

    def test_no_token_of_a_changed_call_and_of_all_that_continue_it_is_trained(self, run, chain):
        add_rows(run, *chain)
        change_rows(run, "calls", lambda row: row["call_id"] == "0", logprobs=[-0.25])
        assert (
            RecordedCalls(run)["s"][2].violation
            == "its prompt continues call 1, whose row was changed"
        )
        [traced] = iter_traces(run, TraceOptions())
        assert traced.traces == []
        assert traced.ledger.left_out == {"violation": 3, "aborted": 1}

    def test_a_changed_session_has_no_reward_and_says_why(self, run, caplog):
        add_rows(run, make_session("s", reward=0.0), make_session("t", reward=0.0))
        change_rows(
            run,
            "sessions",
            lambda row: row["session_id"] == "s",
            reward=1.0,
            suspicions="{",
            parts=None,
        )
        changed, other = load_sessions(run).values()
        assert SessionReader(run).read("s").session == changed
        assert (changed.reward, changed.error) == (None, "its row was changed after it was written")
        assert (changed.suspicions, changed.parts) == ({}, {})
        assert (other.reward, other.error) == (0.0, None)
        assert "the rows of 1 sessions were changed after they were written (s, ...)" in caplog.text

    def test_a_later_sound_row_of_the_session_counts(self, run, caplog):
        add_rows(run, make_session(reward=0.0))
        change_rows(run, "sessions", lambda row: True, reward=1.0)
        add_rows(run, make_session(reward=0.5, revision=1))
        assert load_sessions(run)["s"].reward == 0.5
        assert caplog.text == ""


def test_the_last_row_of_a_session_wins(run):
    started, other = make_session(status="failed"), make_session("t", "timeout")
    judged = make_session(exit_status=0, reward=0.5, policy_version="3")
    add_rows(run, started, other, judged)
    assert load_sessions(run) == {"s": judged, "t": other}


def test_the_rows_of_sessions_are_read_once_each_while_the_run_grows(run, monkeypatch):
    made = []
    monkeypatch.setattr(reader, "make_session", lambda row: made.append(row) or make(row))
    table = SessionTable(run)
    for number in range(3):
        add_rows(
            run,
            make_session(str(number), reward=0.0),
            make_session("s", reward=1.0, revision=number),
        )
        assert table.refresh() == table.refresh() == load_sessions(run)
    assert len(made) == 6 + (2 + 4 + 6)
    assert table.rows["s"].revision == 2


def test_a_reader_has_what_was_committed_until_its_last_refresh(run, chain):
    add_rows(run, *chain[:2], make_session(reward=None))
    sessions = SessionReader(run)
    add_rows(run, chain[2], make_session(reward=0.5, revision=1), make_session("t"))
    assert sessions.session_ids == ["s"]
    assert sessions.read("s").session.reward is None
    sessions.refresh()
    assert sessions.session_ids == ["s", "t"]
    found = sessions.read("s")
    assert (found.calls, found.session.reward) == (chain, 0.5)
    assert (sessions.read("gone").calls, sessions.read("gone").session) == ([], None)


@pytest.mark.parametrize("read", [RecordedCalls, load_sessions, SessionReader])
def test_a_folder_that_is_no_run_is_refused(tmp_path, read):
    with pytest.raises(RunError, match=r"it has no run\.json"):
        read(tmp_path)
