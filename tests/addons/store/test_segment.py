import errno
import fcntl
import os
from itertools import chain

import pyarrow as pa
import pytest
from datasets import Dataset, load_dataset

from rolltap.addons.store import segment, staging
from rolltap.addons.store.records import LATER_COLUMNS
from rolltap.addons.store.segment import Segment, SegmentReader, compact, rows_of_session

SCHEMA = pa.schema([("session_id", pa.string()), ("number", pa.int32()), ("text", pa.string())])


def batch(*numbers, sessions="s", length=10):
    """Return a commit. Row k belongs to the session named by the k-th letter."""
    ids = [sessions[k % len(sessions)] for k in range(len(numbers))]
    columns = [ids, pa.array(numbers, pa.int32()), ["é" * length] * len(numbers)]
    return pa.record_batch(columns, schema=SCHEMA)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "calls-0.arrow"


@pytest.fixture
def opened(path):
    """Yield a segment without commits."""
    segment = Segment(path, SCHEMA)
    yield segment
    segment.close()


@pytest.fixture
def three(opened):
    """Return a segment with the commits 0, 1 and 2."""
    for number in range(3):
        opened.append(batch(number))
    return opened


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def numbers_of(rows):
    return rows["number"].to_pylist()


def read(path, schema=None):
    """Return the numbers in each commit of a file, and the reader that has read them."""
    with SegmentReader(path, schema) as reader:
        return [numbers_of(rows) for _, rows in reader], reader


def offsets_of(path):
    with SegmentReader(path) as reader:
        return [offset for offset, _ in reader]


def test_a_file_without_the_later_columns_has_no_values_there_and_one_without_others_is_damaged(
    path,
):
    later = pa.field(sorted(LATER_COLUMNS)[0], pa.float64())
    last = pa.field("last", pa.string())
    old = Segment(path, SCHEMA.append(last))
    for number in (1, 2):
        old.append(batch(number).append_column(last, pa.array(["a"])))
    old.close()
    table = SCHEMA.append(later).append(last)
    for _ in ("as it was written", "compacted"):
        with SegmentReader(path, table) as reader:
            rows = pa.Table.from_batches([rows for _, rows in reader])
        assert rows.schema.names == table.names
        assert numbers_of(rows) == [1, 2]
        assert rows[later.name].null_count == 2
        assert rows["last"].to_pylist() == ["a", "a"]
        compact(path)
    found, reader = read(path, table.append(pa.field("more", pa.string())))
    assert found == []
    assert "does not have the columns of its table" in reader.damage[0]


def lock(path):
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_stream(source):
    """Read as `datasets` does. Raises when the file is not a stream of complete messages."""
    with source, pa.ipc.open_stream(source) as reader:
        return numbers_of(reader.read_all())


@pytest.fixture
def every_write(monkeypatch):
    """Split writes into pieces of at most 300 bytes. Return the list of functions to call after
    each piece."""
    looks = []
    pwrite = os.pwrite

    def pieces(descriptor, data, offset):
        written = pwrite(descriptor, data[:300], offset)
        for look in looks:
            look()
        return written

    monkeypatch.setattr(os, "pwrite", pieces)
    return looks


