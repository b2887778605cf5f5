import json
from datetime import timedelta

import pytest
from click.testing import CliRunner

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Event
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.runs.views.inspect import view_session
from rolltap.trainer.runs.views.outcomes import (
    MixedGroup,
    OutcomeRow,
    PartRow,
    TaskRow,
    VersionRewards,
    mixed_groups,
    outcome_rows,
    part_rows,
    reward_steps,
    task_rows,
)
from rolltap.trainer.runs.views.report import summarize
from tests.factories import START, make_session
from tests.trainer.runs.recorded_runs import shell

EVIDENCE = {
    "judge": "pytest",
    "tests": {"t.py::a": "passed", "t.py::b": "failed", "t.py::c": "passed"},
    "diff_sha256": "ab" * 32,
    "changed": ["src/[bold].py"],
    "refused": ["pipe: fifo"],
    "forged_report": "a test passed that must fail",
}


def session(name, status="completed", reward=1.0, **fields):
    return make_session(name, status, **{"reward": reward, "task_id": "", "harness": "", **fields})


@pytest.fixture
def growing(tmp_path):
    """Write a run that is open: `judged` has two rows, `late` one, `running` none yet."""
    write_metadata(tmp_path, {})
    writer = RunWriter(tmp_path)
    judged = {"harness": "codex", "runtime": "sandbox", "evidence": EVIDENCE}
    judged["suspicions"] = {"odd_files": 1, "forged_report": 1}
    judged |= {"queued_seconds": 1.0, "running_seconds": 61.25}
    writer.add_session(session("judged", reward=0.0, harness_version="1.0", **judged))
    parts = {"speed": 0.5}
    writer.add_session(
        session("judged", reward=0.5, revision=1, parts=parts, harness_version="1.0", **judged)
    )
    late = {"harness": "codex", "runtime": "sandbox", "harness_version": "1.1"}
    writer.add_session(session("late", "timeout", 0.25, **late))
    writer.add_call(shell("running", 1, "ls"))
    writer.add_call(shell("running", 2, "git log --all && git fsck"))
    early, after = START, START + timedelta(seconds=9)
    writer.add_event(
        Event(kind="refused", session_id="running", host="telemetry.example", at=early)
    )
    writer.add_event(Event(kind="refused", session_id="running", host="github.com", at=after))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "judged.diff").write_text("--- a\n")
    yield tmp_path
    writer.close()


