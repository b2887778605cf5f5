import pyarrow as pa
import pytest

from rolltap.addons.store.segment import Segment, SegmentReader

SCHEMA = pa.schema([("session_id", pa.string()), ("ids", pa.list_(pa.int32()))])


def make_batch(number):
    return pa.RecordBatch.from_pylist([{"session_id": f"s{number}", "ids": [number] * 3}], SCHEMA)


@pytest.fixture
def path(tmp_path):
    """A file with three commits."""
    segment = Segment(tmp_path / "x.arrow", SCHEMA)
    for number in range(3):
        segment.append(make_batch(number))
    segment.close()
    return segment.path


def change(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def read(path):
    """The commits that a reader yields, and the reader."""
    with SegmentReader(path, SCHEMA) as reader:
        return [batch.to_pydict() for _, batch in reader], reader


class TestDamage:
    def test_a_commit_with_an_offset_out_of_range_is_left_out_and_the_others_are_read(self, path):
        with SegmentReader(path) as reader:
            offsets = [offset for offset, _ in reader]
        body = path.read_bytes().index(b"s1", offsets[1]) - 8
        # the length of the session's id
        change(path, body + 4)
        rows, reader = read(path)
        assert rows == [make_batch(0).to_pydict(), make_batch(2).to_pydict()]
        [(offset, what)] = reader.invalid
        assert offset == offsets[1]
        assert "ffset" in what
        assert f"byte {offsets[1]} is damaged" in reader.damage

    def test_whatever_byte_is_changed_a_reader_does_not_crash(self, path):
        whole = path.read_bytes()
        for position in range(len(whole)):
            change(path, position)
            rows, reader = read(path)
            assert len(rows) == 3 or reader.damage
            path.write_bytes(whole)
