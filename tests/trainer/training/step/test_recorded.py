"""Rows of the optimizer steps, against values that a plain forward pass computes."""

import numpy as np
import pytest
import torch

from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.metadata import write_metadata
from rolltap.trainer.runs.verify import verify_run
from rolltap.trainer.traces.trained import read_trained, trained_steps
from tests.trainer.training.step.gloo import run_two
from tests.trainer.training.step.recorded import SHIFT, sessions, train


def rows_of(folder):
    """Return (step, session id) -> row."""
    rows = {}
    with SessionIndex(folder, "trained") as index:
        for name in index.session_ids:
            for row in trained_steps(index, name):
                rows[row.step, name] = row
    return rows


@torch.no_grad()
def logprobs_of(model, call):
    ids = torch.tensor([call.prompt_ids + call.completion_ids])
    every = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    own = every.gather(1, ids[0, 1:, None])[:, 0]
    return own[len(call.prompt_ids) - 1 :].tolist()


def run(folder, accumulation, **config):
    write_metadata(folder, {"model": "tiny"})
    train(folder, accumulation, **config)
    return rows_of(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def rows(folder):
    return run(folder, 2)


def test_each_step_has_a_row_for_each_session_with_the_values_of_a_plain_forward(rows, model):
    recorded = sessions()
    names = [session.session_id for session in recorded]
    assert sorted(rows) == [(step, name) for step in (1, 2) for name in names]
    for session in recorded:
        row = rows[1, session.session_id]
        tokens = []
        for call in session.calls:
            tokens += [(call.call_id, at) for at in range(len(call.completion_ids))]
        covered = []
        for span in row.spans + row.left_out:
            covered += [(span.call_id, at) for at in range(span.start, span.end)]
        assert sorted(covered) == sorted(tokens)
        assert row.version == "run.0.0"
        assert row.sampled == len(tokens)
        assert row.trained == sum(span.end - span.start for span in row.spans)
        if row.differences is None:
            assert not row.advantage
            continue
        calls = {call.call_id: call for call in session.calls}
        wanted = []
        for span in row.spans:
            call = calls[span.call_id]
            apart = np.subtract(logprobs_of(model, call), call.logprobs)
            wanted += apart[span.start : span.end].tolist()
        np.testing.assert_allclose(row.differences, wanted, rtol=2e-3, atol=1e-5)
        np.testing.assert_allclose(row.weights, [min(1.5, np.exp(SHIFT))] * row.trained, rtol=1e-4)


def test_a_row_says_why_its_session_or_some_of_its_tokens_are_left_out(rows, folder):
    reasons = {name: row.reason for (step, name), row in rows.items() if step == 1 and row.reason}
    assert reasons == {"b0": "no_signal", "b1": "no_signal", "c2": "infrastructure"}
    assert {row.ledger.left_out["auxiliary"] for row in rows.values()} == {2}
    assert any("over_length" in row.ledger.left_out for row in rows.values())
    assert rows[1, "a2"].differences is None
    assert rows[1, "a2"].trained > 0
    assert rows[1, "c2"].trained == rows[1, "b0"].trained == 0
    assert rows[1, "a1"].reward == 1.0
    assert rows[1, "a1"].advantage == pytest.approx(1 / (1 + 2e-4), rel=1e-3)
    assert rows[1, "c2"].reward is None
    assert rows[1, "c2"].advantage is None
    # the first step changed the weights
    assert not np.array_equal(rows[1, "a1"].differences, rows[2, "a1"].differences)
    numbers = {(each.step, each.session_id): each.ledger for each in read_trained(folder)}
    assert numbers == {place: row.ledger for place, row in rows.items()}


def test_the_run_has_no_damage(rows, folder):
    found = verify_run(folder, lambda *_: None)
    assert found.verdict == "ok"
    assert found.rows["trained"] == 16


@pytest.mark.deep  # short, one process records, above, and test_distributed has two
def test_two_processes_record_what_one_does(rows, tmp_path):
    write_metadata(tmp_path, {"model": "tiny"})
    run_two("tests.trainer.training.step.recorded", str(tmp_path))
    two = rows_of(tmp_path)
    assert rows.keys() == two.keys()
    for place, row in rows.items():
        other = two[place]
        if place[0] == 1:
            assert other == row
        assert (row.differences is None) == (other.differences is None)
        if row.differences is not None:
            np.testing.assert_allclose(row.differences, other.differences, rtol=5e-3, atol=1e-3)
            np.testing.assert_allclose(row.weights, other.weights, rtol=1e-4)


@pytest.mark.parametrize("config", [{"forward": "padded"}, {"loss_type": "dapo"}])
def test_other_ways_to_compute_have_the_same_rows(rows, tmp_path, config):
    other = run(tmp_path, 1, **config)
    wanted = rows[1, "a1"].differences
    np.testing.assert_allclose(wanted, other[1, "a1"].differences, rtol=5e-3)
    assert rows[1, "c0"].spans == other[1, "c0"].spans
    assert set(other[1, "a1"].weights) == {1.0}
