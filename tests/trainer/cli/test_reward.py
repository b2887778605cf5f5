"""`rolltap reward`, and what readers of the run make of it."""

import json
import re

import pytest
from click.testing import CliRunner

import rolltap
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.errors import InputError
from rolltap.trainer.cli.main import rolltap as command
from tests.trainer.outgoing import METADATA, make_call


@pytest.fixture
def run(tmp_path):
    """Return a run of two sessions as `rolltap env` and mitmdump leave them: with calls, without rows."""
    write_metadata(tmp_path / "run", METADATA)
    with RunWriter(tmp_path / "run", "never") as writer:
        for session_id in ("a", "b"):
            writer.add_call(make_call(session_id, 1, [1, 2], [3, 4]))
    return rolltap.open_run(tmp_path / "run")


def reward(run, *arguments):
    return CliRunner().invoke(command, ["reward", str(run.path), *arguments])


def test_sessions_that_rollout_did_not_start_can_be_trained_on(run):
    assert run.traces().batch().traces == []
    assert reward(run, "a", "1", "--task", "sort", "--part", "speed=0.5").exit_code == 0
    ended = reward(run, "b", "-0.5", "--task", "sort")
    assert ended.output == "b: -0.5 (task sort, group sort, revision 0)\n"
    batch = run.traces().batch()
    assert {(trace.session_id, trace.group_id, trace.reward) for trace in batch.traces} == {
        ("a", "sort", 1.0),
        ("b", "sort", -0.5),
    }
    assert batch.ledger.trained == 4
    assert run.verify(progress=False).verdict == "ok"


def test_the_newest_reward_counts_wherever_the_run_is_read(run, tmp_path):
    run.reward("a", 0.0, task="sort")
    refused = reward(run, "a", "1")
    assert refused.exit_code != 0
    assert "has the reward 0 already: replace it on purpose, with --change" in str(refused.exception)
    assert reward(run, "a", "1", "--change").exit_code == 0
    run.reward("b", 0.25, parts={"speed": 0.5})
    filtered = run.filter(tmp_path / "filtered", min_reward=1.0, progress=False)
    merged, _ = rolltap.merge_runs([run.path], tmp_path / "merged", progress=False)
    parts = run.split(tmp_path / "parts", parts=2, progress=False).values()
    for copy in (run, filtered, merged, *parts):
        assert {session.session_id: session.reward for session in copy.sessions()}.get("a", 1.0) == 1.0
        assert copy.verify(progress=False).verdict == "ok"
    assert [session.session_id for session in filtered.sessions()] == ["a"]


def test_the_order_of_the_files_does_not_decide(run):
    run.reward("a", 0.0)
    run.reward("a", 1.0, change=True)
    with RunWriter(run.path, "never") as writer:  # committed later
        writer.add_session(Session(session_id="b", status="failed", revision=1, reward=0.75))
        writer.add_session(Session(session_id="b", status="failed", revision=0))
    assert {session.session_id: session.reward for session in run.sessions()} == {"a": 1.0, "b": 0.75}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_a_reward_that_is_not_finite_is_refused(run, value):
    assert reward(run, "a", value).exit_code != 0
    assert run.sessions()[0].status == "unknown"


@pytest.mark.parametrize("part", ["speed", "=1", "speed=fast", "speed=nan"])
def test_a_part_that_is_no_finite_number_is_refused(run, part):
    assert reward(run, "a", "1", "--part", part).exit_code != 0
    assert run.sessions()[0].status == "unknown"


def test_a_unique_prefix_of_an_id_is_accepted_and_the_row_is_json_when_asked(run):
    with RunWriter(run.path, "never") as writer:
        for session_id in ("long-1", "long-2"):
            writer.add_call(make_call(session_id, 1, [1, 2], [3, 4]))
    refused = reward(run, "long", "1")
    assert re.search(r"2 sessions of .* begin with 'long'", str(refused.exception))
    with RunWriter(run.path, "never") as writer:
        writer.add_call(make_call("other", 1, [1, 2], [3, 4]))
    given = json.loads(reward(run, "oth", "0.5", "--part", "speed=1", "--json").output)
    assert (given["session_id"], given["reward"], given["parts"]) == ("other", 0.5, {"speed": 1.0})


def test_an_unknown_session_is_refused(run):
    with pytest.raises(InputError, match="has no session 'c'"):
        run.reward("c", 1.0)
