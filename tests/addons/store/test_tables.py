import errno
import json
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from rolltap.addons.errors import RunError
from rolltap.addons.store import tables
from rolltap.addons.store.records import SCHEMA_VERSION, Event
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import RunWriter, read_rows, run_files
from tests import factories

SESSION = factories.make_session(reward=0.5)


def make_call(number):
    return factories.make_call(number, [1, 2], [3, number])


def writing(run, sync, *numbers):
    """Return an open writer that has committed calls."""
    writer = RunWriter(run, sync)
    for number in numbers:
        writer.add_call(make_call(number))
    return writer


def write_calls(run, numbers):
    """Commit calls, leave their file as a killed writer does, and return its path."""
    known = set(run.glob("calls-*.arrow"))
    writing(run, "session", *numbers)
    [path] = set(run.glob("calls-*.arrow")) - known
    return path


def without_digests(rows):
    return [{name: value for name, value in row.items() if name != "digest"} for row in rows]


def commits(run):
    """Return the number of commits of each file of calls."""
    return [sum(1 for _ in SegmentReader(path)) for path in run_files(run, "calls")]


def call_ids(run):
    return [row["call_id"] for row in read_rows(run, "calls")]


class TestRunWriter:
    def test_each_table_has_its_rows_as_the_writer_and_datasets_know_them(self, run):
        event = Event(kind="refused", host="example.com", method="GET", path="/")
        rows = {"calls": make_call(0), "sessions": SESSION, "events": event}
        with RunWriter(run) as writer:
            writer.add_call(rows["calls"])
            writer.add_session(SESSION)
            writer.add_event(event)
            for table, row in rows.items():
                (path,) = run_files(run, table)
                assert without_digests(read_rows(run, table)) == [row.to_row()]
                assert without_digests(Dataset.from_file(str(path))) == [row.to_row()]

    def test_several_writers_share_a_run_and_commits_can_be_read_meanwhile(self, run):
        with RunWriter(run) as one, RunWriter(run) as other:
            for number in range(6):
                (other if number % 2 else one).add_call(make_call(number))
                assert len(call_ids(run)) == number + 1
        assert call_ids(run) == ["0", "2", "4", "1", "3", "5"]


@pytest.fixture
def disk(monkeypatch):
    """Patch writes. Return whether the disk is `full`, and of `fdatasync` the tables that it
    `synced`, and a hook called `before`."""
    disk = SimpleNamespace(full=False, synced=[], before=lambda: None)
    real_sync, real_write = os.fdatasync, os.pwrite

    def fdatasync(descriptor):
        disk.before()
        real_sync(descriptor)
        disk.synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-")[0])

    def pwrite(descriptor, data, offset):
        if disk.full:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return real_write(descriptor, data, offset)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(os, "pwrite", pwrite)
    return disk


def fail_to_add(writer, disk, number):
    disk.full = True
    with pytest.raises(OSError, match="quota") as error:
        writer.add_call(make_call(number))
    assert error.value.errno == errno.EDQUOT
    disk.full = False


class TestFailedCommit:
    def test_the_next_commit_goes_to_another_file_and_both_files_are_synced(
        self, run, disk, caplog
    ):
        writer = writing(run, "session", 0, 1)
        fail_to_add(writer, disk, 2)
        writer.add_call(make_call(3))
        assert call_ids(run) == ["0", "1", "3"]
        assert caplog.records == []
        writer.end_session()
        assert disk.synced == ["calls", "calls"]
        assert commits(run) == [1, 1]
        writer.close()

    def test_a_failed_first_commit_leaves_no_file_and_the_next_one_can_be_read(
        self, run, disk, caplog
    ):
        RunWriter(run).close()
        for numbers in ([], [1]):
            with RunWriter(run) as writer:
                fail_to_add(writer, disk, 0)
                assert [path.name for path in run.iterdir()] == ["run.json"]
                for number in numbers:
                    writer.add_call(make_call(number))
        assert call_ids(run) == ["1"]
        assert caplog.records == []


