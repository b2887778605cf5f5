"""From outcomes to rewards, by the rules of a recipe."""

import json
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolltap.addons.store.records import Call, Session, SessionStatus, VersionSpan
from rolltap.trainer.traces.ledger import LeftOut
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.sessions import (
    Label,
    Outcomes,
    RewardRules,
    TraceOptions,
    label_session,
    make_batch,
    trace_session,
)
from rolltap.trainer.training.grpo.advantages import session_advantages


def session(status, reward=1.0, suspicions=None, name="s"):
    return Session(session_id=name, group_id="g", status=status, reward=reward, suspicions=json.dumps(suspicions or {}))


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
    assert label_session(session(status, reward), RewardRules(Outcomes(**outcomes))) == label


def test_suspicious_sessions_are_kept_excluded_or_lose_a_number():
    cheated, honest = session("completed", 1.0, {"git_history": 2}), session("completed", 1.0, {"git_history": 0})
    for suspicious, label in [
        ("keep", Label(1.0, None)),
        ("exclude", Label(None, "suspicious")),
        (2, Label(-1.0, None)),
    ]:
        assert label_session(cheated, RewardRules(suspicious=suspicious)) == label
        assert label_session(honest, RewardRules(suspicious=suspicious)) == Label(1.0, None)


def test_a_penalty_is_subtracted_from_the_reward_of_an_outcome_too():
    rules = RewardRules(Outcomes(timeout=0), 0.5)
    assert label_session(session("timeout", 1.0, {"web_search": 1}), rules) == Label(-0.5, None)


@pytest.mark.parametrize(
    "keys",
    [
        {"failed": True},
        {"failed": "0"},
        {"failed": float("nan")},
        {"failed": float("inf")},
        {"failed": "keep"},
        {"unjudged": "judge"},  # it has no reward of a judge
        {"infrastructure": 0},
        {"completed": 1},
    ],
)
def test_what_is_no_choice_is_refused(keys):
    with pytest.raises(ValidationError):
        Outcomes(**keys)


NUMBERS = st.floats(-2, 2)
CHOICES = st.one_of(st.sampled_from(["judge", "exclude"]), NUMBERS)
RULES = st.builds(
    RewardRules,
    st.builds(
        Outcomes, failed=CHOICES, timeout=CHOICES, budget=CHOICES, unjudged=st.one_of(st.just("exclude"), NUMBERS)
    ),
    st.one_of(st.sampled_from(["keep", "exclude"]), st.floats(0.1, 2)),
)
SESSIONS = st.lists(
    st.tuples(st.sampled_from(get_args(SessionStatus)), st.none() | NUMBERS, st.sampled_from([{}, {"web_search": 1}])),
    max_size=8,
)


@given(SESSIONS, RULES)
def test_the_ledger_adds_up_and_groups_have_no_session_that_is_left_out(drawn, rules):
    def recorded(name, row):
        call = Call(
            session_id=name,
            call_id="c",
            prompt_ids=[1],
            completion_ids=[7, 8],
            logprobs=[-0.5, -0.25],
            weight_versions=[VersionSpan(version="0", start=0, end=2)],
        )
        return RecordedSession(session_id=name, session=session(*row, name=name), calls=[call])

    sessions = [recorded(str(i), row) for i, row in enumerate(drawn)]
    batch = make_batch(trace_session(each, TraceOptions(rewards=rules)) for each in sessions)
    assert batch.ledger.sampled == 2 * len(sessions)
    assert batch.ledger.trained == 2 * len(batch.rewards) == 2 * len(batch.traces)
    assert batch.rewards.keys().isdisjoint(batch.unrewarded)
    assert batch.rewards.keys() | batch.unrewarded.keys() == {each.session_id for each in sessions}
    for each in sessions:
        if each.session.status in ("infrastructure", "cancelled"):
            assert batch.unrewarded[each.session_id].reason == each.session.status
        if rules.suspicious == "exclude" and json.loads(each.session.suspicions):
            assert each.session_id not in batch.rewards
    reasons = Counter(label.reason for label in batch.unrewarded.values())
    assert batch.ledger.left_out == {reason: 2 * count for reason, count in reasons.items()}
    assert set(reasons) <= set(get_args(LeftOut))


def test_advantages_are_relative_to_the_sessions_that_are_left_in_the_group():
    rows = [("a", "completed", 1.0, {}), ("b", "completed", 0.0, {}), ("c", "completed", 5.0, {"git_history": 1})]
    rows += [("d", "timeout", 9.0, {}), ("e", "infrastructure", 9.0, {}), ("f", "cancelled", 9.0, {})]
    rules = RewardRules(Outcomes(timeout="exclude"), "exclude")
    batch = make_batch(
        trace_session(
            RecordedSession(session_id=name, session=session(*row, name=name), calls=[]), TraceOptions(rewards=rules)
        )
        for name, *row in rows
    )
    assert session_advantages(batch.rewards, "none") == {"a": 0.5, "b": -0.5}
