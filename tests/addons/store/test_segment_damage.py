import pytest

from rolltap.addons.store.segment import Segment, SegmentReader
from tests.addons.store.test_segment import SCHEMA, batch, offsets_of, read

ALL = [[0], [1], [2]]


def sessions_named(number):
    return batch(number, sessions=[f"s{number}"])


@pytest.fixture
def path(tmp_path):
    """Return the path of a file with three commits."""
    segment = Segment(tmp_path / "x.arrow", SCHEMA)
    for number in range(3):
        segment.append(sessions_named(number))
    segment.close()
    return segment.path


@pytest.fixture
def offsets(path):
    """Return the offset of each commit."""
    return offsets_of(path)


def change(path, position, *values):
    """Change the byte at a position, or those from there on to these values."""
    data = bytearray(path.read_bytes())
    if values:
        data[position : position + len(values)] = bytes(values)
    else:
        data[position] ^= 0x40
    path.write_bytes(data)


def without_the_second(path):
    """Assert that a reader yields all commits but the second one, and return the reader."""
    found, reader = read(path, SCHEMA)
    assert found == [[0], [2]]
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
        change(path, offsets[1], *bytes(size or offsets[2] - offsets[1]))
        reader = without_the_second(path)
        assert list(reader.damage) == [offsets[1]]
        assert reader.uncommitted == 0

    def test_bytes_that_look_like_a_message_do_not_hide_the_messages_after_them(
        self, path, offsets
    ):
        change(path, offsets[1], *b"garbage.")
        # with the next message's bytes they look like a marker
        change(path, offsets[2] - 2, 0xFF, 0xFF)
        without_the_second(path)

    def test_whatever_byte_is_changed_only_its_commit_is_lost(self, path, offsets):
        whole = path.read_bytes()
        for position in range(len(whole)):
            change(path, position)
            found, reader = read(path, SCHEMA)
            assert len(found) == 3 or reader.damage
            assert len(found) >= 2 or position < offsets[0]
            assert reader.uncommitted == 0
            with SegmentReader(path) as reader:  # it does not know the schema
                assert reader.schema is not None or reader.damage[0].startswith("it has no schema")
            path.write_bytes(whole)


class TestEnd:
    def test_wherever_a_file_is_cut_the_commit_that_lost_its_end_is_damage(self, path, offsets):
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            found, reader = read(path, SCHEMA)
            begun = [offset for offset in offsets if offset < size]
            assert list(reader.damage) == ([] if size in offsets else [max(begun, default=0)])
            assert found == ALL[: sum(offset <= size for offset in offsets[1:])]
            assert reader.uncommitted == 0

    @pytest.mark.parametrize("size", [0, 1, 7, 8, 100, "minus one"])
    def test_a_tail_that_begins_with_zeros_was_never_committed(self, path, size):
        if size == "minus one":
            tail = bytes(8) + b"\xff\xff\xff\xff" + bytes(20)
        else:
            tail = sessions_named(3).serialize().to_pybytes()[8 : 8 + size]
        path.write_bytes(path.read_bytes() + bytes(8) + tail)
        found, reader = read(path, SCHEMA)
        assert found == ALL
        assert reader.damage == {}
        assert reader.uncommitted == 8 + len(tail)

    def test_bytes_after_the_end_of_a_stream_are_damage(self, path):
        whole = path.read_bytes()
        end = b"\xff\xff\xff\xff\0\0\0\0"
        path.write_bytes(whole + end)
        assert read(path)[1].damage == {}
        path.write_bytes(whole + end + b"more")
        assert list(read(path)[1].damage) == [len(whole)]
