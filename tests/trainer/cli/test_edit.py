"""`rolltap filter`. The other commands that write runs are tested with what they do."""

import json

import pytest
from click.testing import CliRunner

import rolltap
from rolltap.errors import InputError
from rolltap.trainer.cli.main import rolltap as program
from rolltap.trainer.names import counted
from tests.factories import make_session
from tests.trainer.runs.recorded_runs import make_run


@pytest.fixture
def run(tmp_path):
    cheated = make_session("cheated", suspicions={"git_history": 3}, runtime="sandbox", task_id="a")
    return make_run(
        tmp_path / "run", cheated, make_session("honest", runtime="process", task_id="b")
    )


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--suspicious"], ["cheated"]),
        (["--not-suspicious"], ["honest"]),
        (["--suspicion", "git_history"], ["cheated"]),
        (["--suspicion", "web_search", "--suspicion", "git_history"], ["cheated"]),
        (["--runtime", "process", "--runtime", "container"], ["honest"]),
        (["--task", "a"], ["cheated"]),
        ([], ["cheated", "honest"]),
    ],
    ids=str,
)
def test_sessions_are_filtered_by_suspicion_runtime_and_task(run, tmp_path, options, kept):
    result = CliRunner().invoke(
        program, ["filter", str(run), "--out", str(tmp_path / "out"), *options]
    )
    assert result.exit_code == 0, result.output
    assert [session.session_id for session in rolltap.open_run(tmp_path / "out").sessions()] == kept
    assert f"{counted(len(kept), 'session')} in " in result.stdout


def test_the_name_of_no_rule_is_refused_with_the_names_that_there_are(run, tmp_path):
    with pytest.raises(
        InputError, match=r"no rule of suspicion is named 'cheating': choose refused_hosts, "
    ):
        rolltap.open_run(run).filter(tmp_path / "out", suspicions=["cheating"])
    assert not (tmp_path / "out").exists()


def test_json_of_commands_that_write_is_one_object_with_the_counts_of_what_they_wrote(
    run, tmp_path
):
    def written(*arguments):
        name, *rest = arguments
        result = CliRunner().invoke(
            program, [name, str(run), *rest, "--out", str(tmp_path / name), "--json"]
        )
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    one = {"sessions": 1, "calls": 2, "sampled_tokens": 2}
    both = {"sessions": 2, "calls": 4, "sampled_tokens": 4}
    assert written("filter", "--suspicious") == {"run": str(tmp_path / "filter"), **one}
    merged = {"merged_from": [{"run": "run"}], "not_copied": []}
    assert written("merge") == {"run": str(tmp_path / "merge"), **both, **merged}
    parts = {name: {"run": str(tmp_path / "split" / name), **one} for name in ("a", "b")}
    assert written("split", "--by", "task") == {"parts": parts}
    exported = {"out": str(tmp_path / "export"), "records": 0}  # the calls have no messages
    assert written("export", "--to", "messages") == {"run": str(run), **both, **exported}
