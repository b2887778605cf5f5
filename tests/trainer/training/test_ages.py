from collections import Counter
from dataclasses import replace

import pytest

from rolltap.addons.store.records import VersionSpan
from rolltap.trainer.names import Version
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import SessionReader
from rolltap.trainer.traces.scores import RecordedScores
from rolltap.trainer.traces.sessions import TraceOptions, load_batch
from rolltap.trainer.training.ages import age_metrics, is_older, is_stale, other_weights, token_ages
from tests.factories import add_rows, make_call, make_session, write_run

RUN = "1a2b3c4d"
STEP = TraceOptions(weights=Version(RUN, 5, 1), max_staleness=2)


@pytest.mark.parametrize(
    ("version", "older"),
    [
        (f"{RUN}.5.1", False),
        (f"{RUN}.3.0", False),
        (f"{RUN}.2.1", True),
        (f"{RUN}.6.0", False),
        ("deadbeef.0.0", False),
        ("default", False),
        (None, False),
    ],
)
def test_only_weights_of_the_same_training_can_be_too_old(version, older):
    assert is_older(version, STEP) is older


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path)


def record(run, session_id, *steps):
    """Record a session whose call has two tokens of the weights of each step, in this order."""
    spans = []
    for number, step in enumerate(steps):
        version = f"{RUN}.{step}.0"
        spans.append(VersionSpan(version=version, start=2 * number, end=2 * number + 2))
    ids = list(range(2 * len(steps)))
    call = make_call("c", [1], ids, session_id=session_id, weight_versions=spans)
    session = make_session(session_id, policy_version=spans[0].version)
    add_rows(run, call, session)
    return session


def without_calls(session_id, status):
    return make_session(session_id, status, policy_version=f"{RUN}.5.0")


def stale(run, *group):
    return is_stale(SessionReader(run), group, STEP)


def test_a_group_is_stale_when_no_token_is_left_to_train(run):
    old = record(run, "o", 1, 2)
    both = record(run, "b", 2, 3)
    young = record(run, "y", 5)
    assert stale(run, old)
    assert stale(run)
    assert not stale(run, old, both), "a call that went on with newer weights"
    assert not stale(run, old, young)


def test_age_is_read_before_a_teacher_has_scored_the_sessions(run):
    group = [record(run, "o", 1), record(run, "b", 2, 3)]
    reader = SessionReader(run, scores=RecordedScores(run, "teacher", some=False))
    assert not is_stale(reader, group, replace(STEP, scores="teacher"))


def test_rewards_do_not_decide_whether_a_group_is_stale_nor_do_sessions_without_a_token(run):
    old = record(run, "o", 1)
    both = replace(record(run, "b", 2, 3), status="unjudged", reward=None, revision=1)
    failed = without_calls("f", "infrastructure")
    add_rows(run, both, failed)
    assert not stale(run, both)
    assert stale(run, old, failed)
    assert not stale(run, failed)


def test_a_group_whose_sessions_were_all_cancelled_is_stale_whatever_weights_they_would_have_had(
    run,
):
    cancelled = [without_calls(name, "cancelled") for name in "ab"]
    assert stale(run, *cancelled)
    failed = without_calls("f", "infrastructure")
    assert not stale(run, *cancelled, failed), "its reason ends the training"


def test_weights_that_are_no_older_ones_of_the_rollouts_are_counted_by_tokens(run):
    record(run, "a", 1, 5, 7)
    reader = SessionReader(run)
    assert other_weights(reader, ["a"], STEP) == {f"{RUN}.7.0": 2}
    in_step = TraceOptions(weights=STEP.weights)
    assert other_weights(reader, ["a"], in_step) == {f"{RUN}.1.0": 2, f"{RUN}.7.0": 2}


def test_the_ages_of_a_batch_are_those_of_the_tokens_that_its_traces_train(run):
    record(run, "a", 2, 3, 5)
    batch = load_batch(run, None, STEP)
    assert token_ages(batch, STEP.weights) == {2: 2, 0: 2}
    assert batch.ledger.left_out == {"stale": 2}


def test_metrics_of_ages_are_in_steps_of_several_iterations():
    batch = TraceBatch(ledger=Ledger(sampled=10, trained=8, left_out={"stale": 2}))
    assert age_metrics(batch, Counter({0: 4, 3: 4}), iterations=3, max_staleness=2) == {
        "age/mean": 0.5,
        "age/max": 1.0,
        "age/share/0": 0.5,
        "age/share/1": 0.5,
        "age/share/2": 0.0,
        "stale_share": 0.2,
    }
