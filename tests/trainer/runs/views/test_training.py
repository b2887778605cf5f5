"""A training and its steps, the sessions of a task, and sessions as they end, as `rolltap inspect`
prints them."""

import json
from itertools import islice

import pytest
from click.testing import CliRunner

import rolltap
from rolltap.addons.store.metadata import write_metadata
from rolltap.errors import InputError, RunError
from rolltap.trainer.cli.runs import inspect_command
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.runs.views.sessions import follow_sessions
from rolltap.trainer.runs.views.training import StepRow, read_metrics
from rolltap.trainer.traces.ledger import Ledger
from tests.factories import add_rows, make_call, make_session, write_run
from tests.trainer.runs.views.shown import printed
from tests.trainer.traces.test_trained import account, recorded, scored, write


@pytest.fixture
def run(tmp_path):
    """Write a run whose first step took s and t, of which t had no signal. u was in no step."""
    sessions = [recorded("s"), recorded("t", reward=0.5), recorded("u")]
    run = write_run(tmp_path / "run")
    for each in sessions:
        add_rows(run, *each.calls, each.session)
    step = account(*sessions[:2])
    step.batch.accounts["t"] = step.batch.accounts["t"].leave_out("no_signal")
    step.batch.ledger = step.batch.ledger.leave_out("no_signal", 3)
    taken = type(step)(step.batch, {"s": 1.0}, step.computed[:1])
    write(run, 0, (taken, scored(-1, -2, -3)))
    return run


def words(text):
    return " ".join(text.replace("│", " ").replace("┃", " ").split())


def test_the_ledger_of_a_training_says_what_its_steps_trained(run):
    summary = summarize(run)
    left_out = {"no_signal": 3, "auxiliary": 3}
    assert summary.ledger == Ledger(sampled=12, trained=6, left_out=left_out)
    left_out = {"auxiliary": 2, "no_signal": 3}
    assert summary.trained == [StepRow(step=1, sessions=2, sampled=8, trained=3, left_out=left_out)]
    rows = [(row.session_id, row.step, row.advantage, row.reason) for row in summary.session_rows]
    assert rows == [("s", 1, 1.0, None), ("t", 1, None, "no_signal"), ("u", None, None, None)]
    text = words(printed(run))
    assert "trained, in the newest step of 2 sessions 3 to train, in no step yet 3" in text
    assert "left out: auxiliary 3" in text
    assert "1 2 8 3 2 auxiliary, 3 no_signal" in text
    for path in run.glob("trained-*.arrow"):
        path.unlink()
    assert summarize(run).ledger == Ledger(sampled=12, trained=9, left_out={"auxiliary": 3})
    assert "to train 9" in words(printed(run))


def test_a_session_says_which_steps_took_it(run):
    view = json.loads(printed(run, "t", "--json"))
    assert view["ledger"]["left_out"] == {"auxiliary": 1, "no_signal": 3}
    [step] = view["trained"]
    assert step["step"] == 1
    assert step["version"] == "run.0.0"
    assert step["reason"] == "no_signal"
    assert step["trained"] == 0
    assert "trained steps" in printed(run, "t")
    assert json.loads(printed(run, "u", "--json"))["trained"] == []


def test_a_training_from_recorded_runs_is_inspected_by_its_own_folder(run, tmp_path):
    folder = tmp_path / "offline"
    folder.mkdir()
    with pytest.raises(RunError):
        printed(folder)
    write_metadata(folder, {"model": "m"})
    write(folder, 4, (account(recorded("s")), scored(-1, -2, -3)))
    (folder / "metrics.jsonl").write_text('{"step": 5, "reward": 0.5}\n{"step"')
    [step] = json.loads(printed(folder, "--json"))["trained"]
    assert step["step"] == 5
    assert step["trained"] == 3
    assert "1 auxiliary" in printed(folder)
    assert rolltap.read_training(folder).metrics == [{"step": 5, "reward": 0.5}]
    assert rolltap.read_training(run / "nothing") is None
    (folder / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(RunError, match="line 1 is not a step's metrics"):
        read_metrics(folder / "metrics.jsonl")


class TestFilters:
    @pytest.fixture
    def run(self, tmp_path):
        run = write_run(tmp_path)
        for name, task, reward, tokens in (
            ("a", "one", 0.0, 5),
            ("b", "two", None, 9),
            ("c", "one", 1.0, 1),
        ):
            row = make_session(name, task_id=task, group_id=f"{task}-{name}", reward=reward)
            add_rows(run, make_call(name, [1], range(tokens), session_id=name), row)
        return run

    def test_a_task_or_group_has_a_summary_of_its_own(self, run):
        assert [row.session_id for row in summarize(run, task="one").session_rows] == ["a", "c"]
        summary = json.loads(printed(run, "--group", "one-c", "--json"))
        [row] = summary["session_rows"]
        assert row["session_id"] == "c"
        assert row["task_id"] == "one"
        assert row["group_id"] == "one-c"
        assert summary["ledger"]["sampled"] == 1
        assert summary["sessions"] == {"completed": 1}
        assert len(summary["tasks"]) == 1
        with pytest.raises(InputError, match="has no task 'three'"):
            summarize(run, task="three")

    @pytest.mark.parametrize(
        ("sort", "order"),
        [
            ("started", "abc"),
            ("reward", "cab"),
            ("tokens", "bac"),
            ("calls", "abc"),
            ("task", "acb"),
        ],
    )
    def test_sessions_are_in_the_order_that_was_asked_for(self, run, sort, order):
        rows = json.loads(printed(run, "--sort", sort, "--json"))["session_rows"]
        assert "".join(row["session_id"] for row in rows) == order

    def test_sessions_that_end_are_followed(self, run):
        later = [
            make_session("d", task_id="one"),
            make_session("e", task_id="two"),
            make_session("a", revision=1, task_id="one"),
        ]
        found = follow_sessions(run, "one", wait=lambda: add_rows(run, later.pop(0)))
        ended = [(session.session_id, session.revision) for session in islice(found, 4)]
        assert ended == [("a", 0), ("c", 0), ("d", 0), ("a", 1)]

    def test_each_is_a_line_until_an_interrupt(self, run, monkeypatch):
        def interrupt(seconds):
            raise KeyboardInterrupt

        monkeypatch.setattr("time.sleep", interrupt)
        first, *_ = printed(run, "--follow").splitlines()
        assert first.split()[1:] == ["a", "one", "one-a", "completed", "0.0"]
        lines = printed(run, "--follow", "--json").splitlines()
        assert [json.loads(line)["reward"] for line in lines] == [0.0, None, 1.0]

    @pytest.mark.parametrize("arguments", ["a --task one", "a --full", "--follow --sort task"])
    def test_options_that_do_not_fit_are_refused(self, run, arguments):
        line = [str(run), *arguments.split()]
        assert CliRunner().invoke(inspect_command, line).exit_code == 2
