import errno
import fcntl
import os

import pyarrow as pa
import pytest
from datasets import Dataset

from rolltap.addons.store import compaction, staging
from rolltap.addons.store.compaction import compact
from rolltap.addons.store.segment import Segment, SegmentReader

SCHEMA = pa.schema([("session_id", pa.string()), ("number", pa.int32()), ("text", pa.string())])


def batch(*numbers, sessions="s", length=10):
    """Return a commit. Row k belongs to the session named by the k-th letter."""
    ids = [sessions[k % len(sessions)] for k in range(len(numbers))]
    return pa.record_batch([ids, pa.array(numbers, pa.int32()), ["é" * length] * len(numbers)], schema=SCHEMA)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "calls-0.arrow"


@pytest.fixture
def opened(path):
    with_commits = Segment(path, SCHEMA)
    yield with_commits
    with_commits.close()


def numbers_of(rows):
    return rows["number"].to_pylist()


def read(path):
    """Return the numbers in a file, and its damage."""
    with SegmentReader(path) as reader:
        return [number for _, rows in reader for number in numbers_of(rows)], reader.damage


class TestCompact:
    def test_it_keeps_every_row_and_the_order_within_a_session(self, path, opened):
        for number in range(0, 60, 3):
            opened.append(batch(number, number + 1, number + 2, sessions="abcde"[number % 5 :] + "xyz"))
        opened.close()
        before = pa.ipc.open_stream(path.read_bytes()).read_all()
        compact(path)
        after = pa.ipc.open_stream(path.read_bytes()).read_all()
        assert after.schema == before.schema
        assert after.num_rows == before.num_rows == 60
        for session in before["session_id"].unique():
            rows = [table.filter(pa.compute.equal(table["session_id"], session)) for table in (before, after)]
            assert rows[0].equals(rows[1])

    @pytest.mark.parametrize(("bound", "most"), [("BATCH_BYTES", 5000), ("BATCH_ROWS", 12)])
    def test_rows_of_a_session_lie_together_in_few_batches(self, path, opened, monkeypatch, bound, most):
        monkeypatch.setattr(compaction, bound, most)
        for number in range(100):
            opened.append(batch(number, sessions="ab"[number % 2], length=200))
        opened.close()
        compact(path)
        with SegmentReader(path) as reader:
            batches = [rows for _, rows in reader]
        assert 5 < len(batches) < 15
        assert all(rows.num_rows <= compaction.BATCH_ROWS for rows in batches)
        ids = [session for rows in batches for session in rows["session_id"].to_pylist()]
        assert ids == ["a"] * 50 + ["b"] * 50

    def test_events_without_a_session_are_kept(self, path, opened):
        without = batch(1).set_column(0, "session_id", pa.array([None], pa.string()))
        for rows in (batch(0), without, batch(2)):
            opened.append(rows)
        opened.close()
        compact(path)
        assert read(path) == ([0, 2, 1], {})

    def test_a_reader_of_the_old_file_reads_on(self, path, opened):
        for number in range(3):
            opened.append(batch(number))
        with SegmentReader(path) as reader:
            rows = iter(reader)
            next(rows)
            compact(path)
            assert [numbers_of(batch) for _, batch in rows] == [[1], [2]]

    def test_a_file_of_one_batch_is_left_alone(self, path, opened):
        opened.append(batch(0))
        inode = path.stat().st_ino
        compact(path)
        assert path.stat().st_ino == inode

    def test_a_damaged_file_is_left_alone(self, path, opened):
        for number in range(3):
            opened.append(batch(number))
        os.truncate(path, opened.size - 1)
        contents = path.read_bytes()
        compact(path)
        assert path.read_bytes() == contents

    @pytest.mark.parametrize("call", ["fsync", "rename"])
    def test_a_failure_leaves_the_file_and_no_other(self, path, opened, monkeypatch, call):
        for number in range(3):
            opened.append(batch(number))
        contents = path.read_bytes()

        def fail(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space"):
            compact(path)
        assert path.read_bytes() == contents
        assert list(path.parent.iterdir()) == [path]

    def test_the_unfinished_file_of_another_process_is_left_alone(self, path, opened):
        for number in range(3):
            opened.append(batch(number))
        theirs = staging.hidden_name(path)
        theirs.write_bytes(b"theirs")
        with pytest.raises(FileExistsError):
            compact(path)
        assert theirs.read_bytes() == b"theirs"

    def test_the_copy_is_locked_until_it_has_the_name(self, path, opened, monkeypatch):
        for number in range(3):
            opened.append(batch(number))
        real = os.rename

        def rename(source, target):
            with open(source) as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            real(source, target)

        monkeypatch.setattr(os, "rename", rename)
        compact(path)
        assert read(path) == ([0, 1, 2], {})


class TestLostEnd:
    """A compacted file was written at once and says how many rows it has: it has no uncommitted tail."""

    @pytest.fixture
    def compacted(self, path, opened, monkeypatch):
        monkeypatch.setattr(compaction, "BATCH_ROWS", 1)
        for number in range(3):
            opened.append(batch(number))
        opened.close()
        compact(path)
        return path

    @pytest.fixture
    def offsets(self, compacted):
        with SegmentReader(compacted) as reader:
            return [offset for offset, _ in reader]

    def test_wherever_it_is_cut_its_lost_rows_are_damage(self, compacted, offsets):
        whole = compacted.read_bytes()
        for size in range(len(whole) + 1):
            compacted.write_bytes(whole[:size])
            numbers, damage = read(compacted)
            assert numbers == [0, 1, 2][: len(numbers)]
            assert len(numbers) == 3 or damage, size
            if size in offsets:
                assert damage == {size: f"it lost its end: {len(numbers)} of its 3 rows are left"}

    def test_an_end_that_became_zeros_is_damage_and_no_uncommitted_tail(self, compacted, offsets):
        whole = compacted.read_bytes()
        for number, offset in enumerate(offsets):
            compacted.write_bytes(whole[:offset] + bytes(len(whole) - offset))
            with SegmentReader(compacted) as reader:
                assert [numbers_of(rows) for _, rows in reader] == [[0], [1], [2]][:number]
            assert reader.damage == {offset: f"it lost its end: {number} of its 3 rows are left"}
            assert reader.uncommitted == 0

    def test_an_end_marker_that_is_missing_is_no_damage(self, compacted):
        os.truncate(compacted, compacted.stat().st_size - 8)
        assert read(compacted) == ([0, 1, 2], {})

    def test_a_number_of_rows_that_cannot_be_read_says_nothing(self, compacted):
        data = compacted.read_bytes()
        place = data.index(b"rolltap.rows")
        assert data.rindex(b"3\0", 0, place) > 0
        place = data.rindex(b"3\0", 0, place)
        compacted.write_bytes(data[:place] + b"?" + data[place + 1 :])
        assert read(compacted) == ([0, 1, 2], {})

    def test_a_reader_that_goes_on_from_its_end_finds_no_damage(self, compacted, offsets):
        with SegmentReader(compacted) as reader:
            assert [numbers_of(rows) for _, rows in reader.batches_from(offsets[2])] == [[2]]
            assert list(reader.batches_from(reader.end)) == []
        assert reader.damage == {}

    def test_libraries_read_it_as_they_read_the_file_that_grew(self, compacted):
        assert Dataset.from_file(str(compacted))["number"][:] == [0, 1, 2]
        assert pa.ipc.open_stream(compacted.read_bytes()).read_all().schema == SCHEMA
