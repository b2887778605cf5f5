from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolltap.addons.errors import LedgerError
from rolltap.addons.store.records import SessionStatus
from rolltap.trainer.traces.build import GroupReward, Unrewarded
from rolltap.trainer.traces.ledger import CachedPrompts, Ledger, LeftOut
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.sessions import (
    Label,
    Outcomes,
    RewardRules,
    Totals,
    TraceOptions,
    label_session,
    load_batch,
    make_batch,
    trace_session,
)
from tests.factories import make_call, make_session, write_run
from tests.trainer.forests import forget_a_call

CALL = make_call(1, [1], [7, 8])
FAILED = make_call(2, [2], [7, 8], status="failed")
UNKNOWN = RecordedSession(session_id="u", session=None, calls=[CALL])


def traced(session, *calls, **options):
    """Return a recorded session as traces. Without calls it sampled nothing."""
    name = session.session_id
    recorded = RecordedSession(session_id=name, session=session, calls=list(calls))
    return trace_session(recorded, TraceOptions(**options))


def test_traces_have_the_labels_of_their_session_if_it_has_a_row():
    whole = traced(make_session(reward=0.0), CALL)
    assert whole.rewarded() == whole  # a reward of zero is a reward
    [trace] = whole.traces
    labels = (trace.task_id, trace.group_id, trace.harness, trace.reward)
    assert labels == ("t", "g", "h", 0.0)
    unknown = trace_session(UNKNOWN, TraceOptions())
    [trace] = unknown.traces
    assert trace.task_id == ""
    assert trace.reward is None
    assert unknown.rewarded().ledger == Ledger(sampled=2, left_out={"no_reward": 2})


def test_a_batch_has_the_continued_prompts_of_each_harness_whether_rewarded_or_not():
    fields = {"kind": "bridged", "prefix_length": 5, "cached_tokens": 4}
    root = make_call(1, [1], [7, 8], cached_tokens=1)
    second = make_call(2, [1] * 9, [7, 8], **fields)
    third = make_call(3, [1] * 9, [7, 8], **fields)
    rewarded = traced(make_session(), root, second)
    batch = make_batch([rewarded, traced(make_session(reward=None), third)])
    counted = CachedPrompts(calls=2, prompt_tokens=18, known_tokens=10, cached_tokens=8)
    assert batch.continued == {"h": counted}


@pytest.mark.parametrize(
    ("session", "reason"),
    [
        (make_session(reward=None), "no_reward"),
        (make_session(status="infrastructure"), "infrastructure"),
        (make_session(status="infrastructure", reward=1.0), "infrastructure"),
    ],
)
def test_without_a_reward_no_token_is_trained_and_those_left_out_before_keep_their_reason(
    session, reason
):
    whole = traced(session, CALL, FAILED)
    assert [trace.reward for trace in whole.traces] == [None]
    assert whole.ledger == Ledger(sampled=4, trained=2, left_out={"failed": 2})
    rewarded = whole.rewarded()
    assert rewarded.reward is None
    assert rewarded.traces == []
    assert rewarded.ledger == Ledger(sampled=4, left_out={"failed": 2, reason: 2})


def test_tokens_that_the_ledger_misses_are_an_error_that_names_the_session(monkeypatch):
    forget_a_call(monkeypatch)
    message = "session s: the calls hold 4 sampled tokens, the ledger says 2"
    with pytest.raises(LedgerError, match=message):
        traced(make_session(), CALL, make_call(2, [9], [7, 8]))


def test_a_batch_names_every_session_without_a_reward_and_why_even_if_it_sampled_nothing():
    dead = traced(make_session("dead", "infrastructure", reward=1.0))
    late = traced(make_session("late", "timeout", group_id="", reward=None))
    failed = traced(make_session("failed", "failed", reward=0.0))
    batch = make_batch([dead, late, failed, trace_session(UNKNOWN, TraceOptions())])
    assert batch.traces == []
    reward = GroupReward(group_id="g", reward=0.0, task_id="t", harness="h", status="failed")
    assert batch.rewards == {"failed": reward}
    assert batch.unrewarded == {
        "dead": Unrewarded(group_id="g", reason="infrastructure", status="infrastructure"),
        "late": Unrewarded(group_id="late", reason="no_reward", status="timeout"),
        "u": Unrewarded(group_id="u", reason="no_reward"),
    }


def test_totals_account_for_tokens_as_a_batch_does():
    rows = [make_session(status="infrastructure"), make_session(reward=None), make_session()]
    sessions = [traced(row, CALL) for row in rows]
    totals = Totals()
    for session in sessions:
        totals.add(session)
    left_out = {"infrastructure": 2, "no_reward": 2}
    assert totals.ledger == make_batch(sessions).ledger
    assert totals.ledger == Ledger(sampled=6, trained=2, left_out=left_out)
    assert totals.traces == 3


