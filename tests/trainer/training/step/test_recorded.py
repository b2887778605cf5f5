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
from tests.trainer.training.step.tiny import tiny_model


def rows_of(folder):
    """Return (step, session id) -> row."""
    with SessionIndex(folder, "trained") as index:
        return {
            (row.step, name): row
            for name in index.session_ids
            for row in trained_steps(index, name)
        }


@torch.no_grad()
def logprobs_of(model, call):
    ids = [*call.prompt_ids, *call.completion_ids]
    logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logits[i - 1, ids[i]]) for i in range(len(call.prompt_ids), len(ids))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_metadata(folder, {"model": "tiny"})
    train(folder, 2)
    return folder


def test_each_step_has_a_row_for_each_session_with_the_values_of_a_plain_forward(folder):
    rows, recorded = rows_of(folder), sessions()
    assert {step for step, _ in rows} == {1, 2}
    assert len(rows) == 2 * len(recorded)
    model = tiny_model()
    for session in recorded:
        row, calls = rows[1, session.session_id], {call.call_id: call for call in session.calls}
        assert row.version == "run.0.0"
        assert row.sampled == sum(len(call.completion_ids) for call in session.calls)
        covered = sorted(
            (s.call_id, at) for s in row.spans + row.left_out for at in range(s.start, s.end)
        )
        assert covered == sorted(
            (c.call_id, at) for c in session.calls for at in range(len(c.completion_ids))
        )
        assert row.trained == sum(span.end - span.start for span in row.spans)
        if row.differences is None:
            assert row.advantage in (None, 0.0)
            continue
        own, recorded_before = [], []
        for span in row.spans:
            call = calls[span.call_id]
            own += logprobs_of(model, call)[span.start : span.end]
            recorded_before += call.logprobs[span.start : span.end]
        np.testing.assert_allclose(
            row.differences, np.subtract(own, recorded_before), rtol=2e-3, atol=1e-5
        )
        np.testing.assert_allclose(row.weights, [min(1.5, np.exp(SHIFT))] * row.trained, rtol=1e-4)


def test_a_row_says_why_its_session_or_some_of_its_tokens_are_left_out(folder):
    rows = rows_of(folder)
    whole = {name: rows[1, name].reason for name in ("a0", "a2", "b0", "b1", "c1", "c2")}
    assert whole == {
        "a0": None,
        "a2": None,
        "b0": "no_signal",
        "b1": "no_signal",
        "c1": None,
        "c2": "infrastructure",
    }
    assert {row.ledger.left_out["auxiliary"] for row in rows.values()} == {2}
    assert any("over_length" in row.ledger.left_out for row in rows.values())
    assert rows[1, "a2"].differences is None
    assert rows[1, "a2"].trained > 0
    assert rows[1, "c2"].trained == rows[1, "b0"].trained == 0
    assert (rows[1, "a1"].reward, rows[1, "c2"].reward) == (1.0, None)
    assert rows[1, "c2"].advantage is None
    assert rows[1, "a1"].advantage == pytest.approx(1 / (1 + 2e-4), rel=1e-3)
    # the first step changed the weights
    assert not np.array_equal(rows[1, "a1"].differences, rows[2, "a1"].differences)
    numbers = {(each.step, each.session_id): each.ledger for each in read_trained(folder)}
    assert numbers == {place: row.ledger for place, row in rows.items()}


def test_the_run_has_no_damage(folder):
    found = verify_run(folder, lambda *_: None)
    assert (found.verdict, found.rows["trained"]) == ("ok", 16)


@pytest.mark.deep  # short, one process records, above, and test_distributed has two
def test_two_processes_record_what_one_does(folder, tmp_path):
    write_metadata(tmp_path, {"model": "tiny"})
    run_two("tests.trainer.training.step.recorded", str(tmp_path))
    one, two = rows_of(folder), rows_of(tmp_path)
    assert one.keys() == two.keys()
    assert {place: one[place] for place in one if place[0] == 1} == {
        p: two[p] for p in two if p[0] == 1
    }
    for place, row in one.items():
        assert (row.differences is None) == (two[place].differences is None)
        if row.differences is not None:
            np.testing.assert_allclose(
                row.differences, two[place].differences, rtol=5e-3, atol=1e-3
            )
            np.testing.assert_allclose(row.weights, two[place].weights, rtol=1e-4)


@pytest.mark.parametrize("config", [{"forward": "padded"}, {"loss_type": "dapo"}])
def test_other_ways_to_compute_have_the_same_rows(folder, tmp_path, config):
    write_metadata(tmp_path, {"model": "tiny"})
    train(tmp_path, 1, **config)
    one, other = rows_of(folder), rows_of(tmp_path)
    np.testing.assert_allclose(one[1, "a1"].differences, other[1, "a1"].differences, rtol=5e-3)
    assert one[1, "c0"].spans == other[1, "c0"].spans
    assert set(other[1, "a1"].weights) == {1.0}
