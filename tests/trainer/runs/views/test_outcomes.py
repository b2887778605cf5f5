import json
from datetime import timedelta

import pytest

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Event
from rolltap.addons.store.tables import RunWriter
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
from tests.trainer.runs.views.shown import printed

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
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "judged.diff").write_text("--- a\n")
    program = {"harness": "codex", "runtime": "sandbox"}
    judged = {
        **program,
        "harness_version": "1.0",
        "evidence": EVIDENCE,
        "suspicions": {"odd_files": 1, "forged_report": 1},
        "queued_seconds": 1.0,
        "running_seconds": 61.25,
    }
    with RunWriter(tmp_path) as writer:
        writer.add_session(session("judged", reward=0.0, **judged))
        judged["parts"] = {"speed": 0.5}
        writer.add_session(session("judged", reward=0.5, revision=1, **judged))
        writer.add_session(session("late", "timeout", 0.25, harness_version="1.1", **program))
        writer.add_call(shell("running", 1, "ls"))
        writer.add_call(shell("running", 2, "git log --all && git fsck"))
        for host, seconds in (("telemetry.example", 0), ("github.com", 9)):
            at = START + timedelta(seconds=seconds)
            writer.add_event(Event(kind="refused", session_id="running", host=host, at=at))
        yield tmp_path


def test_a_run_has_its_outcomes_parts_suspicions_and_provenance(growing):
    summary = summarize(growing)
    assert summary.outcomes == [
        OutcomeRow("completed", 1, 1, 0.5),
        OutcomeRow("timeout", 1, 1, 0.25),
    ]
    assert summary.parts == [PartRow("speed", 1, 0.5)]
    matches = {row.rule: row.matches for row in summary.suspicions}
    assert matches == {"refused_hosts": 1, "git_history": 2, "odd_files": 1, "forged_report": 1}
    assert {row.sessions for row in summary.suspicions} == {1}
    provenance = [(row.harness_version, row.runtime, row.sessions) for row in summary.provenance]
    assert provenance == [("1.0", "sandbox", 1), ("1.1", "sandbox", 1)]
    text = printed(growing)
    assert "1 groups mix programs, tasks or places" in text
    assert "g: harness_version 1.0 and 1.1" in text
    assert "git_history" in text
    mixed = json.loads(printed(growing, "--json"))["mixed"]
    assert mixed == [{"group_id": "g", "values": {"harness_version": ["1.0", "1.1"]}}]


def test_a_session_that_runs_has_the_suspicions_of_its_calls_so_far(growing):
    assert view_session(growing, "running").suspicions == {"refused_hosts": 1, "git_history": 2}
    text = printed(growing, "running")
    assert "git_history" in text
    assert "GitPython" in text  # the rule says what it cannot see


SHOWN = [
    "reward 0.5",
    "1 failed, 2 passed",
    "t.py::b: failed",
    "src/[bold].py",
    "pipe: fifo",
    "ab" * 32,
    "queued 1.0 s, running 61.2 s",
    "logs/judged.diff",
    "rows of the session: the last counts",
    "a test passed that must fail",
]


def test_a_session_shows_its_evidence_and_all_its_rows(growing):
    text = printed(growing, "judged")
    for shown in SHOWN:
        assert shown in text
    values = json.loads(printed(growing, "judged", "--json"))
    assert [row["reward"] for row in values["revisions"]] == [0.0, 0.5]
    assert values["session"]["evidence"] == EVIDENCE
    assert values["session"]["parts"] == {"speed": 0.5}
    assert values["session"]["running_seconds"] == 61.25
    assert values["suspicions"] == {"odd_files": 1, "forged_report": 1}
    assert str(growing) not in json.dumps(values)
    without = printed(growing, "late")
    for title in ("evidence", "suspicions", "rows of the session"):
        assert title not in without


def test_the_mean_of_an_outcome_is_over_its_rewards_and_infrastructure_has_none():
    failed = [session("a", "failed", None), session("b", "failed", 0.5)]
    assert outcome_rows([*failed, session("c", "infrastructure", 1.0)]) == [
        OutcomeRow("failed", 2, 1, 0.5),
        OutcomeRow("infrastructure", 1, 0, None),
    ]


def test_means_of_tasks_and_parts_are_over_the_sessions_with_a_reward():
    parts = {"speed": 1.0}
    sessions = [
        session("a", task_id="b", parts=parts),
        session("b", "failed", 0.0, task_id="b"),
        session("c"),
        session("d", "unjudged", task_id="a", parts=parts),
        session("e", "cancelled", task_id="a", parts=parts),
    ]
    assert task_rows(sessions) == [TaskRow("a", 2, 0, None), TaskRow("b", 2, 2, 0.5)]
    assert part_rows(sessions) == [PartRow("speed", 1, 1.0)]


@pytest.mark.parametrize(
    ("other", "mixed"),
    [
        ({"harness_version": "1"}, None),
        ({"harness_version": ""}, None),
        ({"harness_version": "2", "status": "infrastructure"}, None),
        ({"harness_version": "2", "group_id": "other"}, None),
        ({"harness_version": "2"}, {"harness_version": ["1", "2"]}),
        (
            {"harness_version": "2", "runtime": "process"},
            {"harness_version": ["1", "2"], "runtime": ["process", "sandbox"]},
        ),
    ],
    ids=str,
)
def test_a_group_mixes_what_is_known_to_differ_among_its_rewarded_sessions(other, mixed):
    first = session("a", harness="codex", harness_version="1", runtime="sandbox")
    second = session("b", **{"harness": "codex", "runtime": "sandbox", **other})
    assert mixed_groups([first, second]) == ([MixedGroup("g", mixed)] if mixed else [])


@pytest.mark.parametrize(
    ("sampled", "steps"),
    [
        (  # in the order in which the versions were used
            [(3, "10", 1.0), (1, "9", 0.0), (2, "9", 0.5), (4, None, None)],
            [("9", 2, 0.25, 0.5), ("10", 1, 1.0, 1.0), ("default", 1, None, None)],
        ),
        (  # the attempts at a step have the same weights
            [(1, "1a2b3c4d.9.0", 0.0), (2, "1a2b3c4d.9.1", 1.0), (3, "1a2b3c4d.10.1", 1.0)],
            [("1a2b3c4d.9", 2, 0.5, 1.0), ("1a2b3c4d.10", 1, 1.0, 1.0)],
        ),
        (  # a fault has no reward, whoever recorded one
            [(1, "9", 1.0, "infrastructure"), (2, "9", 0.5)],
            [("9", 2, 0.5, 0.5)],
        ),
    ],
    ids=["order", "attempts", "fault"],
)
def test_rewards_are_counted_by_the_weights_of_a_step(sampled, steps):
    sessions = []
    for number, version, reward, *status in sampled:
        started = START + timedelta(seconds=number)
        sessions.append(
            session(str(number), *status, reward=reward, policy_version=version, started_at=started)
        )
    assert reward_steps(sessions) == [VersionRewards(*step) for step in steps]