def printed(*arguments):
    result = CliRunner().invoke(rolltap, ["inspect", *map(str, arguments)], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_has_its_outcomes_parts_suspicions_and_provenance(growing):
    summary = summarize(growing)
    assert summary.outcomes == [
        OutcomeRow("completed", 1, 1, 0.5),
        OutcomeRow("timeout", 1, 1, 0.25),
    ]
    assert summary.parts == [PartRow("speed", 1, 0.5)]
    counts = {row.rule: (row.sessions, row.matches) for row in summary.suspicions}
    assert counts == {
        "refused_hosts": (1, 1),
        "git_history": (1, 2),
        "odd_files": (1, 1),
        "forged_report": (1, 1),
    }
    provenance = [(row.harness_version, row.runtime, row.sessions) for row in summary.provenance]
    assert provenance == [("1.0", "sandbox", 1), ("1.1", "sandbox", 1)]
    text = printed(growing)
    for shown in (
        "1 groups mix programs, tasks or places",
        "g: harness_version 1.0 and 1.1",
        "git_history",
    ):
        assert shown in text
    values = json.loads(printed(growing, "--json"))
    assert [row["status"] for row in values["outcomes"]] == ["completed", "timeout"]
    assert values["mixed"] == [{"group_id": "g", "values": {"harness_version": ["1.0", "1.1"]}}]


def test_a_session_that_runs_has_the_suspicions_of_its_calls_so_far(growing):
    assert view_session(growing, "running").suspicions == {"refused_hosts": 1, "git_history": 2}
    text = printed(growing, "running")
    assert "git_history" in text
    assert "GitPython" in text  # the rule says what it cannot see


def test_a_session_shows_its_evidence_and_all_its_rows(growing):
    text = printed(growing, "judged")
    expected = [
        "reward 0.5",
        "1 failed, 2 passed",
        "t.py::b: failed",
        "src/[bold].py",
        "pipe: fifo",
        "ab" * 32,
    ]
    expected += [
        "queued 1.0 s, running 61.2 s",
        "logs/judged.diff",
        "rows of the session: the last counts",
        "a test passed that must fail",
    ]
    assert [shown for shown in expected if shown not in text] == []
    values = json.loads(printed(growing, "judged", "--json"))
    assert [row["reward"] for row in values["revisions"]] == [0.0, 0.5]
    assert values["session"]["evidence"] == EVIDENCE
    assert values["session"]["parts"] == {"speed": 0.5}
    assert values["session"]["running_seconds"] == 61.25
    assert values["suspicions"] == {"odd_files": 1, "forged_report": 1}
    assert str(growing) not in json.dumps(values)


def test_a_session_without_facts_has_no_empty_tables(growing):
    text = printed(growing, "late")
    assert [
        title for title in ("evidence", "suspicions", "rows of the session") if title in text
    ] == []


def test_the_mean_of_an_outcome_is_over_its_rewards_and_infrastructure_has_none():
    sessions = [
        session("a", "failed", None),
        session("b", "failed", 0.5),
        session("c", "infrastructure", 1.0),
    ]
    assert outcome_rows(sessions) == [
        OutcomeRow("failed", 2, 1, 0.5),
        OutcomeRow("infrastructure", 1, 0, None),
    ]
    assert part_rows(sessions) == []


def test_means_of_tasks_and_parts_are_over_the_sessions_with_a_reward():
    parts = {"parts": {"speed": 1.0}}
    sessions = [
        session("a", task_id="b", **parts),
        session("b", "failed", 0.0, task_id="b"),
        session("c"),
    ]
    sessions += [
        session(status, status, 1.0, task_id="a", **parts) for status in ("unjudged", "cancelled")
    ]
    assert task_rows(sessions) == [TaskRow("a", 2, 0, None), TaskRow("b", 2, 2, 0.5)]
    assert part_rows(sessions) == [PartRow("speed", 1, 1.0)]


def test_a_group_mixes_what_is_known_to_differ_among_its_rewarded_sessions():
    def made(name, version, runtime="sandbox", **fields):
        return session(name, harness="codex", harness_version=version, runtime=runtime, **fields)

    assert mixed_groups([made("a", "1"), made("b", ""), made("c", "1")]) == []
    assert mixed_groups([made("a", "1"), made("b", "2", status="infrastructure")]) == []
    assert mixed_groups([made("a", "1"), made("b", "2", group_id="other")]) == []
    found = mixed_groups([made("a", "1"), made("b", "2", runtime="process")])
    assert found == [
        MixedGroup("g", {"harness_version": ["1", "2"], "runtime": ["process", "sandbox"]})
    ]


def started(number, version, reward, status="completed", **fields):
    begin = START + timedelta(seconds=number)
    return make_session(
        f"s{number}", status, reward=reward, policy_version=version, started_at=begin, **fields
    )


@pytest.mark.parametrize(
    ("sessions", "steps"),
    [
        (  # in the order in which the versions were used
            [
                started(3, "10", 1.0),
                started(1, "9", 0.0),
                started(2, "9", 0.5),
                started(4, None, None),
            ],
            [("9", 2, 0.25, 0.5), ("10", 1, 1.0, 1.0), ("default", 1, None, None)],
        ),
        (  # the attempts at a step have the same weights
            [
                started(1, "1a2b3c4d.9.0", 0.0),
                started(2, "1a2b3c4d.9.1", 1.0),
                started(3, "1a2b3c4d.10.1", 1.0),
            ],
            [("1a2b3c4d.9", 2, 0.5, 1.0), ("1a2b3c4d.10", 1, 1.0, 1.0)],
        ),
        (  # a fault has no reward, whoever recorded one
            [started(1, "9", 1.0, "infrastructure"), started(2, "9", 0.5)],
            [("9", 2, 0.5, 0.5)],
        ),
    ],
)
def test_rewards_are_counted_by_the_weights_of_a_step(sessions, steps):
    assert reward_steps(sessions) == [VersionRewards(*step) for step in steps]
