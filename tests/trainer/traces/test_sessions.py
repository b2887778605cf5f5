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
from rolltap.trainer.training.step.advantages import session_advantages
from tests.factories import make_call, make_session, write_run
from tests.trainer.forests import forget_a_call

CALL, FAILED = make_call(1, [1], [7, 8]), make_call(2, [2], [7, 8], status="failed")


def recorded(session, *calls):
    return RecordedSession(session_id=session.session_id, session=session, calls=list(calls))


def traced(session, *calls, **options):
    return trace_session(recorded(session, *calls), TraceOptions(**options))


def test_traces_have_the_labels_of_their_session_if_it_has_a_row():
    whole = traced(make_session(reward=0.0), CALL)
    assert whole.rewarded() == whole  # a reward of zero is a reward
    [trace] = whole.traces
    assert (trace.task_id, trace.group_id, trace.harness, trace.reward) == ("t", "g", "h", 0.0)
    unknown = trace_session(
        RecordedSession(session_id="s", session=None, calls=[CALL]), TraceOptions()
    )
    assert [(trace.task_id, trace.reward) for trace in unknown.traces] == [("", None)]
    assert unknown.rewarded().ledger == Ledger(sampled=2, trained=0, left_out={"no_reward": 2})


def test_a_batch_has_the_continued_prompts_of_each_harness_whether_rewarded_or_not():
    continued = [
        make_call(n, [1] * 9, [7, 8], kind="bridged", prefix_length=5, cached_tokens=4)
        for n in (2, 3)
    ]
    root = make_call(1, [1], [7, 8], cached_tokens=1)
    batch = make_batch(
        [
            traced(make_session(), root, continued[0]),
            traced(make_session(reward=None), continued[1]),
        ]
    )
    assert batch.continued == {
        "h": CachedPrompts(calls=2, prompt_tokens=18, known_tokens=10, cached_tokens=8)
    }


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
    assert (rewarded.reward, rewarded.traces) == (None, [])
    assert rewarded.ledger == Ledger(sampled=4, trained=0, left_out={"failed": 2, reason: 2})


def test_tokens_that_the_ledger_misses_are_an_error_that_names_the_session(monkeypatch):
    forget_a_call(monkeypatch)
    with pytest.raises(
        LedgerError, match="session s: the calls hold 4 sampled tokens, the ledger says 2"
    ):
        traced(make_session(), CALL, make_call(2, [9], [7, 8]))


def test_a_fault_does_not_count_in_the_mean_of_its_group_and_a_session_without_calls_does(tmp_path):
    fault, failed = (
        make_session("fault", "infrastructure", reward=1.0),
        make_session("failed", "failed", reward=0.0),
    )
    batch = load_batch(write_run(tmp_path, fault, failed), None, TraceOptions())
    assert batch.rewards == {
        "failed": GroupReward(group_id="g", reward=0.0, task_id="t", harness="h", status="failed")
    }


def test_a_batch_names_every_session_without_a_reward_and_why_even_if_it_sampled_nothing():
    dead, late = (
        make_session("dead", "infrastructure"),
        make_session("late", "timeout", group_id="", reward=None),
    )
    unknown = RecordedSession(session_id="u", session=None, calls=[CALL])
    batch = make_batch([traced(dead), traced(late), trace_session(unknown, TraceOptions())])
    assert (batch.rewards, batch.traces) == ({}, [])
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
    assert totals.ledger == make_batch(sessions).ledger
    assert totals.ledger == Ledger(
        sampled=6, trained=2, left_out={"infrastructure": 2, "no_reward": 2}
    )
    assert totals.traces == 3


def test_a_batch_has_the_selected_traces_and_the_rewards_of_all_its_sessions(tmp_path):
    prompts = [(1, [1], "agent"), (2, [1, 5], "subagent")]
    calls = [
        make_call(f"{session_id}{n}", prompt, [7, 8], session_id=session_id, role=role)
        for session_id in "abx"
        for n, prompt, role in prompts
    ]
    rewards = {"a": 0.5, "b": None, "idle": 0.0, "x": 1.0}
    run = write_run(
        tmp_path, *calls, *(make_session(name, reward=reward) for name, reward in rewards.items())
    )

    def batch_of(*options):
        return load_batch(run, ["a", "b", "idle"], TraceOptions(*options))

    batch = batch_of("tree", ["agent"], 2)
    assert [(trace.trace_id, trace.completion_ids) for trace in batch.traces] == [("a/a1", [7])]
    assert batch.rewards == {
        name: GroupReward(group_id="g", reward=rewards[name], task_id="t", harness="h")
        for name in ("a", "idle")
    }
    assert batch.ledger == Ledger(
        sampled=8, trained=1, left_out={"subagent": 4, "over_length": 2, "no_reward": 1}
    )
    assert [trace.shared_tokens for trace in batch_of("tree").traces] == [0, 1]
    assert [trace.shared_tokens for trace in batch_of().traces] == [0, 0]


