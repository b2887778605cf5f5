import logging
import os
from pathlib import Path

import pyarrow as pa
import pytest

from rolltap.addons.store import index as index_module
from rolltap.addons.store import tables
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.segment import SegmentReader, compact
from rolltap.addons.store.tables import RunWriter, run_files
from tests import factories


def make_call(number, session_id):
    return factories.make_call(number, [1], [number], session_id=session_id)


@pytest.fixture
def files(run):
    """Write three segments of small batches, each with calls of all sessions."""
    for writer in range(3):
        with RunWriter(run) as records:
            for number in range(9):
                records.add_call(make_call(9 * writer + number, "abc"[number % 3]))
            with pytest.MonkeyPatch.context() as without:
                without.setattr(tables, "compact", lambda path: None)
                records.close()
    return run_files(run, "calls")


def rows(index):
    found = {}
    for session_id in index.session_ids:
        found[session_id] = []
        for batch in index.batches(session_id):
            found[session_id] += batch["call_id"].to_pylist()
    return found


def test_a_file_that_is_compacted_while_the_index_is_open_has_the_same_rows(run, files):
    with SessionIndex(run, "calls") as index:
        before = rows(index)
    assert before["b"] == [str(number) for number in range(1, 27, 3)]
    for compacted in range(4):
        with SessionIndex(run, "calls") as index:
            for path in files[:compacted]:
                compact(path)
            assert rows(index) == before


def test_a_file_that_is_compacted_while_a_session_is_read_has_the_same_rows(run, files):
    with SessionIndex(run, "calls") as index:
        seen = []
        for batch in index.batches("c"):
            seen += batch["call_id"].to_pylist()
            if len(seen) in (2, 4):
                compact(files[len(seen) // 2 - 1])
        assert seen == [str(number) for number in range(2, 27, 3)]
        assert rows(index)["a"] == [str(number) for number in range(0, 27, 3)]


def test_a_file_that_is_compacted_while_it_is_opened_has_the_same_rows(run, files, monkeypatch):
    real = pa.memory_map

    def memory_map(path):
        source = real(path)
        monkeypatch.setattr(pa, "memory_map", real)
        compact(Path(path))
        return source

    with SessionIndex(run, "calls") as index:
        monkeypatch.setattr(pa, "memory_map", memory_map)
        assert rows(index)["a"] == [str(number) for number in range(0, 27, 3)]


def test_few_files_are_open_at_a_time(run, files, monkeypatch):
    monkeypatch.setattr(index_module, "OPEN_FILES", 2)
    with SessionIndex(run, "calls") as index:
        assert rows(index)["a"] == [str(number) for number in range(0, 27, 3)]
        maps = Path("/proc/self/maps").read_text()
        assert sum(str(path) in maps for path in files) <= 2


@pytest.fixture
def read(monkeypatch):
    """Return the list of (file name, byte offset) of the batches that scans read."""
    read = []
    real = SegmentReader.batches_from

    def batches_from(self, start):
        for offset, batch in real(self, start):
            read.append((self.path.name, offset))
            yield offset, batch

    monkeypatch.setattr(SegmentReader, "batches_from", batches_from)
    return read


class TestRefresh:
    def test_only_new_commits_are_read(self, run, read):
        writer = RunWriter(run)
        writer.add_call(make_call(0, "a"))
        with SessionIndex(run, "calls") as index:
            for number in range(1, 5):
                writer.add_call(make_call(number, "ab"[number % 2]))
                RunWriter(run).add_call(make_call(10 + number, "a"))
                assert "a" in rows(index)
                index.refresh()
                index.refresh()
            assert rows(index) == {"a": ["0", "2", "4", "11", "12", "13", "14"], "b": ["1", "3"]}
        assert len(read) == len(set(read)) == 9

    def test_compacted_segments_are_read_once_and_their_rows_stay(self, run, read):
        writer = RunWriter(run)
        with SessionIndex(run, "calls") as index:
            for number in range(4):
                writer.add_call(make_call(number, "ab"[number % 2]))
            index.refresh()
            writer.close()
            read.clear()
            for _ in range(3):
                index.refresh()
                assert rows(index) == {"a": ["0", "2"], "b": ["1", "3"]}
            assert len(read) == 1

    def test_skipped_segments_are_read_later(self, run):
        mine = RunWriter(run)
        other = RunWriter(run)
        for number, writer in enumerate([mine, other, mine]):
            writer.add_call(make_call(number, "a"))
        with SessionIndex(run, "calls", mine.owns) as index:
            assert rows(index) == {"a": ["1"]}
            index.refresh()
            assert rows(index) == {"a": ["0", "2", "1"]}

    def test_a_commit_is_read_when_it_is_published_and_not_before(self, run):
        """The file has its final length before the commit can be read."""
        writer = RunWriter(run)
        writer.add_call(make_call(0, "a"))
        (path,) = run_files(run, "calls")
        end = path.stat().st_size
        writer.add_call(make_call(1, "a"))
        contents = path.read_bytes()
        prefix = contents[end : end + 8]
        path.write_bytes(contents[:end] + bytes(8) + contents[end + 8 :])
        with SessionIndex(run, "calls") as index:
            assert rows(index) == {"a": ["0"]}
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), prefix, end)
            index.refresh()
            assert rows(index) == {"a": ["0", "1"]}

    def test_damage_is_named_once_and_what_follows_it_is_read(self, run, caplog):
        writer = RunWriter(run)
        for number in range(2):
            writer.add_call(make_call(number, "a"))
        (path,) = run_files(run, "calls")
        with SegmentReader(path) as reader:
            _, offset = [offset for offset, _ in reader]
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), b"damage", offset + 8)
        with caplog.at_level(logging.WARNING), SessionIndex(run, "calls") as index:
            for number in range(2, 4):
                writer.add_call(make_call(number, "a"))
                index.refresh()
            assert rows(index) == {"a": ["0", "2", "3"]}
        assert len(caplog.records) == 1
