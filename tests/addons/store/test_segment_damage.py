import pytest

from rolltap.addons.store.segment import Segment, SegmentReader
from tests.addons.store.test_segment import SCHEMA, batch


def make_batch(number):
    return batch(number, sessions=[f"s{number}"])


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


@pytest.fixture
def offsets(path):
    """Return the offset of each commit."""
    with SegmentReader(path) as reader:
        return [offset for offset, _ in reader]


def without_the_second(path):
    """Assert that a reader yields all commits but the second one, and return the reader."""
    rows, reader = read(path)
    assert rows == [make_batch(0).to_pydict(), make_batch(2).to_pydict()]
    return reader


class TestDamage:
    def test_a_commit_with_an_offset_out_of_range_is_left_out_and_the_others_are_read(
        self, path, offsets
    ):
        body = path.read_bytes().index(b"s1", offsets[1]) - 8
        # the length of the session's id
        change(path, body + 4)
        reader = without_the_second(path)
        assert list(reader.damage) == [offsets[1]]
        assert "ffset" in reader.damage[offsets[1]]

    @pytest.mark.parametrize("size", [8, None], ids=["its length", "all of it"])
    def test_commits_after_one_that_became_zeros_are_read(self, path, offsets, size):
        data = bytearray(path.read_bytes())
        lost = slice(offsets[1], offsets[1] + size if size else offsets[2])
        data[lost] = bytes(lost.stop - lost.start)
        path.write_bytes(data)
        reader = without_the_second(path)
        assert (list(reader.damage), reader.uncommitted) == ([offsets[1]], 0)

    def test_bytes_that_look_like_a_message_do_not_hide_the_messages_after_them(
        self, path, offsets
    ):
        data = bytearray(path.read_bytes())
        data[offsets[1] : offsets[1] + 8] = b"garbage."
        data[offsets[2] - 2 : offsets[2]] = (
            b"\xff\xff"  # with the next message's bytes they look like a marker
        )
        path.write_bytes(data)
        without_the_second(path)

    def test_whatever_byte_is_changed_only_its_commit_is_lost(self, path, offsets):
        whole = path.read_bytes()
        for position in range(len(whole)):
            change(path, position)
            rows, reader = read(path)
            assert len(rows) == 3 or reader.damage
            assert len(rows) >= (2 if position >= offsets[0] else 0)
            assert reader.uncommitted == 0
            with SegmentReader(path) as reader:  # it does not know the schema
                assert reader.schema is not None or reader.damage[0].startswith("it has no schema")
            path.write_bytes(whole)


MINUS_ONE = bytes(8) + b"\xff\xff\xff\xff" + bytes(20)


class TestEnd:
    def test_wherever_a_file_is_cut_the_commit_that_lost_its_end_is_damage(self, path, offsets):
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            rows, reader = read(path)
            begun = max((offset for offset in offsets if offset < size), default=0)
            assert list(reader.damage) == ([] if size in offsets else [begun])
            assert rows == [make_batch(number).to_pydict() for number in range(len(rows))]
            assert len(rows) == sum(offset <= size for offset in offsets[1:])
            assert reader.uncommitted == 0

    @pytest.mark.parametrize(
        "tail",
        [
            *(make_batch(3).serialize().to_pybytes()[8 : 8 + size] for size in (0, 1, 7, 8, 100)),
            MINUS_ONE,
        ],
        ids=[0, 1, 7, 8, 100, "minus one"],
    )
    def test_a_tail_that_begins_with_zeros_was_never_committed(self, path, tail):
        path.write_bytes(path.read_bytes() + bytes(8) + tail)
        rows, reader = read(path)
        assert (len(rows), reader.damage, reader.uncommitted) == (3, {}, 8 + len(tail))

    def test_bytes_after_the_end_of_a_stream_are_damage(self, path):
        whole = path.read_bytes()
        end = b"\xff\xff\xff\xff\0\0\0\0"
        path.write_bytes(whole + end)
        assert read(path)[1].damage == {}
        path.write_bytes(whole + end + b"more")
        assert list(read(path)[1].damage) == [len(whole)]