def row(status, reward=1.0, suspicions=None, name="s"):
    return make_session(name, status, reward=reward, suspicions=suspicions or {})


@pytest.mark.parametrize(
    ("status", "reward", "outcomes", "label"),
    [
        ("completed", 0.5, {}, Label(0.5, None)),
        ("completed", None, {}, Label(None, "no_reward")),
        ("failed", 0.5, {}, Label(0.5, None)),
        ("failed", 0.5, {"failed": "exclude"}, Label(None, "excluded")),
        ("failed", 0.5, {"failed": 0}, Label(0.0, None)),
        ("timeout", 1.0, {"timeout": -1.5}, Label(-1.5, None)),
        ("timeout", None, {"timeout": -1.5}, Label(None, "no_reward")),
        ("budget", None, {"budget": -1}, Label(None, "no_reward")),
        ("failed", None, {"failed": 0}, Label(None, "no_reward")),
        ("timeout", None, {}, Label(None, "no_reward")),
        ("budget", 1.0, {"budget": "exclude"}, Label(None, "excluded")),
        ("unjudged", 1.0, {}, Label(None, "unjudged")),
        ("unjudged", None, {"unjudged": 0.0}, Label(0.0, None)),
        ("infrastructure", 1.0, {"failed": 0}, Label(None, "infrastructure")),
        ("cancelled", 1.0, {"timeout": 0}, Label(None, "cancelled")),
        ("unknown", 1.0, {}, Label(None, "no_reward")),
    ],
)
def test_a_status_gets_its_reward_by_the_recipe(status, reward, outcomes, label):
    assert label_session(row(status, reward), RewardRules(Outcomes(**outcomes))) == label


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
    assert (
        label_session(
            row(status, 1.0, {"git_history": matches}), RewardRules(Outcomes(timeout=0), suspicious)
        )
        == label
    )


@pytest.mark.parametrize(
    ("status", "choice"),
    [
        *(("failed", choice) for choice in (True, "0", float("nan"), float("inf"), "keep")),
        ("unjudged", "judge"),  # it has no reward of a judge
        ("infrastructure", 0),
        ("completed", 1),
    ],
)
def test_what_is_no_choice_is_refused(status, choice):
    with pytest.raises(ValidationError):
        Outcomes(**{status: choice})


NUMBERS = st.floats(-2, 2)
CHOICES = st.one_of(st.sampled_from(["judge", "exclude"]), NUMBERS)
CHOSEN = {
    "failed": CHOICES,
    "timeout": CHOICES,
    "budget": CHOICES,
    "unjudged": st.just("exclude") | NUMBERS,
}
RULES = st.builds(
    RewardRules,
    st.builds(Outcomes, **CHOSEN),
    st.sampled_from(["keep", "exclude"]) | st.floats(0.1, 2),
)
SESSIONS = st.lists(
    st.tuples(
        st.sampled_from(get_args(SessionStatus)),
        st.none() | NUMBERS,
        st.sampled_from([{}, {"web_search": 1}]),
    ),
    max_size=8,
)


@given(SESSIONS, RULES)
def test_the_ledger_adds_up_and_groups_have_no_session_that_is_left_out(drawn, rules):
    sessions = [
        recorded(row(*values, name=str(i)), make_call("c", [1], [7, 8], session_id=str(i)))
        for i, values in enumerate(drawn)
    ]
    batch = make_batch(trace_session(each, TraceOptions(rewards=rules)) for each in sessions)
    assert batch.ledger.sampled == 2 * len(sessions)
    assert batch.ledger.trained == 2 * len(batch.rewards) == 2 * len(batch.traces)
    assert batch.rewards.keys().isdisjoint(batch.unrewarded)
    assert batch.rewards.keys() | batch.unrewarded.keys() == {each.session_id for each in sessions}
    for each in sessions:
        if each.session.status in ("infrastructure", "cancelled"):
            assert batch.unrewarded[each.session_id].reason == each.session.status
        if rules.suspicious == "exclude" and each.session.suspicions:
            assert each.session_id not in batch.rewards
    reasons = Counter(label.reason for label in batch.unrewarded.values())
    assert batch.ledger.left_out == {reason: 2 * count for reason, count in reasons.items()}
    assert set(reasons) <= set(get_args(LeftOut))


def test_advantages_are_relative_to_the_sessions_that_are_left_in_the_group():
    rows = [
        ("a", "completed", 1.0, {}),
        ("b", "completed", 0.0, {}),
        ("c", "completed", 5.0, {"git_history": 1}),
    ]
    rows += [
        ("d", "timeout", 9.0, {}),
        ("e", "infrastructure", 9.0, {}),
        ("f", "cancelled", 9.0, {}),
    ]
    rules = RewardRules(Outcomes(timeout="exclude"), "exclude")
    batch = make_batch(traced(row(*values, name=name), rewards=rules) for name, *values in rows)
    assert session_advantages(batch.rewards, "none") == {"a": 0.5, "b": -0.5}
