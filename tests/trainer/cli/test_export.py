import pytest
from click.testing import CliRunner
from datasets import load_dataset

from rolltap.addons.errors import RunError
from rolltap.trainer.cli.runs import export_command
from tests.trainer.outgoing import write_run


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


def export(*arguments):
    return CliRunner().invoke(export_command, [*map(str, arguments)], catch_exceptions=False)


def test_parquet_is_written_and_counted(run, tmp_path):
    ended = export(run, "--to", "parquet", "--out", tmp_path / "out")
    assert ended.exit_code == 0
    assert f"14 records in {tmp_path / 'out'}" in ended.stderr
    assert ended.stdout == ""
    calls = load_dataset(str(tmp_path / "out"), "calls", split="train", cache_dir=str(tmp_path / "cache"))
    assert calls.num_rows == 7


def test_a_folder_that_is_not_empty_is_refused(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(RunError, match="exists and is not an empty folder: choose a new one"):
        export(run, "--to", "parquet", "--out", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_folder_that_is_no_run_leaves_no_output(tmp_path):
    with pytest.raises(RunError, match="is not a run folder"):
        export(tmp_path, "--to", "parquet", "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "parquet"], "--to parquet takes --out DIR"),
        (["--to", "parquet", "--out", "x", "--repo", "a/b"], "and neither --repo nor --public"),
        (["--to", "parquet", "--out", "x", "--public"], "and neither --repo nor --public"),
        (["--to", "hub"], "--to hub takes --repo ORG/NAME, and no --out"),
        (["--to", "hub", "--repo", "a/b", "--out", "x"], "--to hub takes --repo ORG/NAME, and no --out"),
        (["--out", "x"], "Missing option '--to'"),
    ],
)
def test_a_wrong_combination_of_options_is_a_message_that_names_the_right_ones(run, options, message):
    ended = export(run, *options)
    assert ended.exit_code == 2
    assert message in ended.stderr