class TestSync:
    def test_with_never_nothing_is_synced(self, run, disk):
        with writing(run, "never", 0) as writer:
            writer.add_session(SESSION)
            writer.end_session()
        assert disk.synced == []

    def test_with_session_the_files_are_synced_when_a_session_ends(self, run, disk):
        writer = writing(run, "session", 0)
        writer.add_event(Event(kind="refused"))
        assert disk.synced == []
        writer.end_session()
        assert disk.synced == ["calls", "events"]
        writer.add_session(SESSION)
        assert disk.synced == ["calls", "events", "sessions"]
        writer.add_call(make_call(1))
        writer.close()
        assert disk.synced == ["calls", "events", "sessions", "calls"]

    def test_synced_commits_are_not_synced_again(self, run, disk):
        with writing(run, "call", 0) as writer:
            for _ in range(3):
                writer.sync()
        assert disk.synced == ["calls"]

    def test_a_sync_during_another_one_waits_and_needs_no_fdatasync_of_its_own(self, run, disk):
        writer = writing(run, "call", 0)
        on_disk = []

        def sync():
            writer.sync()
            on_disk.append([*disk.synced])

        other = threading.Thread(target=sync)

        def busy():
            disk.before = lambda: None
            other.start()
            other.join(timeout=0.1)  # it has the time to return, and must not

        disk.before = busy
        writer.sync()
        other.join()
        assert on_disk == [["calls"]]
        assert disk.synced == ["calls"]
        writer.close()

    def test_a_commit_during_a_sync_needs_another_sync(self, run, disk):
        writer = writing(run, "call", 0)

        def busy():
            disk.before = lambda: None
            writer.add_call(make_call(1))

        disk.before = busy
        writer.sync()
        writer.sync()
        assert disk.synced == ["calls", "calls"]
        writer.close()

    def test_after_a_failed_sync_nothing_more_is_recorded_and_earlier_commits_can_be_read(
        self, run, disk
    ):
        writer = writing(run, "call", 0, 1)

        def fail():
            disk.before = lambda: None
            raise OSError(errno.EIO, "Input/output error")

        disk.before = fail
        why = r"may not be on the disk \(.*Input/output error\): stop the recorder"
        with pytest.raises(OSError, match=why):
            writer.sync()
        with pytest.raises(OSError, match="may not be on the disk"):
            writer.add_call(make_call(2))
        for attempt in (writer.sync, writer.end_session, writer.close):
            with pytest.raises(OSError, match="may not be on the disk"):
                attempt()
        assert call_ids(run) == ["0", "1"]


class TestEndSession:
    def test_large_segments_are_compacted_and_new_ones_begun(self, run, monkeypatch):
        monkeypatch.setattr(tables, "SEGMENT_BYTES", 10_000)
        writer = RunWriter(run)
        batches = []
        for number in range(6):
            writer.add_call(make_call(number))
            writer.end_session()
            batches.append(commits(run))
        assert batches == [[1], [2], [1], [1, 1], [1, 2], [1, 1]]
        assert call_ids(run) == [str(number) for number in range(6)]
        writer.close()

    def test_commits_go_on_while_a_segment_is_compacted(self, run, monkeypatch):
        monkeypatch.setattr(tables, "SEGMENT_BYTES", 1)
        real = tables.compact

        def compact(path):
            monkeypatch.setattr(tables, "compact", real)
            writer.add_call(make_call(2))
            writer.end_session()
            real(path)

        monkeypatch.setattr(tables, "compact", compact)
        with writing(run, "session", 0, 1) as writer:
            writer.end_session()
            assert call_ids(run) == ["0", "1", "2"]

    def test_a_segment_that_cannot_be_compacted_stays_as_it_is(self, run, monkeypatch, caplog):
        monkeypatch.setattr(tables, "SEGMENT_BYTES", 1)

        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        writing(run, "never", 0, 1).end_session()
        assert (
            "was not compacted and stays readable as it is: [Errno 28] No space left on device"
            in caplog.text
        )
        assert call_ids(run) == ["0", "1"]


