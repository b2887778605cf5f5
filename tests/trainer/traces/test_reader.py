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
    ended = {"status": "aborted", "finish_reason": "abort", "finished_at": START}
    return [root, turn, make_call(2, [], [7], after=turn, **ended)]


def violations(run):
    return [call.violation for call in RecordedCalls(run)["s"]]


class TestLoadCalls:
    def test_calls_come_back_equal_and_in_the_order_of_their_starts_apart_by_session(
        self, run, chain
    ):
        """Their prompts are full even if parents are in a file that is read later."""
        assert RecordedCalls(run) == {}
        root, turn, last = chain
        early = make_call(3, [9], [9], started_at=START - timedelta(seconds=1))
        rendered = make_call(4, [8, 8], [9], parent_id="0", kind="rendered")
        other = make_call(0, [3], [4], session_id="t")
        more = make_call(1, [], [6], after=other)
        for row in (last, rendered, root, more, turn, other, early):
            add_rows(run, row)
        assert RecordedCalls(run) == {"s": [early, *chain, rendered], "t": [other, more]}

    def test_thousands_of_turns_are_rebuilt_from_any_order(self, run):
        calls = [make_call(0, [1], [2])]
        for number in range(1, 1100):
            calls.append(make_call(number, [], [number], after=calls[-1]))
        shuffled = random.Random(0).sample(calls, len(calls))
        add_rows(run, *shuffled)
        assert RecordedCalls(run)["s"][-1].prompt_ids == [1, 2, *range(1, 1099)]

    def test_a_call_whose_parent_is_missing_keeps_its_suffix_and_is_marked_with_its_descendants(
        self, run, chain
    ):
        add_rows(run, *chain[1:])
        turn, last = RecordedCalls(run)["s"]
        assert turn.violation == "parent 0 is not in the run"
        assert turn.prompt_ids == [4]
        assert turn.prefix_length == 0
        assert last.violation == "the prompt has 6 tokens, but 3 can be rebuilt"
        assert last.prompt_ids == []

    def test_a_prompt_of_another_length_than_recorded_is_marked(self, run, chain):
        root, turn, _ = chain
        turn.prefix_length = 2
        add_rows(run, root, turn, make_call(2, [1, 2, 3], [4], prefix_length=1))
        assert violations(run) == [
            None,
            "the prompt has 4 tokens, but 5 can be rebuilt",
            "the prompt has 3 tokens, but 2 can be rebuilt",
        ]
        assert RecordedCalls(run)["s"][1].prompt_ids == [3, 4]

    def test_calls_that_are_each_others_parents_are_marked_and_a_recorded_violation_is_kept(
        self, run
    ):
        first = make_call(0, [1], [2], parent_id="1")
        second = make_call(1, [1], [2], parent_id="0")
        nan = make_call(2, [1], [2], parent_id="gone", violation="log-probability 0 is nan")
        add_rows(run, first, second, nan)
        assert violations(run) == [
            "parent 1 is not in the run",
            "parent 0 is not in the run",
            "log-probability 0 is nan",
        ]

    def test_a_call_that_is_recorded_twice_is_refused(self, run, chain):
        add_rows(run, *chain)
        add_rows(run, *chain[:1])
        with pytest.raises(RunError, match="holds call 0 of session s twice"):
            RecordedCalls(run)["s"]


class TestChangedRows:
    def test_a_changed_call_and_all_that_continue_it_are_marked_and_others_are_not(
        self, run, chain, caplog
    ):
        rendered = make_call(3, [8, 8], [9], parent_id="1", kind="rendered")
        add_rows(run, *chain, rendered)
        change_rows(run, "calls", lambda row: row["call_id"] == "0", logprobs=[-0.25])
        assert violations(run) == [
            "its row was changed after it was written",
            "its prompt continues call 0, whose row was changed",
            "its prompt continues call 1, whose row was changed",
            None,
        ]
        changed = "1 rows of session s were changed after they were written (call 0): not trained"
        assert changed in caplog.text
        [traced] = iter_traces(run, TraceOptions())
        assert [trace.call_ids for trace in traced.traces] == [["3"]]
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
        assert changed.reward is None
        assert changed.error == "its row was changed after it was written"
        assert changed.suspicions == changed.parts == {}
        assert other == make_session("t", reward=0.0)
        assert "the rows of 1 sessions were changed after they were written (s, ...)" in caplog.text

    def test_a_later_sound_row_of_the_session_counts(self, run, caplog):
        add_rows(run, make_session(reward=0.0))
        change_rows(run, "sessions", lambda row: True, reward=1.0)
        add_rows(run, make_session(reward=0.5, revision=1))
        assert load_sessions(run)["s"].reward == 0.5
        assert caplog.text == ""


def test_the_last_row_of_a_session_wins(run):
    started = make_session(status="failed")
    other = make_session("t", "timeout")
    judged = make_session(exit_status=0, reward=0.5, policy_version="3")
    add_rows(run, started, other, judged)
    assert load_sessions(run) == {"s": judged, "t": other}


def test_the_rows_of_sessions_are_read_once_each_while_the_run_grows(run, monkeypatch):
    made = []

    def noted(row):
        made.append(row)
        return make(row)

    table = SessionTable(run)
    for number in range(3):
        again = make_session("s", reward=1.0, revision=number)
        add_rows(run, make_session(str(number), reward=0.0), again)
        with monkeypatch.context() as patch:
            patch.setattr(reader, "make_session", noted)
            assert table.refresh() == table.refresh()
        assert table.rows == load_sessions(run)
    assert len(made) == 6
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
    assert found.calls == chain
    assert found.session.reward == 0.5
    unknown = sessions.read("gone")
    assert unknown.calls == []
    assert unknown.session is None


@pytest.mark.parametrize("read", [RecordedCalls, load_sessions, SessionReader])
def test_a_folder_that_is_no_run_is_refused(tmp_path, read):
    with pytest.raises(RunError, match=r"it has no run\.json"):
        read(tmp_path)
