import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from datasets import Features, List, Value, load_dataset, load_from_disk

from rolltap.trainer.runs.exports import parquet
from rolltap.trainer.runs.exports.parquet import Spool
from rolltap.trainer.runs.exports.traces import save_traces
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces
from tests.trainer.outgoing import write_run

FEATURES = Features({"name": Value("string"), "ids": List(Value("int32"))})


def rows(count):
    return [{"name": f"row {i}", "ids": [i] * 4} for i in range(count)]


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


def test_rows_come_back_in_their_order_and_without_further_keys(tmp_path):
    with Spool(FEATURES, tmp_path / "out") as spooled:
        spooled.add(rows(100))
        spooled.add(row | {"more": 1} for row in rows(100))
        dataset, shards = spooled.dataset()
        assert (list(dataset), dataset.features, shards) == (rows(100) + rows(100), FEATURES, 1)


def test_rows_are_in_a_file_and_not_in_memory_and_the_file_is_deleted(tmp_path):
    with Spool(FEATURES, tmp_path / "out") as spooled:
        spooled.add(rows(3))
        [file] = spooled.dataset()[0].cache_files
        assert os.path.dirname(os.path.dirname(file["filename"])) == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_shards_are_of_bounded_size(run, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "SHARD_BYTES", 300)
    save_traces(iter_traces(run, TraceOptions()), tmp_path / "saved", str)
    assert len(list((tmp_path / "saved").glob("data-*.arrow"))) > 1
    (tmp_path / "out").mkdir()
    parquet.export(run, tmp_path / "out", lambda *_: None)
    files = sorted(path.name for path in (tmp_path / "out" / "traces").iterdir())
    assert files == [f"train-{number:05}-of-{len(files):05}.parquet" for number in range(len(files))]
    assert len(files) > 1
    loaded = load_dataset(str(tmp_path / "out"), "traces", split="train", cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == list(load_from_disk(tmp_path / "saved"))


def test_the_hub_stores_only_what_changed_and_the_viewer_finds_a_page(run, tmp_path):
    (tmp_path / "out").mkdir()
    parquet.export(run, tmp_path / "out", lambda *_: None)
    [path] = (tmp_path / "out" / "traces").iterdir()
    metadata = pq.read_metadata(path)
    assert b"content_defined_chunking" in metadata.metadata
    assert metadata.row_group(0).column(0).has_offset_index


@pytest.mark.parametrize("arguments", [["traces"], ["export", "--to", "parquet"]], ids=str)
def test_the_users_cache_stays_empty_and_no_progress_bar_is_shown(run, tmp_path, arguments):
    home = tmp_path / "home"
    home.mkdir()
    program = os.path.join(os.path.dirname(sys.executable), "rolltap")
    ended = subprocess.run(
        [program, *arguments, run, "--out", tmp_path / "out"],
        env={**os.environ, "HOME": str(home), "HF_HOME": str(home / "hf")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert "examples" not in ended.stderr
    assert "ba/s" not in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out", "run"]