class TestReadRows:
    @pytest.mark.parametrize(
        ("left", "found", "damage"),
        [(0, [], "it has no schema"), (-1, ["0"], "a commit cannot be")],
    )
    def test_a_cut_file_is_read_up_to_its_damage_with_a_warning_and_others_after_it(
        self, run, caplog, left, found, damage
    ):
        path = write_calls(run, [0, 1])
        write_calls(run, [2])
        os.truncate(path, path.stat().st_size + left if left else 0)
        assert call_ids(run) == [*found, "2"]
        (warning,) = caplog.records
        assert warning.levelno == logging.WARNING
        assert str(path) in warning.getMessage()
        assert damage in warning.getMessage()

    @pytest.mark.parametrize(
        ("change", "needed"), [(1, "a newer rolltap"), (-1, "an older rolltap")]
    )
    def test_another_schema_is_refused(self, run, change, needed):
        write_calls(run, [0])
        (run / "run.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION + change}))
        with pytest.raises(RunError, match=f"has schema {SCHEMA_VERSION + change}.*{needed}"):
            call_ids(run)


class TestWriteOutage:
    def test_lost_events_are_one_line_when_it_begins_and_one_when_it_ends(self, run, disk, caplog):
        writer = RunWriter(run)
        for _ in range(2):
            caplog.clear()
            for disk.full, times in ((True, 50), (False, 3)):
                for _ in range(times):
                    writer.note(Event(kind="refused"))
            first, last = [record.getMessage() for record in caplog.records]
            assert "until further notice: [Errno 122] Disk quota exceeded" in first
            assert last.endswith("can be written again: 50 events and routings were lost")

    def test_a_fault_is_written_once_the_disk_has_room(self, run, disk, caplog):
        with RunWriter(run) as writer:
            disk.full = True
            for call_id in ("a", "b"):
                writer.note(Event(kind="fault", call_id=call_id))
            assert list(read_rows(run, "events")) == []
            disk.full = False
            writer.add_event(Event(kind="ended", call_id="c"))
            writer.add_event(Event(kind="ended", call_id="d"))
        assert [event["call_id"] for event in read_rows(run, "events")] == ["c", "a", "b", "d"]
        assert caplog.records == []

    def test_faults_stay_in_their_order_when_there_is_room_for_another_event_alone(
        self, run, disk, monkeypatch
    ):
        with RunWriter(run) as writer:
            disk.full = True
            for call_id in ("a", "b"):
                writer.note(Event(kind="fault", call_id=call_id))
            add_batch = writer.add_batch

            def fill(table, batch):
                add_batch(table, batch)
                disk.full = True

            disk.full = False
            with monkeypatch.context() as patch:
                patch.setattr(writer, "add_batch", fill)
                writer.add_event(Event(kind="ended", call_id="c"))
            disk.full = False
            writer.add_event(Event(kind="ended", call_id="d"))
        assert [event["call_id"] for event in read_rows(run, "events")] == ["c", "d", "a", "b"]

    def test_room_for_a_long_call_is_required_with_one_line_when_it_is_missing_and_one_when_it_is_back(
        self, run, monkeypatch, caplog
    ):
        writer = RunWriter(run)
        writer.require_room()
        assert caplog.records == []
        with monkeypatch.context() as patch:
            patch.setattr(tables, "ROOM_BYTES", 2**62)
            for _ in range(20):
                with pytest.raises(OSError, match="MiB are free") as error:
                    writer.require_room()
        assert error.value.errno == errno.ENOSPC
        for _ in range(3):
            writer.require_room()
        first, last = [record.getMessage() for record in caplog.records]
        assert "MiB are free" in first
        assert last.endswith("can be written again: 20 calls were refused")
