"""Verification of the rows of one session."""

from dataclasses import replace

import pytest

from rolltap.addons.store.records import Session
from rolltap.trainer.runs.verify import check_session_rows

SOUND = Session(session_id="s", status="completed", reward=1.0, parts='{"a": 0.5}', suspicions='{"rule": 2}')


def found(*rows, salvaged=False):
    return [(finding.grade, finding.what) for finding in check_session_rows("here", rows, salvaged=salvaged)]


def test_a_row_and_its_revisions_are_sound():
    assert found(SOUND) == []
    assert found(replace(SOUND, revision=1), SOUND) == []


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"reward": float("nan")}, "its reward is nan"),
        ({"status": "unjudged"}, "it has the status unjudged and the reward 1.0"),
        ({"status": "infrastructure", "reward": 0.0}, "it has the status infrastructure and the reward 0.0"),
        ({"status": "won"}, "its status is 'won'"),
        ({"parts": "[]"}, "its parts are no JSON object"),
        ({"parts": '{"a": NaN}'}, "its parts have wrong values: a"),
        ({"parts": '{"a": true, "b": 1, "c": "1"}'}, "its parts have wrong values: a, c"),
        ({"parts": "{"}, "its parts are not JSON"),
        ({"parts": None}, "its parts are not JSON"),
        ({"evidence": "1"}, "its evidence are no JSON object"),
        ({"suspicions": '{"rule": -1}'}, "its suspicions have wrong values: rule"),
        ({"suspicions": '{"rule": 0.5}'}, "its suspicions have wrong values: rule"),
    ],
)
def test_a_value_that_no_writer_writes_is_damage(fields, what):
    [(grade, text)] = found(replace(SOUND, **fields))
    assert (grade, text[: len(what)]) == ("damage", what)


def test_two_rows_of_a_revision_are_damage():
    assert found(SOUND, replace(SOUND, reward=0.0)) == [("damage", "it has 2 rows of revision 0")]


def test_a_missing_revision_is_damage_except_in_a_salvaged_run():
    row = replace(SOUND, revision=2)
    assert found(SOUND, row) == [("damage", "its rows of the revisions [1] are missing")]
    assert found(row, salvaged=True) == [("notice", "its rows of the revisions [0, 1] are missing")]