def test_a_batch_has_the_selected_traces_and_the_rewards_of_all_its_sessions(tmp_path):
    rows = []
    for name, reward in {"a": 0.5, "b": None, "x": 1.0, "idle": 0.0}.items():
        rows.append(make_session(name, reward=reward))
        if name != "idle":
            call = make_call(f"{name}1", [1], [7, 8], session_id=name)
            side = make_call(f"{name}2", [1, 5], [7, 8], session_id=name, role="subagent")
            rows += [call, side]
    run = write_run(tmp_path, *rows)

    def batch_of(*options):
        return load_batch(run, ["a", "b", "idle"], TraceOptions(*options))

    batch = batch_of("tree", ["agent"], 2)
    [trace] = batch.traces
    assert trace.trace_id == "a/a1"
    assert trace.completion_ids == [7]
    assert {name: label.reward for name, label in batch.rewards.items()} == {"a": 0.5, "idle": 0.0}
    left_out = {"subagent": 4, "over_length": 2, "no_reward": 1}
    assert batch.ledger == Ledger(sampled=8, trained=1, left_out=left_out)
    assert [trace.shared_tokens for trace in batch_of("tree").traces] == [0, 1]
    assert [trace.shared_tokens for trace in batch_of().traces] == [0, 0]


@pytest.mark.parametrize(
    ("status", "reward", "outcomes", "label"),
    [
        ("completed", 0.5, {}, 0.5),
        ("completed", None, {}, "no_reward"),
        ("failed", 0.5, {}, 0.5),
        ("failed", 0.5, {"failed": "exclude"}, "excluded"),
        ("failed", 0.5, {"failed": 0}, 0.0),
        ("timeout", 1.0, {"timeout": -1.5}, -1.5),
        ("timeout", None, {"timeout": -1.5}, "no_reward"),
        ("budget", None, {"budget": -1}, "no_reward"),
        ("failed", None, {"failed": 0}, "no_reward"),
        ("timeout", None, {}, "no_reward"),
        ("budget", 1.0, {"budget": "exclude"}, "excluded"),
        ("unjudged", 1.0, {}, "unjudged"),
        ("unjudged", None, {"unjudged": 0.0}, 0.0),
        ("infrastructure", 1.0, {"failed": 0}, "infrastructure"),
        ("cancelled", 1.0, {"timeout": 0}, "cancelled"),
        ("unknown", 1.0, {}, "no_reward"),
    ],
)
def test_a_status_gets_its_reward_or_the_reason_why_it_has_none_by_the_recipe(
    status, reward, outcomes, label
):
    wanted = Label(None, label) if isinstance(label, str) else Label(label, None)
    row = make_session(status=status, reward=reward)
    assert label_session(row, RewardRules(Outcomes(**outcomes))) == wanted


@pytest.mark.parametrize(
    ("status", "matches", "suspicious", "label"),
    [
        ("completed", 2, "keep", Label(1.0, None)),
        ("completed", 2, "exclude", Label(None, "suspicious")),
        ("completed", 2, 2, Label(-1.0, None)),
        ("completed", 0, "exclude", Label(1.0, None)),
        ("completed", 0, 2, Label(1.0, None)),
        ("timeout", 2, 0.5, Label(-0.5, None)),  # subtracted from the reward of an outcome too
    ],
)
def test_suspicious_sessions_are_kept_excluded_or_lose_a_number(status, matches, suspicious, label):
    row = make_session(status=status, reward=1.0, suspicions={"git_history": matches})
    assert label_session(row, RewardRules(Outcomes(timeout=0), suspicious)) == label


@pytest.mark.parametrize(
    ("status", "choice"),
    [
        ("failed", True),
        ("failed", "0"),
        ("failed", float("nan")),
        ("failed", float("inf")),
        ("failed", "keep"),
        ("unjudged", "judge"),  # it has no reward of a judge
        ("infrastructure", 0),
        ("completed", 1),
    ],
)
def test_what_is_no_choice_is_refused(status, choice):
    with pytest.raises(ValidationError):
        Outcomes(**{status: choice})


NUMBERS = st.floats(-2, 2)
CHOICES = st.sampled_from(["judge", "exclude"]) | NUMBERS
OUTCOMES = st.builds(
    Outcomes,
    failed=CHOICES,
    timeout=CHOICES,
    budget=CHOICES,
    unjudged=st.just("exclude") | NUMBERS,
)
RULES = st.builds(
    RewardRules,
    OUTCOMES,
    st.sampled_from(["keep", "exclude"]) | st.floats(0.1, 2),
)
ROWS = st.builds(
    make_session,
    status=st.sampled_from(get_args(SessionStatus)),
    reward=st.none() | NUMBERS,
    suspicions=st.sampled_from([{}, {"web_search": 1}]),
)


@given(st.lists(ROWS, max_size=8), RULES)
def test_the_ledger_adds_up_and_groups_have_no_session_that_is_left_out(rows, rules):
    sessions = []
    for number, row in enumerate(rows):
        row.session_id = str(number)
        call = make_call("c", [1], [7, 8], session_id=row.session_id)
        sessions.append(traced(row, call, rewards=rules))
    batch = make_batch(sessions)
    assert batch.ledger.sampled == 2 * len(rows)
    assert batch.ledger.trained == 2 * len(batch.rewards) == 2 * len(batch.traces)
    assert batch.rewards.keys().isdisjoint(batch.unrewarded)
    assert batch.rewards.keys() | batch.unrewarded.keys() == {row.session_id for row in rows}
    for row in rows:
        if row.status in ("infrastructure", "cancelled"):
            assert batch.unrewarded[row.session_id].reason == row.status
        if rules.suspicious == "exclude" and row.suspicions:
            assert row.session_id not in batch.rewards
    reasons = Counter(label.reason for label in batch.unrewarded.values())
    assert batch.ledger.left_out == {reason: 2 * count for reason, count in reasons.items()}
    assert set(reasons) <= set(get_args(LeftOut))
