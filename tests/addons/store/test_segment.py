import errno
import fcntl
import os

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
    return pa.record_batch(
        [ids, pa.array(numbers, pa.int32()), ["é" * length] * len(numbers)], schema=SCHEMA
    )


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


def read(path):
    """Return the numbers in a file, and its damage."""
    with SegmentReader(path) as reader:
        return [number for _, rows in reader for number in numbers_of(rows)], reader.damage


def test_a_file_without_the_later_columns_has_no_values_there_and_one_without_others_is_damaged(
    path,
):
    later = sorted(LATER_COLUMNS)[0]
    table = pa.schema([*SCHEMA, (later, pa.float64()), ("last", pa.string())])
    earlier = pa.schema([*SCHEMA, ("last", pa.string())])
    old = Segment(path, earlier)
    for number, last in ((1, "a"), (2, "b")):
        old.append(batch(number).append_column("last", pa.array([last])))
    old.close()
    for _ in ("as it was written", "compacted"):
        with SegmentReader(path, table) as reader:
            rows = pa.Table.from_batches([rows for _, rows in reader])
        assert rows.schema.names == table.names
        assert (numbers_of(rows), rows[later].null_count, rows["last"].to_pylist()) == (
            [1, 2],
            2,
            ["a", "b"],
        )
        compact(path)
    with SegmentReader(path, pa.schema([*table, ("more", pa.string())])) as reader:
        assert [*reader] == []
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
    real = os.pwrite

    def pwrite(descriptor, data, offset):
        written = real(descriptor, data[:300], offset)
        for look in looks:
            look()
        return written

    monkeypatch.setattr(os, "pwrite", pwrite)
    return looks


class TestGrowing:
    def test_every_reader_sees_a_commit_whole_or_not_at_all_while_it_is_written(
        self, path, opened, every_write
    ):
        opened.append(batch(0))
        seen = []

        def look():
            numbers, damage = read(path)
            assert damage == {}
            assert (
                numbers
                == read_stream(pa.memory_map(str(path)))
                == read_stream(pa.OSFile(str(path)))
            )
            assert numbers == Dataset.from_file(str(path))["number"][:]
            seen.append(numbers)

        every_write.append(look)
        opened.append(batch(1, 2, length=1000))
        look()
        assert len(seen) > 10
        assert all(numbers == [0] for numbers in seen[:-2])
        assert seen[-1] == [0, 1, 2]

    def test_what_was_mapped_during_a_commit_can_be_read_after_it(self, path, opened, every_write):
        opened.append(batch(0))
        mapped = []
        every_write.append(lambda: mapped.append(pa.memory_map(str(path))))
        opened.append(batch(1, length=1000))
        assert len(mapped) > 5
        assert {tuple(read_stream(source)) for source in mapped} == {(0, 1)}

    def test_load_dataset_reads_a_file_that_grows(self, path, opened, every_write, tmp_path):
        seen = []

        def look():
            every_write.clear()
            folder = str(tmp_path / f"cache{len(seen)}")
            seen.append(
                load_dataset("arrow", data_files=str(path), cache_dir=folder)["train"]["number"][:]
            )

        opened.append(batch(0))
        every_write.append(look)
        opened.append(batch(1, length=1000))
        look()
        assert seen == [[0], [0, 1]]

    def test_the_file_appears_with_its_first_commit(self, path, opened, every_write):
        assert list(path.parent.iterdir()) == []
        every_write.append(lambda: visible.append(path.exists()))
        visible = []
        opened.append(batch(0))
        assert not any(visible)
        assert read(path) == ([0], {})
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.parametrize("at", range(4))
    def test_a_write_that_fails_leaves_nothing_of_its_commit(self, path, opened, monkeypatch, at):
        opened.append(batch(0))
        real, offsets, mapped = os.pwrite, [], []

        def pwrite(descriptor, data, offset):
            offsets.append(offset)
            mapped.append(pa.memory_map(str(path)))
            if len(offsets) == at + 1:
                full()
            return real(descriptor, data[:2000], offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match="No space"):
            opened.append(batch(1, length=3000))
        assert read(path) == ([0], {})
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
        with SegmentReader(path) as reader:
            offsets = [offset for offset, _ in reader]
            assert [numbers_of(reader.read(offset)) for offset in reversed(offsets)] == [
                [2],
                [1],
                [0],
            ]

    def test_the_rows_of_a_session_are_picked_from_a_batch(self):
        mixed = batch(*range(5), sessions="ab")
        assert numbers_of(rows_of_session(mixed, "b")) == [1, 3]
        without = mixed.set_column(0, "session_id", pa.array(["a", None, "b", None, None]))
        assert numbers_of(rows_of_session(without, None)) == [1, 3, 4]


