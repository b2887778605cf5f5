import pyarrow as pa
import pytest

from rolltap.addons.store.segment import Segment, SegmentReader

SCHEMA = pa.schema([("session_id", pa.string()), ("ids", pa.list_(pa.int32()))])


def make_batch(number):
    return pa.RecordBatch.from_pylist([{"session_id": f"s{number}", "ids": [number] * 3}], SCHEMA)


@pytest.fixture
def path(tmp_path):
    """Return the path of a file with three commits."""
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
    """Return the commits that a reader yields, and the reader."""
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
        assert list(reader.damage) == [offsets[1]]
        assert "ffset" in reader.damage[offsets[1]]

    @pytest.mark.parametrize("size", [8, None], ids=["its length", "all of it"])
    def test_commits_after_one_that_became_zeros_are_read(self, path, size):
        with SegmentReader(path) as reader:
            offsets = [offset for offset, _ in reader]
        data = bytearray(path.read_bytes())
        lost = slice(offsets[1], offsets[1] + size if size else offsets[2])
        data[lost] = bytes(lost.stop - lost.start)
        path.write_bytes(data)
        rows, reader = read(path)
        assert rows == [make_batch(0).to_pydict(), make_batch(2).to_pydict()]
        assert (list(reader.damage), reader.uncommitted) == ([offsets[1]], 0)

    def test_bytes_that_look_like_a_message_do_not_hide_the_messages_after_them(self, path):
        with SegmentReader(path) as reader:
            offsets = [offset for offset, _ in reader]
        data = bytearray(path.read_bytes())
        data[offsets[1] : offsets[1] + 8] = b"garbage."
        data[offsets[2] - 2 : offsets[2]] = b"\xff\xff"  # with the next message's bytes they look like a marker
        path.write_bytes(data)
        assert read(path)[0] == [make_batch(0).to_pydict(), make_batch(2).to_pydict()]

    def test_whatever_byte_is_changed_only_its_commit_is_lost(self, path):
        whole = path.read_bytes()
        with SegmentReader(path) as reader:
            first, *_ = [offset for offset, _ in reader]
        for position in range(len(whole)):
            change(path, position)
            rows, reader = read(path)
            assert len(rows) == 3 or reader.damage
            assert len(rows) >= (2 if position >= first else 0)
            assert reader.uncommitted == 0
            path.write_bytes(whole)


class TestEnd:
    def test_wherever_a_file_is_cut_the_commit_that_lost_its_end_is_damage(self, path):
        whole = path.read_bytes()
        with SegmentReader(path) as reader:
            offsets = [offset for offset, _ in reader]
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            rows, reader = read(path)
            begun = max((offset for offset in offsets if offset < size), default=0)
            assert list(reader.damage) == ([] if size in offsets else [begun])
            assert rows == [make_batch(number).to_pydict() for number in range(len(rows))]
            assert len(rows) == sum(offset <= size for offset in offsets[1:])
            assert reader.uncommitted == 0

    @pytest.mark.parametrize("size", [0, 1, 7, 8, 100])
    def test_a_tail_that_begins_with_zeros_was_never_committed(self, path, size):
        whole = path.read_bytes()
        message = make_batch(3).serialize().to_pybytes()
        path.write_bytes(whole + bytes(8) + message[8 : 8 + size])
        rows, reader = read(path)
        assert (len(rows), reader.damage, reader.uncommitted) == (3, {}, 8 + size)

    def test_a_tail_that_holds_minus_one_was_never_committed(self, path):
        whole = path.read_bytes()
        path.write_bytes(whole + bytes(16) + b"\xff\xff\xff\xff" + bytes(20))
        rows, reader = read(path)
        assert (len(rows), reader.damage, reader.uncommitted) == (3, {}, 40)

    def test_bytes_after_the_end_of_a_stream_are_damage(self, path):
        whole = path.read_bytes()
        end = b"\xff\xff\xff\xff\0\0\0\0"
        path.write_bytes(whole + end)
        assert read(path)[1].damage == {}
        path.write_bytes(whole + end + b"more")
        assert list(read(path)[1].damage) == [len(whole)]
