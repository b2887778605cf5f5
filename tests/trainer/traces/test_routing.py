"""The experts of traces, joined from what each call added."""

import numpy as np
import pytest

from rolltap import open_run
from rolltap.addons.store.routing import Routing, first_routed
from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.routing import Experts
from tests.factories import make_call, make_session, write_run
from tests.trainer.traces.changed import change_rows

ROOT = make_call(1, [11, 12, 13], [14, 15])
LEFT = make_call(2, [16], [17, 18], after=ROOT)
RIGHT = make_call(3, [26, 27], [28], after=ROOT)
LAST = make_call(4, [19], [20], after=LEFT)
CALLS = [ROOT, LEFT, RIGHT, LAST]


def chosen(sequence):
    """Return the experts of the tokens of a call or a trace but the last, by their ids."""
    ids = [*sequence.prompt_ids, *sequence.completion_ids][:-1]
    return np.array([[[i, i + 1], [i + 2, 0]] for i in ids], np.int16)


def row(call, **fields):
    start = first_routed(call)
    defaults = {
        "session_id": call.session_id,
        "call_id": call.call_id,
        "first": start,
        "layers": 2,
        "top_k": 2,
        "experts": chosen(call)[start:].astype("u1").tobytes(),
    }
    return Routing(**defaults | fields)


ROWS = {call.call_id: row(call) for call in CALLS}


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"strategy": "prefix_merging"}, 2),
        ({"strategy": "per_request"}, 4),
        ({"max_tokens": 7}, 1),
    ],
)
def test_each_trace_has_the_experts_of_its_tokens_but_the_last(tmp_path, options, number):
    run = open_run(write_run(tmp_path, *CALLS, make_session(), *ROWS.values()))
    traces = list(run.traces(routing=True, **options))
    assert len(traces) == number
    for trace in traces:
        assert np.array_equal(trace.routing, chosen(trace))
        assert "routing" not in trace.to_json()
    assert all(trace.routing is None for trace in run.traces())


@pytest.mark.parametrize(
    ("changed", "left_out"),
    [
        ({"2": None}, 3),
        ({"2": row(LEFT, missing="the engine returned none", experts=b"")}, 3),
        ({"2": row(LEFT, experts=row(LEFT).experts[:-4])}, 3),
        ({"1": None}, 6),
        (dict.fromkeys("1234"), 6),
    ],
    ids=["no row", "missing", "too few", "its root", "none"],
)
def test_calls_without_experts_and_those_that_continue_them_are_left_out(
    tmp_path, changed, left_out
):
    rows = filter(None, (ROWS | changed).values())
    batch = (
        open_run(write_run(tmp_path, *CALLS, make_session(), *rows)).traces(routing=True).batch()
    )
    assert batch.ledger.left_out == {"missing_routing": left_out}
    assert batch.ledger.trained == 6 - left_out
    assert sum(sum(trace.completion_mask) for trace in batch.traces) == 6 - left_out
    for trace in batch.traces:
        assert len(trace.routing) == len(trace.prompt_ids) + len(trace.completion_ids) - 1


def test_a_row_that_was_changed_is_not_used(tmp_path):
    run = write_run(tmp_path, ROOT, make_session(), row(ROOT))
    change_rows(run, "routing", lambda row: True, experts=bytes(len(row(ROOT).experts)))
    assert open_run(run).traces(routing=True).batch().ledger.left_out == {"missing_routing": 2}
    assert open_run(run).verify(progress=False).verdict == "damaged"


def test_a_filtered_run_keeps_the_experts_of_its_calls(tmp_path):
    run = open_run(write_run(tmp_path / "run", *CALLS, make_session(), *ROWS.values()))
    kept = run.filter(tmp_path / "out", roles=["agent"], progress=False)
    assert kept.traces(routing=True).batch().ledger.left_out == {}
    assert kept.verify(progress=False).rows["routing"] == 4


def test_a_root_that_was_rendered_again_has_all_of_its_own():
    again = make_call(5, [*ROOT.prompt_ids, *ROOT.completion_ids, 30], [31], kind="rendered")
    [trace], ledger = build_traces([ROOT, again], routing={"5": Experts(0, chosen(again))})
    assert ledger.left_out == {"missing_routing": 2}
    assert np.array_equal(trace.routing, chosen(again))
