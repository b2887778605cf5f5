"""Commands say when rows of a run were changed after they were written."""

import pyarrow as pa
import pytest

from rolltap.addons.store.tables import TABLES, run_files
from tests.trainer.cli.program import rolltap
from tests.trainer.outgoing import write_run

CHANGED = "changed after "


@pytest.fixture
def changed_run(tmp_path):
    """Write a run, and change its first call and leave its digest as it is."""
    write_run(tmp_path / "run")
    first, *_ = run_files(tmp_path / "run", "calls")
    rows = pa.ipc.open_stream(first.read_bytes()).read_all().to_pylist()
    rows[0]["logprobs"] = [0.0] * len(rows[0]["logprobs"])
    with pa.OSFile(str(first), "wb") as file, pa.ipc.new_stream(file, TABLES["calls"]) as writer:
        writer.write_table(pa.Table.from_pylist(rows, TABLES["calls"]))
    return tmp_path / "run", rows[0]["session_id"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "{run}"),
        ("inspect", "{run}", "{session}"),
        ("traces", "{run}", "--out", "{run}-traces"),
        ("traces", "{run}", "--json"),
    ],
)
def test_a_changed_row_is_told_with_what_to_do(changed_run, arguments):
    run, session = changed_run
    ended = rolltap(*(argument.format(run=run, session=session) for argument in arguments))
    assert ended.returncode == 0
    assert CHANGED in ended.stderr
    assert "rolltap verify" in ended.stderr


def test_a_sound_run_is_not_warned_of(tmp_path):
    write_run(tmp_path / "run")
    assert rolltap("inspect", tmp_path / "run").stderr == ""


def test_the_summary_and_the_session_mark_it(changed_run):
    run, session = changed_run
    assert CHANGED in rolltap("inspect", run).stdout
    assert CHANGED in " ".join(rolltap("inspect", run, session).stdout.split())
