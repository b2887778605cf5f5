import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, List, Value

from rolltap.trainer.exports import shards
from rolltap.trainer.exports.shards import ShardWriter

FEATURES = Features({"name": Value("string"), "ids": List(Value("int32"))})


def rows(count, length=4):
    return [{"name": f"row {i}", "ids": [i] * length} for i in range(count)]


def read(path):
    return pa.ipc.open_stream(path).read_all() if path.suffix == ".arrow" else pq.read_table(path)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(shards, "BATCH_BYTES", 2_000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 10_000)


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
class TestShards:
    def test_rows_come_back_in_their_order_from_shards_of_bounded_size(self, tmp_path, small, suffix):
        with ShardWriter(tmp_path, "data", suffix, FEATURES) as writer:
            writer.add(rows(500))
            writer.add(rows(500))
        assert writer.rows == 1000
        count = len(writer.names)
        assert count > 2
        assert writer.names == [f"data-{i:05}-of-{count:05}.{suffix}" for i in range(count)]
        assert sorted(path.name for path in tmp_path.iterdir()) == writer.names
        tables = [read(tmp_path / name) for name in writer.names]
        assert [row for table in tables for row in table.to_pylist()] == rows(500) + rows(500)
        assert all(5_000 < table.nbytes <= 10_000 for table in tables[:-1])

    def test_no_rows_are_a_shard_with_the_columns(self, tmp_path, suffix):
        with ShardWriter(tmp_path, "data", suffix, FEATURES) as writer:
            writer.add([])
        [name] = writer.names
        assert name == f"data-00000-of-00001.{suffix}"
        table = read(tmp_path / name)
        assert (table.num_rows, table.column_names) == (0, ["name", "ids"])

    def test_every_shard_tells_datasets_its_features(self, tmp_path, small, suffix):
        with ShardWriter(tmp_path, "data", suffix, FEATURES) as writer:
            writer.add(rows(500))
        for name in writer.names:
            assert Features.from_arrow_schema(read(tmp_path / name).schema) == FEATURES
            assert b"huggingface" in read(tmp_path / name).schema.metadata

    def test_no_shard_gets_its_name_when_writing_fails(self, tmp_path, small, suffix):
        def failing():
            yield from rows(500)
            raise RuntimeError

        with pytest.raises(RuntimeError), ShardWriter(tmp_path, "data", suffix, FEATURES) as writer:
            writer.add(failing())
        assert writer.names == []
        assert all(path.name.startswith(".") for path in tmp_path.iterdir())


def test_small_rows_are_written_in_large_batches(tmp_path):
    with ShardWriter(tmp_path, "data", "arrow", FEATURES) as writer:
        for row in rows(300):
            writer.add([row])
    with pa.ipc.open_stream(tmp_path / writer.names[0]) as reader:
        assert [batch.num_rows for batch in reader] == [300]


def test_row_groups_are_bounded(tmp_path, small):
    with ShardWriter(tmp_path, "data", "parquet", FEATURES) as writer:
        writer.add(rows(300))
    metadata = pq.read_metadata(tmp_path / writer.names[0])
    assert metadata.num_row_groups > 1


def test_an_arrow_shard_opens_with_datasets(tmp_path):
    with ShardWriter(tmp_path, "data", "arrow", FEATURES) as writer:
        writer.add(rows(3))
    dataset = Dataset.from_file(str(tmp_path / writer.names[0]))
    assert dataset.features == FEATURES
    assert list(dataset) == rows(3)
