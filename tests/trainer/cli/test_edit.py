"""`rolltap filter`, `split` and `merge`. What they write is tested with `trainer.runs`."""

import json

import pytest
from click.testing import CliRunner

from rolltap.trainer.cli.main import rolltap
from tests.factories import make_session
from tests.trainer.runs.recorded_runs import ids_of, make_run


@pytest.fixture
def run(tmp_path):
    cheated = make_session("cheated", suspicions={"git_history": 3}, runtime="sandbox", task_id="a")
    honest = make_session("honest", runtime="process", task_id="b", reward=0.0)
    return make_run(tmp_path / "run", cheated, honest)


def edit(*arguments):
    ended = CliRunner().invoke(rolltap, [str(argument) for argument in arguments])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("--suspicious --role agent", ["cheated"]),
        ("--not-suspicious", ["honest"]),
        ("--suspicion web_search --suspicion git_history", ["cheated"]),
        ("--runtime process --runtime container", ["honest"]),
        ("--task a", ["cheated"]),
        ("--min-reward 0.5", ["cheated"]),
        ("--session honest --max-reward 0.5", ["honest"]),
    ],
)
def test_an_option_of_filter_is_a_criterion(run, tmp_path, options, kept):
    out = tmp_path / "out"
    assert edit("filter", run, "--out", out, *options.split()) == f"1 session in {out}\n"
    assert ids_of(out) == kept


def test_split_and_merge_say_what_they_wrote(run, tmp_path):
    parts = tmp_path / "parts"
    said = edit("split", run, "--by", "task", "--out", parts)
    assert said == f"1 session in {parts / 'a'}\n1 session in {parts / 'b'}\n"
    merged = tmp_path / "merged"
    said = edit("merge", parts / "a", parts / "b", "--out", merged)
    assert said == f"2 sessions in {merged}\n"
    assert ids_of(merged) == ["cheated", "honest"]


def test_json_of_commands_that_write_is_one_object_with_the_counts_of_what_they_wrote(
    run, tmp_path
):
    def written(name, *options):
        return json.loads(edit(name, run, *options, "--out", tmp_path / name, "--json"))

    one = {"sessions": 1, "calls": 2, "sampled_tokens": 2}
    both = {"sessions": 2, "calls": 4, "sampled_tokens": 4}
    assert written("filter", "--suspicious") == {"run": str(tmp_path / "filter"), **one}
    merged = {"merged_from": [{"run": "run"}], "not_copied": []}
    assert written("merge") == {"run": str(tmp_path / "merge"), **both, **merged}
    parts = {name: {"run": str(tmp_path / "split" / name), **one} for name in ("a", "b")}
    assert written("split", "--by", "task") == {"parts": parts}
    exported = {"out": str(tmp_path / "export"), "records": 0}  # the calls have no messages
    assert written("export", "--to", "messages") == {"run": str(run), **both, **exported}


@pytest.mark.parametrize("options", ["", "--by status --parts 2"])
def test_split_without_one_criterion_is_refused(run, tmp_path, options):
    line = ["split", str(run), "--out", str(tmp_path / "out"), *options.split()]
    ended = CliRunner().invoke(rolltap, line)
    assert ended.exit_code == 2
    assert "give either --by or --parts" in ended.stderr
