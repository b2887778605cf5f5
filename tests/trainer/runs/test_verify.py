import errno
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import DIGEST, Event
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.segment import BATCH_ROWS, SegmentReader
from rolltap.addons.store.tables import TABLES, RunWriter, read_rows, run_files
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.runs.merge import merge_runs
from rolltap.trainer.runs.verify import MOST_MISSING, check_session_rows, verify_run
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.traces.reader import RecordedCalls
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces
from tests.deep import examples
from tests.factories import START, make_call, make_session, write_run
from tests.trainer.runs.recorded_runs import ignore, record, recorded_sessions

NO_ROW = "has no row in sessions: its calls have no reward and no group"
STARTED = (
    "it was started, not recorded: it still runs, its recorder was killed, or the disk was full"
)
CHILD = {"parent_id": "a", "prefix_length": 2, "kind": "bridged"}


def verify(run, **options):
    return verify_run(run, ignore, **options)


def found(run):
    """Return grade, place and text of every finding."""
    return [(finding.grade, finding.where, finding.what) for finding in verify(run).findings]


@contextmanager
def killed_writer(run):
    """Yield a writer to `run` that is killed at the end: its files are not compacted, nor locked."""
    with tempfile.TemporaryDirectory() as alive, RunWriter(Path(alive), "never") as writer:
        yield writer
        shutil.copytree(alive, run, dirs_exist_ok=True)


def write_killed(run, *calls):
    write_metadata(run, {"model": "tiny"})
    with killed_writer(run) as writer:
        for call in calls:
            writer.add_call(call)
        writer.add_session(make_session())
    return run


@pytest.fixture
def run(tmp_path):
    """Write a run of two calls, the second of which continues the first, with a killed writer."""
    return write_killed(tmp_path / "run", make_call("a"), make_call("b", [1, 2, 3], [4], **CHILD))


def calls_file(run):
    [path] = run_files(run, "calls")
    return path


@pytest.fixture
def path(run):
    return calls_file(run)


def offsets(path):
    """Return the byte offsets of the commits of a file."""
    with SegmentReader(path) as reader:
        return [offset for offset, _ in reader]


