"""Traces with the scores of a run, and runs with scores that are copied."""

from dataclasses import replace

import pytest

from rolltap import merge_runs, open_run
from rolltap.errors import InputError
from rolltap.trainer.traces.tables import Score
from tests.factories import add_rows, make_call, make_session, write_run
from tests.trainer.traces.changed import change_rows

ROOT = make_call(1, [11, 12, 13], [14, 15])
LEFT = make_call(2, [16], [17, 18], after=ROOT)
RIGHT = make_call(3, [26, 27], [28], after=ROOT)
CALLS = [ROOT, LEFT, RIGHT]


def row(call, **fields):
    """Return a row of scores. A score is the id of its token, negative."""
    defaults = {
        "session_id": call.session_id,
        "call_id": call.call_id,
        "name": "big",
        "scorer": "/big (1)",
        "logprobs": [-float(token) for token in call.completion_ids],
    }
    return Score(**defaults | fields)


@pytest.fixture
def run(tmp_path):
    return open_run(write_run(tmp_path / "run", *CALLS, make_session(), *map(row, CALLS)))


def missing(run):
    return run.traces(scores="big").batch().ledger.left_out


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"strategy": "prefix_merging"}, 2),
        ({"strategy": "per_request"}, 3),
        ({"max_tokens": 7}, 1),
    ],
)
def test_each_trace_has_the_scores_of_the_tokens_that_it_trains(run, options, number):
    traces = list(run.traces(scores="big", **options))
    assert len(traces) == number
    for trace in traces:
        pairs = zip(trace.completion_ids, trace.completion_mask, strict=True)
        assert trace.scores == [-float(token) if mask else 0.0 for token, mask in pairs]
    assert all(trace.scores is None for trace in run.traces())


@pytest.mark.parametrize(
    ("rows", "left_out"),
    [
        ([row(ROOT), row(RIGHT)], 2),
        ([row(ROOT), row(RIGHT), row(LEFT, logprobs=[-1.0])], 2),
        ([row(ROOT), row(RIGHT), row(LEFT, name="other")], 2),
        ([row(ROOT)], 3),
    ],
    ids=["no row", "too few", "another name", "two calls"],
)
def test_calls_without_scores_are_left_out_for_that_reason_and_the_sums_are_exact(
    tmp_path, rows, left_out
):
    run = open_run(write_run(tmp_path, *CALLS, make_session(), *rows))
    batch = run.traces(scores="big").batch()
    assert batch.ledger.left_out == {"missing_scores": left_out}
    assert batch.ledger.trained == 5 - left_out
    assert sum(sum(trace.completion_mask) for trace in batch.traces) == 5 - left_out


def test_of_several_rows_of_a_call_the_last_counts(run):
    add_rows(run.path, row(LEFT, logprobs=[-0.5, -0.25]))
    assert open_run(run.path).scores("big", "s")["2"].logprobs == [-0.5, -0.25]


def test_a_row_that_was_changed_is_not_used(tmp_path):
    path = write_run(tmp_path, ROOT, make_session(), row(ROOT))
    change_rows(path, "scores", lambda row: True, logprobs=[-1.0, -1.0])
    run = open_run(path)
    assert missing(run) == {"missing_scores": 2}
    assert run.verify(progress=False).verdict == "damaged"


def test_split_and_merge_keep_all_scores_and_a_filter_those_of_its_calls(tmp_path):
    calls = [ROOT, LEFT, replace(RIGHT, role="auxiliary")]
    run = open_run(write_run(tmp_path / "run", *calls, make_session(), *map(row, calls)))
    filtered = run.filter(tmp_path / "filtered", roles=["agent"], progress=False)
    parts = run.split(tmp_path / "parts", by="harness", progress=False)
    merged, _ = merge_runs([run.path], tmp_path / "merged", progress=False)
    for copied, rows in ((filtered, 2), (parts["h"], 3), (merged, 3)):
        assert "missing_scores" not in missing(copied)
        assert copied.verify(progress=False).rows["scores"] == rows


def test_a_name_that_the_run_does_not_have_is_refused_with_those_that_it_has(run):
    names = r"has no scores 'small', but big: `rolltap score .*run --as small` makes them"
    with pytest.raises(InputError, match=names):
        list(run.traces(scores="small"))


def test_a_name_of_two_scorers_as_in_a_merged_run_is_refused(run, tmp_path):
    other = make_call(1, session_id="t")
    second = write_run(tmp_path / "second", other, make_session("t"), row(other, scorer="/big (2)"))
    both, _ = merge_runs([run.path, second], tmp_path / "both", progress=False)
    scorers = r"'big' of .* are those of /big \(1\) and /big \(2\): score it as another"
    with pytest.raises(InputError, match=scorers):
        missing(both)
