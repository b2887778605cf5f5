import errno
import os
import subprocess
import sys

import pyarrow as pa
import pytest
from datasets import Dataset, load_dataset

from rolltap.addons.store.segment import Segment, SegmentReader, rows_of_session

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


def read_stream(source):
    """Read as `datasets` does. Raises when the file is not a stream of complete messages."""
    with source, pa.ipc.open_stream(source) as reader:
        return numbers_of(reader.read_all())


@pytest.fixture
def every_write(monkeypatch):
    """Split writes into pieces of at most 300 bytes. Return the list of functions to call after each piece."""
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
    def test_every_reader_sees_a_commit_whole_or_not_at_all_while_it_is_written(self, path, opened, every_write):
        opened.append(batch(0))
        seen = []

        def look():
            numbers, damage = read(path)
            assert damage == {}
            assert numbers == read_stream(pa.memory_map(str(path))) == read_stream(pa.OSFile(str(path)))
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
            seen.append(load_dataset("arrow", data_files=str(path), cache_dir=folder)["train"]["number"][:])

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
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, data[:2000], offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match="No space"):
            opened.append(batch(1, length=3000))
        assert read(path) == ([0], {})
        assert path.stat().st_size < opened.size + 100
        assert {tuple(read_stream(source)) for source in mapped} == {(0,)}

    def test_it_is_locked_until_it_is_closed(self, path, opened):
        opened.append(batch(0))
        script = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = [sys.executable, "-c", script, path]
        locked = subprocess.run(other, capture_output=True, text=True)
        assert "BlockingIOError" in locked.stderr
        opened.close()
        assert subprocess.run(other).returncode == 0


class TestReader:
    def test_a_wrong_byte_of_the_schema_is_reported_as_damage_and_does_not_raise(self, path, opened):
        opened.append(batch(0))
        contents = path.read_bytes()
        for position in range(opened.size - len(batch(0).serialize())):
            path.write_bytes(contents[:position] + bytes([contents[position] ^ 0xFF]) + contents[position + 1 :])
            with SegmentReader(path) as reader:
                assert reader.schema is not None or reader.damage[0].startswith("it has no schema")

    def test_a_batch_can_be_read_at_the_offset_that_iterating_gave(self, path, opened):
        for number in range(3):
            opened.append(batch(number))
        with SegmentReader(path) as reader:
            offsets = [offset for offset, _ in reader]
            assert [numbers_of(reader.read(offset)) for offset in reversed(offsets)] == [[2], [1], [0]]

    def test_the_rows_of_a_session_are_picked_from_a_batch(self):
        mixed = batch(*range(5), sessions="ab")
        assert numbers_of(rows_of_session(mixed, "b")) == [1, 3]
        without = mixed.set_column(0, "session_id", pa.array(["a", None, "b", None, None]))
        assert numbers_of(rows_of_session(without, None)) == [1, 3, 4]