class TestGrowing:
    def test_every_reader_sees_a_commit_whole_or_not_at_all_while_it_is_written(
        self, path, opened, every_write, tmp_path
    ):
        seen = []
        mapped = []

        def look():
            commits, reader = read(path)
            numbers = [*chain(*commits)]
            assert reader.damage == {}
            assert numbers == read_stream(pa.memory_map(str(path)))
            assert numbers == read_stream(pa.OSFile(str(path)))
            assert numbers == Dataset.from_file(str(path))["number"][:]
            if len(seen) < 1:
                files = {"data_files": str(path), "cache_dir": str(tmp_path / "cache")}
                assert numbers == load_dataset("arrow", **files)["train"]["number"][:]
            seen.append(numbers)
            mapped.append(pa.memory_map(str(path)))

        opened.append(batch(0))
        every_write.append(look)
        opened.append(batch(1, 2, length=1000))
        look()
        assert len(seen) > 10
        assert all(numbers == [0] for numbers in seen[:-2])
        assert seen[-1] == [0, 1, 2]
        # what was mapped during a commit can be read after it
        assert {tuple(read_stream(source)) for source in mapped} == {(0, 1, 2)}

    def test_the_file_appears_with_its_first_commit(self, path, opened, every_write):
        assert list(path.parent.iterdir()) == []
        visible = []
        every_write.append(lambda: visible.append(path.exists()))
        opened.append(batch(0))
        assert visible
        assert not any(visible)
        assert read(path)[0] == [[0]]
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.parametrize("at", range(4))
    def test_a_write_that_fails_leaves_nothing_of_its_commit(self, path, opened, monkeypatch, at):
        opened.append(batch(0))
        pwrite = os.pwrite
        mapped = []

        def failing(descriptor, data, offset):
            mapped.append(pa.memory_map(str(path)))
            if len(mapped) == at + 1:
                full()
            return pwrite(descriptor, data[:2000], offset)

        monkeypatch.setattr(os, "pwrite", failing)
        with pytest.raises(OSError, match="No space"):
            opened.append(batch(1, length=3000))
        found, reader = read(path)
        assert found == [[0]]
        assert reader.damage == {}
        assert path.stat().st_size < opened.size + 100
        assert {tuple(read_stream(source)) for source in mapped} == {(0,)}

    def test_it_is_locked_until_it_is_closed(self, path, opened):
        opened.append(batch(0))
        with pytest.raises(BlockingIOError):
            lock(path)
        opened.close()
        lock(path)


class TestReader:
    def test_a_batch_can_be_read_at_the_offset_that_iterating_gave(self, path, three):
        offsets = offsets_of(path)
        with SegmentReader(path) as reader:
            found = [numbers_of(reader.read(offset)) for offset in reversed(offsets)]
        assert found == [[2], [1], [0]]

    def test_the_rows_of_a_session_are_picked_from_a_batch(self):
        mixed = batch(*range(5), sessions="ab")
        assert numbers_of(rows_of_session(mixed, "b")) == [1, 3]
        without = mixed.set_column(0, "session_id", pa.array(["a", None, "b", None, None]))
        assert numbers_of(rows_of_session(without, None)) == [1, 3, 4]


class TestCompact:
    def test_it_keeps_every_row_and_the_order_within_a_session(self, path, opened):
        """Also rows of events without a session."""
        for number in range(0, 60, 3):
            letters = "abcde"[number % 5 :] + "xyz"
            opened.append(batch(number, number + 1, number + 2, sessions=letters))
        opened.append(batch(60).set_column(0, "session_id", pa.array([None], pa.string())))
        opened.close()
        before = pa.ipc.open_stream(path.read_bytes()).read_all()
        compact(path)
        after = pa.ipc.open_stream(path.read_bytes()).read_all()
        assert after.schema == before.schema
        assert after.num_rows == before.num_rows == 61
        order = [("session_id", "ascending"), ("number", "ascending")]
        assert after.sort_by(order).equals(before.sort_by(order))
        for session in before["session_id"].unique():
            numbers = numbers_of(after.filter(pa.compute.equal(after["session_id"], session)))
            assert numbers == sorted(numbers)

    def test_a_copy_that_lacks_rows_does_not_replace_the_file(self, path, three, monkeypatch):
        before = path.read_bytes()
        monkeypatch.setattr(segment, "rows_of_session", lambda batch, _: batch.slice(1))
        with pytest.raises(OSError, match="0 of 3 rows were copied"):
            compact(path)
        assert path.read_bytes() == before

    @pytest.mark.parametrize(("bound", "most"), [("BATCH_BYTES", 5000), ("BATCH_ROWS", 12)])
    def test_rows_of_a_session_lie_together_in_few_batches(
        self, path, opened, monkeypatch, bound, most
    ):
        monkeypatch.setattr(segment, bound, most)
        for number in range(100):
            opened.append(batch(number, sessions="ab"[number % 2], length=200))
        opened.close()
        compact(path)
        found, _ = read(path)
        assert 5 < len(found) < 15
        assert max(map(len, found)) <= segment.BATCH_ROWS
        assert [*chain(*found)] == [*range(0, 100, 2), *range(1, 100, 2)]

    def test_a_reader_of_the_old_file_reads_on(self, path, three):
        with SegmentReader(path) as reader:
            rows = iter(reader)
            next(rows)
            compact(path)
            assert [numbers_of(batch) for _, batch in rows] == [[1], [2]]

    @pytest.mark.parametrize(("commits", "lost"), [(1, 0), (3, 1)], ids=["one batch", "damaged"])
    def test_a_file_of_one_batch_and_a_damaged_one_are_left_alone(
        self, path, opened, commits, lost
    ):
        for number in range(commits):
            opened.append(batch(number))
        os.truncate(path, opened.size - lost)
        inode = path.stat().st_ino
        contents = path.read_bytes()
        compact(path)
        assert path.stat().st_ino == inode
        assert path.read_bytes() == contents

    @pytest.mark.parametrize("call", ["fsync", "rename"])
    def test_a_failure_leaves_the_file_and_no_other(self, path, three, monkeypatch, call):
        contents = path.read_bytes()
        monkeypatch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space"):
            compact(path)
        assert path.read_bytes() == contents
        assert list(path.parent.iterdir()) == [path]

    def test_the_unfinished_file_of_another_process_is_left_alone(self, path, three):
        theirs = staging.hidden_name(path)
        theirs.write_bytes(b"theirs")
        with pytest.raises(FileExistsError):
            compact(path)
        assert theirs.read_bytes() == b"theirs"

    def test_the_copy_is_locked_until_it_has_the_name(self, path, three, monkeypatch):
        rename = os.rename

        def locked(source, target):
            with pytest.raises(BlockingIOError):
                lock(source)
            rename(source, target)

        monkeypatch.setattr(os, "rename", locked)
        compact(path)
        assert read(path)[0] == [[0, 1, 2]]