class TestCompact:
    def test_it_keeps_every_row_and_the_order_within_a_session(self, path, opened):
        for number in range(0, 60, 3):
            opened.append(
                batch(number, number + 1, number + 2, sessions="abcde"[number % 5 :] + "xyz")
            )
        opened.close()
        before = pa.ipc.open_stream(path.read_bytes()).read_all()
        compact(path)
        after = pa.ipc.open_stream(path.read_bytes()).read_all()
        assert after.schema == before.schema
        assert after.num_rows == before.num_rows == 60
        for session in before["session_id"].unique():
            rows = [
                table.filter(pa.compute.equal(table["session_id"], session))
                for table in (before, after)
            ]
            assert rows[0].equals(rows[1])

    def test_a_copy_that_lacks_rows_does_not_replace_the_file(self, path, three, monkeypatch):
        three.close()
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
        with SegmentReader(path) as reader:
            batches = [rows for _, rows in reader]
        assert 5 < len(batches) < 15
        assert all(rows.num_rows <= segment.BATCH_ROWS for rows in batches)
        ids = [session for rows in batches for session in rows["session_id"].to_pylist()]
        assert ids == ["a"] * 50 + ["b"] * 50

    def test_events_without_a_session_are_kept(self, path, opened):
        without = batch(1).set_column(0, "session_id", pa.array([None], pa.string()))
        for rows in (batch(0), without, batch(2)):
            opened.append(rows)
        opened.close()
        compact(path)
        assert read(path) == ([0, 2, 1], {})

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
        before = path.stat().st_ino, path.read_bytes()
        compact(path)
        assert (path.stat().st_ino, path.read_bytes()) == before

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
        real = os.rename

        def rename(source, target):
            with pytest.raises(BlockingIOError):
                lock(source)
            real(source, target)

        monkeypatch.setattr(os, "rename", rename)
        compact(path)
        assert read(path) == ([0, 1, 2], {})


class TestLostEnd:
    """A compacted file was written at once and says how many rows it has: it has no uncommitted
    tail."""

    @pytest.fixture
    def compacted(self, path, three, monkeypatch):
        monkeypatch.setattr(segment, "BATCH_ROWS", 1)
        three.close()
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

    def test_a_missing_end_marker_and_a_number_of_rows_that_cannot_be_read_are_no_damage(
        self, compacted
    ):
        data = compacted.read_bytes()
        place = data.rindex(b"3\0", 0, data.index(b"rolltap.rows"))
        for changed in (data[:-8], data[:place] + b"?" + data[place + 1 :]):
            compacted.write_bytes(changed)
            assert read(compacted) == ([0, 1, 2], {})

    def test_a_reader_that_goes_on_from_its_end_finds_no_damage(self, compacted, offsets):
        with SegmentReader(compacted) as reader:
            assert [numbers_of(rows) for _, rows in reader.batches_from(offsets[2])] == [[2]]
            assert list(reader.batches_from(reader.end)) == []
        assert reader.damage == {}

    def test_libraries_read_it_as_they_read_the_file_that_grew(self, compacted):
        assert Dataset.from_file(str(compacted))["number"][:] == [0, 1, 2]
        assert pa.ipc.open_stream(compacted.read_bytes()).read_all().schema == SCHEMA
