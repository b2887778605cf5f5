"""The table of trained sessions: written by step, read by session, and what a killed training or
damage leaves."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from rolltap.addons.errors import LedgerError
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import RunWriter, run_files
from rolltap.trainer.runs.edit import filter_run
from rolltap.trainer.runs.merge import merge_runs
from rolltap.trainer.runs.verify import verify_run
from rolltap.trainer.traces.ledger import Ledger, TokenSpan
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.sessions import TraceOptions, make_batch, trace_session
from rolltap.trainer.traces.trained import StepAccount, read_trained, trained_steps, write_step
from tests.factories import make_call, make_session, write_run

NO_ONE = {"advance": lambda *_: None}


def recorded(name, reward=1.0):
    first = make_call("a", [1], [2, 3], session_id=name)
    second = make_call("b", [4], [5], after=first)
    side = make_call("c", [9], [7], session_id=name, role="auxiliary")
    row = make_session(name, reward=reward)
    return RecordedSession(session_id=name, session=row, calls=[first, second, side])


def account(*sessions):
    batch = make_batch(trace_session(session, TraceOptions()) for session in sessions)
    names = [session.session_id for session in sessions]
    advantages = {name: 0.5 + number for number, name in enumerate(names)}
    return StepAccount(batch, advantages, batch.traces)


def scored(*logprobs, limited=None):
    """Return the values of the first traces, in one micro-batch beside an empty one. Each trace
    trains three tokens."""
    values = np.array([logprobs, limited or [1] * len(logprobs)], np.float32)
    return [([], np.empty((2, 0), np.float32)), (range(-(-len(logprobs) // 3)), values)]


def write(folder, step, steps, attempt=0):
    with RunWriter(folder) as writer:
        write_step(writer, f"run.{{}}.{attempt}".format, step, *steps)


def rows_of(folder, name):
    with SessionIndex(folder, "trained") as index:
        return trained_steps(index, name)


def versions_of(folder):
    return [row.version for row in rows_of(folder, "s")]


@pytest.fixture
def run(tmp_path):
    """Write a run with one trained session, whose step was taken twice."""
    session = recorded("s")
    folder = write_run(tmp_path / "run", *session.calls, session.session)
    write(folder, 0, (account(session), scored(-1, -2, -3)))
    write(folder, 0, (account(session), scored(-4, -5, -6, limited=[1, 0.5, 0])), attempt=1)
    return folder


def test_values_are_of_the_trained_tokens_and_the_last_row_of_a_step_counts(run):
    [row] = rows_of(run, "s")
    labels = (row.step, row.version, row.group_id, row.reward, row.advantage)
    assert labels == (1, "run.0.1", "g", 1.0, 0.5)
    assert row.spans == (TokenSpan("a", 0, 2), TokenSpan("b", 0, 1))
    assert row.left_out == (TokenSpan("c", 0, 1, "auxiliary"),)
    # the engine said -1, -1 - 1/64 and -1
    assert row.differences.tolist() == [-3, -4 + 1 / 64, -5]
    assert row.weights.tolist() == [1, 0.5, 0]
    assert row.ledger == Ledger(sampled=4, trained=3, left_out={"auxiliary": 1})
    [numbers] = read_trained(run)
    assert numbers == replace(row, spans=())
    assert numbers.differences is None


@pytest.mark.parametrize("apart", [1e-6, 3e-4, -0.00101, 0.0123, -0.4567])
def test_a_difference_of_trainer_and_engine_is_stored_nearly_as_it_is(tmp_path, apart):
    session = recorded("s")
    for call in session.calls:
        call.logprobs = [-4.2 - i for i in range(len(call.completion_ids))]
    folder = write_run(tmp_path / "run", *session.calls, session.session)
    write(folder, 0, (account(session), scored(-4.2 + apart, -5.2 + apart, -4.2 + apart)))
    [row] = rows_of(folder, "s")
    # trainer and engine give 32 bits: at 5 nats they have 2.4e-7 each
    np.testing.assert_allclose(row.differences, apart, rtol=5e-4, atol=5e-7)


SCORED = scored(-1, -2, -3)


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        ("s", scored(-1, -2), "session s trains 3 tokens, 2 were scored"),
        ("st", SCORED, "session t trains 3 tokens, 0 were scored"),
        ("s", [([0], np.zeros((2, 4)))], "1 tokens were scored that no trace trains"),
    ],
)
def test_a_step_that_does_not_add_up_is_an_error(tmp_path, names, values, message):
    step = account(*map(recorded, names))
    with pytest.raises(LedgerError, match=message):
        write(tmp_path, 0, (step, values))
    assert run_files(tmp_path, "trained") == []


def test_a_session_without_an_account_is_an_error(tmp_path):
    step = account(recorded("s"), recorded("t"))
    del step.batch.accounts["t"]
    step = StepAccount(step.batch, step.advantages, step.computed[:1])
    with pytest.raises(LedgerError, match="the sessions of step 1 have the tokens 4"):
        write(tmp_path, 0, (step, SCORED))
    assert run_files(tmp_path, "trained") == []


def test_a_folder_that_is_no_run_can_be_read(tmp_path):
    for step in (0, 1):
        write(tmp_path, step, (account(recorded("s", reward=None)), []))
    first, second = read_trained(tmp_path)
    assert first.reason == "no_reward"
    assert first.advantage == 0.5
    assert second == replace(first, step=2, version="run.1.0")
    assert read_trained(tmp_path / "nothing") == []


def test_a_changed_row_is_damage_and_is_not_read(run):
    [_, second] = run_files(run, "trained")
    text = second.read_bytes()
    place = text.index(np.array([-3, -4 + 1 / 64, -5], np.float16).tobytes())
    second.write_bytes(text[:place] + np.float16(-2).tobytes() + text[place + 2 :])
    found = verify_run(run, **NO_ONE)
    assert found.verdict == "damaged"
    [finding] = found.findings
    assert "its digest does not match" in finding.what
    assert versions_of(run) == ["run.0.0"]
    second.write_bytes(text[:-200])
    assert versions_of(run) == ["run.0.0"]


def test_a_file_with_the_columns_of_before_is_skipped_with_a_warning(run, caplog):
    with SegmentReader(run_files(run, "trained")[1]) as reader:
        [(_, batch)] = list(reader)
    columns = list(batch.schema.names)
    columns[columns.index("differences")] = "logprobs"
    before = batch.rename_columns(columns)
    with pa.ipc.new_stream(run / "trained-0.arrow", before.schema) as writer:
        writer.write_batch(before)
    assert versions_of(run) == ["run.0.1"]
    assert (
        "it does not have the columns of its table: another version of rolltap wrote it"
        in caplog.text
    )


def test_a_merged_run_and_a_filtered_one_keep_what_was_trained_of_whole_sessions(run, tmp_path):
    merge_runs([run], tmp_path / "merged", **NO_ONE)
    filter_run(run, tmp_path / "all", {}, **NO_ONE)
    filter_run(run, tmp_path / "agents", {"roles": ["agent"]}, **NO_ONE)
    assert versions_of(tmp_path / "merged") == ["run.0.1"]
    assert versions_of(tmp_path / "all") == ["run.0.1"]
    assert versions_of(tmp_path / "agents") == []
    assert verify_run(tmp_path / "merged", **NO_ONE).verdict == "ok"
