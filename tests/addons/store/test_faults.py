"""Kills and full or read-only disks: committed calls stay, and a reader returns only complete
commits."""

import json
import random
import subprocess
import sys
from pathlib import Path

from datasets import Dataset

from rolltap.addons.store.records import CALL_SCHEMA
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import read_rows, run_files
from rolltap.trainer.traces.reader import RecordedCalls
from tests.addons.store.writers import BALLAST, KILLS, STEPPED, STRIDE, make_call, readable

ROOT = Path(__file__).resolve().parents[3]


def writers(deed, run, *more, command=()):
    command = [*command, sys.executable, "-m", "tests.addons.store.writers", deed, run, *more]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)


def test_no_kill_loses_a_committed_call_or_leaves_a_half_one(tmp_path):
    seed = str(random.randrange(10**6))
    print(f"the seed is {seed}")  # pytest prints it when the test fails
    committed = writers("kills", tmp_path, seed)
    assert len(committed) == KILLS
    assert sum(map(len, committed)) > KILLS
    rows = list(read_rows(tmp_path, "calls"))
    for row in rows:
        expected = make_call(*map(int, row["call_id"].split("-"))).to_row()
        assert row["digest"] == row_digest(row, CALL_SCHEMA) == row_digest(expected, CALL_SCHEMA), (
            row["call_id"]
        )
    found = [row["call_id"] for row in rows]
    assert len(set(found)) == len(found)
    assert {call_id for ids in committed for call_id in ids} <= set(found)
    for writer, ids in enumerate(committed):
        more = {call_id for call_id in found if call_id.startswith(f"{writer}-")} - set(ids)
        assert more <= {f"{writer}-{len(ids)}"}
    files = run_files(tmp_path, "calls")
    assert sum(Dataset.from_file(str(path)).num_rows for path in files) == len(found)
    for path in files:
        with SegmentReader(path) as reader:
            list(reader)
            assert reader.damage == {}
    assert sum(map(len, RecordedCalls(tmp_path).values())) == len(found)


def test_a_kill_at_any_step_of_commits_and_compaction_loses_nothing(tmp_path):
    committed = writers("steps", tmp_path)
    assert len(committed) * STRIDE > 50
    assert committed[-1] == [f"0-{number}" for number in range(STEPPED)]
    for step, ids in enumerate(committed):
        found = readable(tmp_path / str(step))
        assert found in (ids, [*ids, f"0-{len(ids)}"]), step
        for path in run_files(tmp_path / str(step), "calls"):
            assert Dataset.from_file(str(path)).num_rows > 0


def test_a_full_disk_loses_nothing_and_the_writer_goes_on_when_there_is_room(small_disk, tmp_path):
    result = writers("full_disk", tmp_path, command=small_disk("6m", tmp_path))
    assert result["problems"] == []
    assert result["hidden"] == []
    assert result["committed"] > BALLAST


def test_a_folder_that_becomes_read_only_is_an_error_until_it_can_be_written_again(
    small_disk, tmp_path
):
    result = writers("read_only", tmp_path, command=small_disk("2m", tmp_path))
    assert result == {"errors": ["EACCES", "EROFS"], "events": 1}


def test_metadata_keeps_the_notes_of_several_processes(tmp_path):
    noted = writers("metadata", tmp_path)
    recorders = {entry["recorder"] for entry in noted["recorders"]}
    assert recorders == {f"{number // 10}-{number % 10}" for number in range(40)}
    assert noted["engines"] == {f"http://{process}": {"version": 9} for process in range(4)}
