from collections import Counter
from dataclasses import replace

import pytest

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Session, VersionSpan
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.names import Version
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import SessionReader
from rolltap.trainer.traces.scores import RecordedScores
from rolltap.trainer.traces.sessions import TraceOptions, load_batch
from rolltap.trainer.training.ages import age_metrics, is_older, is_stale, other_weights, token_ages
from tests.factories import make_call

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
def run_folder(tmp_path):
    write_metadata(tmp_path, {})
    return tmp_path


def record(run, session_id, *steps):
    """Record a session whose call has two tokens of the weights of each step, in this order."""
    spans = [
        VersionSpan(version=f"{RUN}.{step}.0", start=2 * n, end=2 * n + 2)
        for n, step in enumerate(steps)
    ]
    session = Session(
        session_id=session_id, status="completed", reward=1.0, policy_version=spans[0].version
    )
    with RunWriter(run, "never") as writer:
        call = make_call(
            "c", [1], [*range(2 * len(steps))], session_id=session_id, weight_versions=spans
        )
        writer.add_call(call)
        writer.add_session(session)
    return session


def test_a_group_is_stale_when_no_token_is_left_to_train(run_folder):
    old, both, young = (
        record(run_folder, "o", 1, 2),
        record(run_folder, "b", 2, 3),
        record(run_folder, "y", 5),
    )
    assert is_stale(SessionReader(run_folder), [old], STEP)
    assert is_stale(SessionReader(run_folder), [], STEP)
    assert not is_stale(SessionReader(run_folder), [old, both], STEP), (
        "a call that went on with newer weights"
    )
    assert not is_stale(SessionReader(run_folder), [old, young], STEP)


def test_age_is_read_before_a_teacher_has_scored_the_sessions(run_folder):
    group = [record(run_folder, "o", 1), record(run_folder, "b", 2, 3)]
    scores = RecordedScores(run_folder, "teacher", some=False)
    assert not is_stale(
        SessionReader(run_folder, scores=scores), group, replace(STEP, scores="teacher")
    )


def test_rewards_do_not_decide_whether_a_group_is_stale_nor_do_sessions_without_a_token(run_folder):
    old, both = record(run_folder, "o", 1), record(run_folder, "b", 2, 3)
    both.status, both.reward, both.revision = "unjudged", None, 1
    failed = Session(session_id="f", status="infrastructure", policy_version=f"{RUN}.5.0")
    with RunWriter(run_folder, "never") as writer:
        writer.add_session(both)
        writer.add_session(failed)
    assert not is_stale(SessionReader(run_folder), [both], STEP)
    assert is_stale(SessionReader(run_folder), [old, failed], STEP)
    assert not is_stale(SessionReader(run_folder), [failed], STEP)


def test_a_group_whose_sessions_were_all_cancelled_is_stale_whatever_weights_they_would_have_had(
    run_folder,
):
    cancelled = [
        Session(session_id=name, status="cancelled", policy_version=f"{RUN}.5.0") for name in "ab"
    ]
    failed = Session(session_id="f", status="infrastructure", policy_version=f"{RUN}.5.0")
    assert is_stale(SessionReader(run_folder), cancelled, STEP)
    assert not is_stale(SessionReader(run_folder), [*cancelled, failed], STEP), (
        "its reason ends the training"
    )


def test_weights_that_are_no_older_ones_of_the_rollouts_are_counted_by_tokens(run_folder):
    record(run_folder, "a", 1, 5, 7)
    assert other_weights(SessionReader(run_folder), ["a"], STEP) == {f"{RUN}.7.0": 2}
    in_step = TraceOptions(weights=STEP.weights)
    assert other_weights(SessionReader(run_folder), ["a"], in_step) == {
        f"{RUN}.1.0": 2,
        f"{RUN}.7.0": 2,
    }


def test_the_ages_of_a_batch_are_those_of_the_tokens_that_its_traces_train(run_folder):
    record(run_folder, "a", 2, 3, 5)
    batch = load_batch(run_folder, None, STEP)
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