def contents(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def no_room(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestSound:
    def test_a_sound_run_has_no_findings_and_its_rows_are_counted(self, run, tmp_path):
        verification = verify(run)
        assert verification.findings == []
        assert verification.sound
        assert verification.rows == {"calls": 2, "sessions": 1, "events": 0}
        compacted = write_run(tmp_path / "compacted", make_call(0), make_call(1), make_session())
        assert found(compacted) == []

    def test_a_session_without_a_row_is_counted_as_inspect_does(self, run):
        with RunWriter(run) as writer:
            writer.add_call(make_call("c", session_id="without-row"))
            assert verify(run).sound  # while it is written
        assert verify(run).sessions == 2
        assert len(summarize(run).session_rows) == 2


INVALID = [
    ({**CHILD, "parent_id": "gone"}, "parent gone is not in the run"),
    ({**CHILD, "prefix_length": 1}, "the prompt has 3 tokens, but 4 can be rebuilt"),
    ({"prefix_length": 2}, "the prompt has 3 tokens, but 1 can be rebuilt"),
    ({**CHILD, "violation": "known", "parent_id": "gone"}, "parent gone is not in the run"),
    ({"logprobs": [0.5]}, "log-probability 0 is positive (0.5), and the call is not marked"),
    (
        {"logprobs": [-1.0, -1.0]},
        "1 token ids but 2 log-probabilities, and the call is not marked",
    ),
    (
        {"weight_versions": []},
        "weight version spans cover 0 of 1 tokens, and the call is not marked",
    ),
    (
        {"completion_ids": [-4]},
        "token 0 is -4, which is not in the vocabulary, and the call is not marked",
    ),
]


class TestInvariants:
    """Rows with invalid values whose digests are valid."""

    @pytest.mark.parametrize(("fields", "what"), INVALID, ids=str)
    def test_a_call_with_invalid_values_is_damage(self, tmp_path, fields, what):
        invalid = make_call("b", [1, 2, 3], **{"completion_ids": [4], **fields})
        run = write_killed(tmp_path / "run", make_call("a"), invalid)
        assert found(run) == [("damage", "session s, call b", what)]

    def test_a_call_without_a_prompt_is_damage_and_not_trained_on(self, tmp_path):
        run = write_killed(tmp_path / "run", make_call("a", []))
        what = "its prompt has no token, so that nothing gives its first one a probability"
        assert found(run) == [("damage", "session s, call a", what)]
        [traced] = iter_traces(run, TraceOptions())
        assert traced.traces == []
        assert traced.ledger.left_out == {"violation": 1}

    def test_a_call_that_is_marked_as_not_trainable_is_no_damage(self, tmp_path):
        marked = make_call("b", logprobs=[0.5], violation="log-probability 0 is positive (0.5)")
        assert found(write_killed(tmp_path / "run", make_call("a", logprobs=[]), marked)) == []

    def test_a_call_that_is_recorded_twice_is_damage(self, run, path):
        shutil.copy(path, path.with_name("calls-copy.arrow"))
        assert found(run) == [
            ("damage", "session s, call a", "it is recorded 2 times"),
            ("damage", "session s, call b", "it is recorded 2 times"),
        ]

    def test_calls_that_are_each_others_parents_are_damage(self, tmp_path):
        a = make_call("a", [1], [], parent_id="b", prefix_length=1)
        b = make_call("b", [1], [], parent_id="a", prefix_length=1)
        verification = verify(write_killed(tmp_path / "run", a, b))
        assert [finding.grade for finding in verification.findings] == ["damage", "damage"]

    def test_unusual_rows_that_are_no_damage_are_notices(self, run):
        with killed_writer(run) as writer:
            writer.add_call(make_call("a", session_id="t"))
            writer.add_event(Event(kind="call_started", session_id="t", call_id="a"))
            writer.add_event(Event(kind="call_started", session_id="t", call_id="b"))
            writer.add_event(Event(kind="unauthorised"))
            writer.add_session(make_session("u", finished_at=START - timedelta(seconds=1)))
        assert sorted(found(run)) == [
            ("notice", "session t", NO_ROW),
            ("notice", "session t, call b", STARTED),
            ("notice", "session u", "its times are out of order: the clock was set back"),
        ]
        assert verify(run).sound


ROW = make_session(parts={"a": 0.5}, suspicions={"rule": 2})
REVISED = replace(ROW, revision=2)
ROWS = {
    "one row": ([ROW], False, []),
    "a row and its revision": ([replace(ROW, revision=1), ROW], False, []),
    "unjudged": (
        [replace(ROW, status="unjudged")],
        False,
        [("damage", "it has the status unjudged and the reward 1.0")],
    ),
    "a reward of 0": (
        [replace(ROW, status="infrastructure", reward=0.0)],
        False,
        [("damage", "it has the status infrastructure and the reward 0.0")],
    ),
    "a revision twice": (
        [ROW, replace(ROW, reward=0.0)],
        False,
        [("damage", "it has 2 rows of revision 0")],
    ),
    "a missing revision": (
        [ROW, REVISED],
        False,
        [("damage", "its rows of the revisions [1] are missing")],
    ),
    "missing in a salvaged run": (
        [REVISED],
        True,
        [("notice", "its rows of the revisions [0, 1] are missing")],
    ),
    "most are missing": (
        [replace(ROW, revision=2**31 - 1)],
        False,
        [("damage", f"its rows of the revisions {[*range(MOST_MISSING)]} are missing")],
    ),
}


@pytest.mark.parametrize(("rows", "salvaged", "expected"), ROWS.values(), ids=ROWS)
def test_the_rows_of_a_session_fit_each_other(rows, salvaged, expected):
    findings = check_session_rows("here", rows, salvaged=salvaged)
    assert [(finding.grade, finding.what) for finding in findings] == expected


def rewrite(path, change):
    """Replace the table in a file by what `change` makes of it."""
    with SegmentReader(path) as reader:
        table = pa.Table.from_batches([batch for _, batch in reader]).combine_chunks()
    table = change(table)
    with open(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def change_value(table, name):
    """Return the table with another value in each row of a column."""
    others = {pa.string(): "other", pa.bool_(): True, pa.int32(): 77}
    field = table.schema.field(name)
    other = others.get(field.type, [])
    if pa.types.is_timestamp(field.type):
        other = START + timedelta(days=1)
    column = pa.array([other] * table.num_rows, field.type)
    return table.set_column(table.schema.get_field_index(name), field, column)


class TestFiles:
    def test_a_changed_value_is_damage_wherever_it_is_in_the_row(self, run, path):
        before = path.read_bytes()
        for name in TABLES["calls"].names:
            rewrite(path, lambda table, name=name: change_value(table, name))
            assert any("its digest does not match" in what for _, _, what in found(run)), name
            path.write_bytes(before)

    def test_a_file_with_other_columns_is_damage(self, run, path):
        rewrite(path, lambda table: table.drop_columns(["reply"]))
        [(grade, where, what)] = found(run)
        assert grade == "damage"
        assert where == f"{path.name}, byte 0"
        assert "does not have the columns of its table" in what

    @pytest.mark.parametrize("kind", ["flip", "zeros"])
    def test_damage_in_the_middle_is_not_repaired_and_the_commits_after_it_are_not_cut_off(
        self, run, path, kind
    ):
        first, *_ = offsets(path)
        damaged = bytearray(path.read_bytes())
        if kind == "flip":
            damaged[first] ^= 1
        else:
            damaged[first : first + 8] = bytes(8)
        path.write_bytes(damaged)
        assert found(run)[0][:2] == ("damage", f"{path.name}, byte {first}")
        assert verify(run).rows["calls"] == 1
        assert verify(run, repair=True).repaired == []
        assert path.read_bytes() == damaged


class TestRepair:
    def test_a_lost_end_is_damage_that_is_not_repaired(self, run, path):
        whole = path.read_bytes()
        size = len(whole)
        first, last = offsets(path)
        lost_at = {
            0: 0,
            100: 0,
            first - 1: 0,
            first + 4: first,
            last + 4: last,
            size - 100: last,
            size - 1: last,
        }
        for left, place in lost_at.items():
            path.write_bytes(whole[:left])
            lost = verify(run).findings[0]
            assert lost.grade == "damage"
            assert lost.where == f"{path.name}, byte {place}"
            assert "rolltap merge RUN --out NEW" in lost.advice
            assert verify(run, repair=True).repaired == []
            assert path.read_bytes() == whole[:left]

    def test_an_incomplete_commit_is_no_damage_and_what_a_repair_cuts_is_kept_once_unless_zeros(
        self, run, path
    ):
        whole = path.read_bytes()
        for number in (1, 2, 2):  # the second 2 as after a repair that was killed before it cut
            tail = bytes(8) + b"half commit %d" % number
            path.write_bytes(whole + tail)
            assert verify(run).verdict == "needs repair"
            [what] = [what for grade, _, what in found(run) if grade == "repair"]
            assert "last 21 bytes are not a committed message" in what
            [sentence] = verify(run, repair=True).repaired
            kept = path.with_name(f"{path.name}.cut-{number}")
            assert sentence.endswith(f"and are in {kept.name}")
            assert path.read_bytes() == whole
            assert kept.read_bytes() == tail
            what = "has 21 bytes that a repair cut off: no reader reads them"
            assert ("notice", kept.name, what) in found(run)
        path.write_bytes(whole + bytes(8))
        assert len(verify(run, repair=True).repaired) == 1
        assert path.read_bytes() == whole
        assert len(list(run.glob("*.cut-*"))) == 2
        assert verify(run).verdict == "ok"

    def test_a_repair_that_cannot_keep_what_it_cuts_cuts_nothing(self, run, path, monkeypatch):
        path.write_bytes(path.read_bytes() + bytes(8) + b"half a commit")
        before = contents(run)
        monkeypatch.setattr(os, "fsync", no_room)
        with pytest.raises(OSError, match="No space"):
            verify(run, repair=True)
        assert contents(run) == before

    @pytest.mark.parametrize("end", ["bytes", "batch", "zeros"])
    def test_a_compacted_file_that_lost_its_end_lost_few_calls_and_a_repair_cuts_nothing(
        self, tmp_path, end
    ):
        write_run(tmp_path, *(make_call(number, [number], [1, 2]) for number in range(150)))
        path = calls_file(tmp_path)
        whole = path.read_bytes()
        with SegmentReader(path) as reader:
            *_, (last, lost) = reader
        without = {
            "bytes": whole[:-9],
            "batch": whole[:last],
            "zeros": whole[:last] + bytes(len(whole) - last),
        }[end]
        path.write_bytes(without)
        verification = verify(tmp_path, repair=True)
        assert verification.verdict == "damaged"
        assert verification.repaired == []
        assert path.read_bytes() == without
        left = 150 - lost.num_rows
        assert len(RecordedCalls(tmp_path)["s"]) == left >= 150 - BATCH_ROWS
        what = f"it lost its end: {left} of its 150 rows are left"
        assert end == "bytes" or ("damage", f"{path.name}, byte {last}", what) in found(tmp_path)

    def test_of_a_file_that_is_being_written_damage_is_reported_and_its_end_left_alone(self, run):
        with RunWriter(run) as writer:
            writer.add_call(make_call("c", [9], [9]))
            path = run_files(run, "calls")[-1]
            whole = path.read_bytes()
            path.write_bytes(whole[:-1])
            assert not verify(run).sound
            path.write_bytes(whole + bytes(8) + b"half a commit")
            before = path.read_bytes()
            assert verify(run, repair=True).repaired == []
            assert found(run) == [("notice", path.name, "a commit is being written")]
            assert path.read_bytes() == before

    def test_files_that_a_dead_process_left_behind_are_removed_and_others_are_not(self, run):
        dead_process = 2**22 + 1  # above the largest id of a process
        dead = [
            f".calls-1-1-0000.arrow.cut-1.{dead_process}",
            f".calls-1-1-0000.arrow.{dead_process}",
            f".policy.json.{dead_process}",
            f".run.json.{dead_process}",
        ]
        alive = f".calls-1-1-0000.arrow.{os.getpid()}"
        for name in (*dead, alive, ".DS_Store"):
            (run / name).touch()
        grades = {where: grade for grade, where, _ in found(run)}
        assert grades == dict.fromkeys(dead, "repair") | {alive: "notice"}
        assert len(verify(run, repair=True).repaired) == len(dead)
        assert {path.name for path in run.glob(".*")} == {alive, ".DS_Store"}

    def test_a_commit_that_failed_is_told_from_one_that_was_killed(self, tmp_path, monkeypatch):
        write_metadata(tmp_path, {})
        with killed_writer(tmp_path) as writer:
            writer.add_call(make_call("a"))
            writer.add_event(Event(kind="call_started", session_id="s", call_id="b"))
            with monkeypatch.context() as full:
                full.setattr(os, "pwrite", no_room)
                with pytest.raises(OSError, match="No space left"):
                    writer.add_call(make_call("b"))
            detail = f"[Errno {errno.ENOSPC}] less than 4 MiB are free"
            writer.add_event(Event(kind="fault", session_id="s", detail=detail))
            writer.add_event(Event(kind="fault", session_id="s", detail="another fault"))
        assert verify(tmp_path).verdict == "needs repair"
        (grade, where, what), *notices = found(tmp_path)
        assert grade == "repair"
        assert where == calls_file(tmp_path).name
        assert "a commit failed, for instance because the disk was full" in what
        assert notices == [
            ("notice", "session s", NO_ROW),
            ("notice", "session s, call b", STARTED),
            ("notice", "session s", "the disk was full: 1 requests were refused"),
        ]
        assert verify(tmp_path, repair=True).verdict == "ok"


def digests(run):
    """Return the digests of all rows that can be read, and of those that match their rows."""
    every = []
    sound = []
    for table, schema in TABLES.items():
        for row in read_rows(run, table):
            every.append(row[DIGEST])
            if row[DIGEST] == row_digest(row, schema):
                sound.append(row[DIGEST])
    return every, sound


def write_sessions(run, sessions, *, compacted):
    if compacted:
        record(run, sessions)
        return
    write_metadata(run, {})
    with killed_writer(run) as writer:
        for session, calls in sessions:
            for call in calls:
                writer.add_call(replace(call, parent_id=None))
            writer.add_session(session)


class TestProperties:
    @given(recorded_sessions(), st.data())
    @examples(80)
    def test_damage_is_found_or_does_no_harm_and_a_repair_is_final(self, sessions, data):
        """Damage a file in one of three ways: truncate it, append part of a commit, or change a
        byte."""
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            write_sessions(run, sessions, compacted=data.draw(st.booleans(), "compacted"))
            before, _ = digests(run)
            assert verify(run).sound
            path = data.draw(st.sampled_from(sorted(run.glob("*.arrow"))))
            whole = path.read_bytes()
            end = b"\xff\xff\xff\xff\0\0\0\0"
            compacted = whole.endswith(end)  # one of a single commit is left as it is
            damage = data.draw(st.sampled_from(["cut", "tail", "flip"]))
            position = data.draw(st.integers(0, len(whole) - 1))
            if damage == "cut":
                path.write_bytes(whole[:position])
            elif damage == "tail":
                with SegmentReader(path) as reader:
                    commit = next(iter(reader))[1].slice(0, 1).serialize().to_pybytes()
                whole = whole.removesuffix(end)
                path.write_bytes(whole + bytes(8) + commit[8:position])
            else:
                flipped = bytearray(whole)
                flipped[position] ^= data.draw(st.integers(1, 255))
                path.write_bytes(flipped)
            left, sound = digests(run)
            if verify(run).sound:
                assert left == before
            repaired = verify(run, repair=True)
            if damage == "tail" and not compacted:
                assert path.read_bytes() == whole
            else:
                assert repaired.repaired == []
            assert digests(run) == (left, sound)
            after = contents(run)
            again = verify(run, repair=True)
            assert again.repaired == []
            assert again.findings == repaired.findings == verify(run).findings
            assert contents(run) == after
            merge_runs([run], Path(folder) / "new", ignore)
            assert verify(Path(folder) / "new").sound
            assert sorted(digests(Path(folder) / "new")[0]) == sorted(sound)


class TestCommand:
    @pytest.fixture
    def command(self, run):
        def command(*options):
            ended = CliRunner().invoke(rolltap, ["verify", str(run), *options])
            return ended.exit_code, ended.stdout

        return command

    def test_the_verdict_comes_first_and_only_damage_is_status_1(self, path, command):
        assert command() == (0, "ok: 1 sessions; rows: 2 calls, 1 sessions, 0 events\n")
        whole = path.read_bytes()
        os.truncate(path, len(whole) - 1)
        status, printed = command()
        assert status == 1
        assert printed.startswith("damaged: 1 sessions; rows: 1 calls, 1 sessions, 0 events; ")
        assert "findings: 1 damage\ndamage: calls-" in printed
        assert command("--repair")[0] == 1
        assert json.loads(command("--json")[1])["findings"][0]["grade"] == "damage"
        path.write_bytes(whole + bytes(16))
        status, printed = command()
        assert status == 0
        assert printed.startswith("needs repair: ")
        status, printed = command("--repair")
        assert status == 0
        assert printed.startswith("ok: 1 sessions; rows: 2 calls, 1 sessions, 0 events\nrepaired:")
        assert json.loads(command("--repair", "--json")[1]) == {
            "verdict": "ok",
            "sound": True,
            "sessions": 1,
            "rows": {"calls": 2, "sessions": 1, "events": 0},
            "findings": [],
            "repaired": [],
        }