class TestLostEnd:
    """A compacted file was written at once and says how many rows it has: it has no uncommitted
    tail."""

    @pytest.fixture
    def compacted(self, path, three, monkeypatch):
        monkeypatch.setattr(segment, "BATCH_ROWS", 1)
        three.close()
        compact(path)
        return path

    @pytest.mark.parametrize("zeros", [False, True], ids=["cut", "zeros"])
    def test_wherever_its_end_is_lost_the_rows_are_damage(self, compacted, zeros):
        whole = compacted.read_bytes()
        offsets = offsets_of(compacted)
        sizes = offsets if zeros else range(len(whole) + 1)
        for size in sizes:
            tail = bytes(len(whole) - size) if zeros else b""
            compacted.write_bytes(whole[:size] + tail)
            found, reader = read(compacted)
            assert found == [[0], [1], [2]][: len(found)]
            assert len(found) == 3 or reader.damage, size
            if size in offsets:
                assert len(found) == offsets.index(size)
                why = f"it lost its end: {len(found)} of its 3 rows are left"
                assert reader.damage == {size: why}
                assert reader.uncommitted == 0

    def test_a_missing_end_marker_and_a_number_of_rows_that_cannot_be_read_are_no_damage(
        self, compacted
    ):
        data = compacted.read_bytes()
        place = data.rindex(b"3\0", 0, data.index(b"rolltap.rows"))
        for changed in (data[:-8], data[:place] + b"?" + data[place + 1 :]):
            compacted.write_bytes(changed)
            found, reader = read(compacted)
            assert found == [[0], [1], [2]]
            assert reader.damage == {}

    def test_a_reader_that_goes_on_from_its_end_finds_no_damage(self, compacted):
        last = offsets_of(compacted)[2]
        with SegmentReader(compacted) as reader:
            assert [numbers_of(rows) for _, rows in reader.batches_from(last)] == [[2]]
            assert list(reader.batches_from(reader.end)) == []
        assert reader.damage == {}

    def test_libraries_read_it_as_they_read_the_file_that_grew(self, compacted):
        assert Dataset.from_file(str(compacted))["number"][:] == [0, 1, 2]
        assert pa.ipc.open_stream(compacted.read_bytes()).read_all().schema == SCHEMA
