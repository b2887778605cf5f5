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
from tests.trainer.runs.recorded_runs import record, recorded_sessions


def verify(run, **options):
    return verify_run(run, lambda *_: None, **options)


def found(run):
    """Return grade, place and text of every finding."""
    return [(finding.grade, finding.where, finding.what) for finding in verify(run).findings]


STARTED = (
    "it was started, not recorded: it still runs, its recorder was killed, or the disk was full"
)
CHILD = {"parent_id": "a", "prefix_length": 2, "kind": "bridged"}


@pytest.fixture
def run(tmp_path):
    """Write a run of two calls, as a killed recorder leaves it. The second call continues the
    first."""
    return make_run(tmp_path / "run", [make_call("a"), make_call("b", [1, 2, 3], [4], **CHILD)])


def make_run(run, calls):
    write_metadata(run, {"model": "tiny"})
    with killed_writer(run) as writer:
        for call in calls:
            writer.add_call(call)
        writer.add_session(make_session())
    return run


@contextmanager
def killed_writer(run):
    """Yield a writer whose files are neither compacted nor locked afterwards."""
    writer = RunWriter(run, "never")
    yield writer
    for segment in (*writer._segments.values(), *writer._failed):
        segment.close()


def calls_file(run):
    [path] = run_files(run, "calls")
    return path


@pytest.fixture
def path(run):
    return calls_file(run)


def contents(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


class TestSound:
    def test_a_sound_run_has_no_findings_and_its_rows_are_counted(self, run, tmp_path):
        verification = verify(run)
        assert (verification.findings, verification.sound) == ([], True)
        assert verification.rows == {"calls": 2, "sessions": 1, "events": 0}
        assert (
            found(write_run(tmp_path / "compacted", *map(make_call, range(3)), make_session()))
            == []
        )

    def test_a_session_without_a_row_is_counted_as_inspect_does(self, run):
        with RunWriter(run) as writer:
            writer.add_call(make_call("c", [9], [9], session_id="without-row"))
        assert verify(run).sessions == len(summarize(run).session_rows) == 2

    def test_a_run_that_is_being_written_is_sound(self, run):
        writer = RunWriter(run)
        writer.add_call(make_call("c", [9], [9]))
        assert found(run) == []
        writer.close()


class TestInvariants:
    """Rows with invalid values whose digests are valid."""

    @pytest.mark.parametrize(
        ("child", "what"),
        [
            ({**CHILD, "parent_id": "gone"}, "parent gone is not in the run"),
            ({**CHILD, "prefix_length": 1}, "the prompt has 3 tokens, but 4 can be rebuilt"),
            ({"prefix_length": 2}, "the prompt has 3 tokens, but 1 can be rebuilt"),
            ({**CHILD, "violation": "known", "parent_id": "gone"}, "parent gone is not in the run"),
            (
                {"logprobs": [0.5]},
                "log-probability 0 is positive (0.5), and the call is not marked",
            ),
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
        ],
        ids=str,
    )
    def test_a_call_with_invalid_values_is_damage(self, tmp_path, child, what):
        b = make_call("b", [1, 2, 3], **{"completion_ids": [4], **child})
        run = make_run(tmp_path / "run", [make_call("a"), b])
        assert found(run) == [("damage", "session s, call b", what)]

    def test_a_call_without_a_prompt_is_damage_and_not_trained_on(self, tmp_path):
        run = make_run(tmp_path / "run", [make_call("a", [])])
        what = "its prompt has no token, so that nothing gives its first one a probability"
        assert found(run) == [("damage", "session s, call a", what)]
        [traced] = iter_traces(run, TraceOptions())
        assert (traced.traces, traced.ledger.left_out) == ([], {"violation": 1})

    def test_a_call_that_is_marked_as_not_trainable_is_no_damage(self, tmp_path):
        marked = make_call("b", logprobs=[0.5], violation="log-probability 0 is positive (0.5)")
        assert found(make_run(tmp_path / "run", [make_call("a", logprobs=[]), marked])) == []

    def test_a_call_that_is_recorded_twice_is_damage(self, run, path):
        shutil.copy(path, path.with_name("calls-copy.arrow"))
        assert found(run) == [
            ("damage", f"session s, call {name}", "it is recorded 2 times") for name in "ab"
        ]

    def test_calls_that_are_each_others_parents_are_damage(self, tmp_path):
        a = make_call("a", [1], [], parent_id="b", prefix_length=1)
        b = make_call("b", [1], [], parent_id="a", prefix_length=1)
        run = make_run(tmp_path / "run", [a, b])
        assert [grade for grade, _, _ in found(run)] == ["damage", "damage"]

    def test_unusual_rows_that_are_no_damage_are_notices(self, run):
        with killed_writer(run) as writer:
            writer.add_call(make_call("a", session_id="t"))
            writer.add_event(Event(kind="call_started", session_id="t", call_id="a"))
            writer.add_event(Event(kind="call_started", session_id="t", call_id="b"))
            writer.add_event(Event(kind="unauthorised"))
            writer.add_session(make_session("u", finished_at=START - timedelta(seconds=1)))
        assert sorted(found(run)) == [
            (
                "notice",
                "session t",
                "has no row in sessions: its calls have no reward and no group",
            ),
            ("notice", "session t, call b", STARTED),
            ("notice", "session u", "its times are out of order: the clock was set back"),
        ]
        assert verify(run).sound


class TestRowsOfASession:
    ROW = make_session(parts={"a": 0.5}, suspicions={"rule": 2})

    @staticmethod
    def found_in(*rows, salvaged=False):
        return [
            (finding.grade, finding.what)
            for finding in check_session_rows("here", rows, salvaged=salvaged)
        ]

    def test_a_row_and_its_revisions_are_sound(self):
        assert self.found_in(self.ROW) == []
        assert self.found_in(replace(self.ROW, revision=1), self.ROW) == []

    @pytest.mark.parametrize(
        ("fields", "what"),
        [
            ({"status": "unjudged"}, "it has the status unjudged and the reward 1.0"),
            (
                {"status": "infrastructure", "reward": 0.0},
                "it has the status infrastructure and the reward 0.0",
            ),
        ],
    )
    def test_a_reward_of_a_session_that_has_none_is_damage(self, fields, what):
        assert self.found_in(replace(self.ROW, **fields)) == [("damage", what)]

    def test_a_revision_is_there_once_and_none_is_missing_except_in_a_salvaged_run(self):
        assert self.found_in(self.ROW, replace(self.ROW, reward=0.0)) == [
            ("damage", "it has 2 rows of revision 0")
        ]
        row = replace(self.ROW, revision=2)
        assert self.found_in(self.ROW, row) == [
            ("damage", "its rows of the revisions [1] are missing")
        ]
        assert self.found_in(row, salvaged=True) == [
            ("notice", "its rows of the revisions [0, 1] are missing")
        ]
        [(_, what)] = self.found_in(replace(self.ROW, revision=2**31 - 1))
        assert what == f"its rows of the revisions {[*range(MOST_MISSING)]} are missing"


def rewrite(path, change):
    with SegmentReader(path) as reader:
        table = pa.Table.from_batches([batch for _, batch in reader]).combine_chunks()
    table = change(table)
    with open(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


class TestFiles:
    def test_a_changed_value_is_damage_wherever_it_is_in_the_row(self, run, path):
        for name in TABLES["calls"].names:
            before = path.read_bytes()
            rewrite(path, lambda table, name=name: change_value(table, name))
            assert any("its digest does not match" in what for _, _, what in found(run)), name
            path.write_bytes(before)
        assert found(run) == []

    def test_a_row_with_other_contents_and_its_own_digest_is_not_noticed_as_changed(self, run):
        """The digest detects accidental changes only: it is no signature."""

        def change(table):
            rows = table.to_pylist()
            rows[1]["completion_ids"] = [5]
            rows[1][DIGEST] = row_digest(rows[1], TABLES["calls"])
            return pa.Table.from_pylist(rows, table.schema)

        rewrite(calls_file(run), change)
        assert found(run) == []

    def test_a_file_with_other_columns_is_damage(self, run, path):
        rewrite(path, lambda table: table.drop_columns(["reply"]))
        [(grade, where, what)] = found(run)
        assert (grade, where) == ("damage", f"{path.name}, byte 0")
        assert "does not have the columns of its table" in what

    @pytest.mark.parametrize(
        "damage", [lambda data: bytes([data[0] ^ 1]), lambda data: bytes(8)], ids=["flip", "zeros"]
    )
    def test_damage_in_the_middle_is_not_repaired_and_the_commits_after_it_are_not_cut_off(
        self, run, path, damage
    ):
        with SegmentReader(path) as reader:
            first = next(iter(reader))[0]
        data = path.read_bytes()
        written = damage(data[first:])
        damaged = data[:first] + written + data[first + len(written) :]
        path.write_bytes(damaged)
        assert found(run)[0][:2] == ("damage", f"{path.name}, byte {first}")
        assert verify(run).rows["calls"] == 1
        assert verify(run, repair=True).repaired == []
        assert path.read_bytes() == damaged


def change_value(table, name):
    column = table.schema.get_field_index(name)
    kind = table.schema.field(name).type
    other = {pa.string(): "other", pa.bool_(): True, pa.int32(): 77}.get(kind)
    if other is None:
        other = START + timedelta(days=1) if pa.types.is_timestamp(kind) else []
    return table.set_column(
        column, table.schema.field(name), pa.array([other] * table.num_rows, kind)
    )


class TestRepair:
    def test_a_lost_end_is_damage_that_is_not_repaired(self, run, path):
        whole = path.read_bytes()
        with SegmentReader(path) as reader:
            first, last = [offset for offset, _ in reader]
        for size in (0, 100, first - 1, first + 4, last + 4, len(whole) - 100, len(whole) - 1):
            path.write_bytes(whole[:size])
            [lost, *_] = verify(run).findings
            assert (lost.grade, "rolltap merge RUN --out NEW" in lost.advice) == ("damage", True)
            assert (
                lost.where
                == f"{path.name}, byte {0 if size < first else first if size < last else last}"
            )
            assert verify(run, repair=True).repaired == []
            assert path.read_bytes() == whole[:size]

    def test_an_incomplete_commit_is_no_damage_and_what_a_repair_cuts_is_kept_once_unless_it_is_zeros(
        self, run, path
    ):
        whole = path.read_bytes()
        for number in (1, 2, 2):  # the second 2 as after a repair that was killed before it cut
            tail = bytes(8) + b"half commit %d" % number
            path.write_bytes(whole + tail)
            assert verify(run).verdict == "needs repair"
            what = {place: what for grade, place, what in found(run) if grade == "repair"}
            assert what.keys() == {path.name}
            assert "last 21 bytes are not a committed message" in what[path.name]
            [sentence] = verify(run, repair=True).repaired
            kept = path.with_name(f"{path.name}.cut-{number}")
            assert sentence.endswith(f"and are in {kept.name}")
            assert (path.read_bytes(), kept.read_bytes()) == (whole, tail)
            assert (
                "notice",
                kept.name,
                "has 21 bytes that a repair cut off: no reader reads them",
            ) in found(run)
        path.write_bytes(whole + bytes(8))
        assert len(verify(run, repair=True).repaired) == 1
        assert path.read_bytes() == whole
        assert sorted(run.glob("*.cut-*")) == [
            path.with_name(f"{path.name}.cut-{number}") for number in (1, 2)
        ]
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
        ends = {
            "bytes": whole[:-9],
            "batch": whole[:last],
            "zeros": whole[:last] + bytes(len(whole) - last),
        }
        path.write_bytes(ends[end])
        verification = verify(tmp_path, repair=True)
        assert (verification.verdict, verification.repaired) == ("damaged", [])
        assert path.read_bytes() == ends[end]
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
        names = (
            ".calls-1-1-0000.arrow",
            ".calls-1-1-0000.arrow.cut-1",
            ".run.json",
            ".policy.json",
        )
        dead = [run / f"{name}.{2**22 + 1}" for name in names]  # a process id above the maximum
        alive = run / f".calls-1-1-0000.arrow.{os.getpid()}"
        foreign = run / ".DS_Store"
        for path in (*dead, alive, foreign):
            path.touch()
        assert [(grade, where) for grade, where, _ in found(run)] == [
            ("notice" if path == alive else "repair", path.name) for path in sorted((*dead, alive))
        ]
        assert len(verify(run, repair=True).repaired) == len(dead)
        assert sorted(path.name for path in run.glob(".*")) == sorted([alive.name, foreign.name])


class TestProperties:
    @given(recorded_sessions(), st.data())
    @examples(80)
    def test_damage_is_found_or_does_no_harm_and_a_repair_is_final(self, sessions, data):
        """Damage a file in one of three ways: truncate it, append part of a commit, or change a
        byte."""
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            if data.draw(st.booleans(), "compacted"):
                record(run, sessions)
            else:
                write_metadata(run, {})
                with killed_writer(run) as writer:
                    for session, calls in sessions:
                        for call in calls:
                            call.parent_id = None
                            writer.add_call(call)
                        writer.add_session(session)
            before = recorded(run)
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
            left = recorded(run)
            if verify(run).sound:
                assert left == before
            repaired = verify(run, repair=True)
            if damage == "tail" and not compacted:
                assert path.read_bytes() == whole
            else:
                assert repaired.repaired == []
            assert recorded(run) == left
            after = contents(run)
            again = verify(run, repair=True)
            assert again.repaired == []
            assert again.findings == repaired.findings == verify(run).findings
            assert contents(run) == after
            new = Path(folder) / "new"
            merge_runs([run], new, lambda *_: None)
            assert verify(new).sound
            assert sorted(recorded(new)) == sorted(recorded(run, sound=True))


def recorded(run, sound=False):
    """Return the digests of all readable rows. With `sound`, return only those that match their
    rows."""
    rows = ((row, TABLES[table]) for table in TABLES for row in read_rows(run, table))
    return [
        row[DIGEST] for row, schema in rows if not sound or row[DIGEST] == row_digest(row, schema)
    ]


class TestCommand:
    @pytest.fixture
    def command(self, run):
        return lambda *options: CliRunner().invoke(rolltap, ["verify", str(run), *options])

    def test_the_verdict_comes_first_and_only_damage_is_status_1(self, run, path, command):
        assert (command().exit_code, command().stdout) == (
            0,
            "ok: 1 sessions; rows: 2 calls, 1 sessions, 0 events\n",
        )
        whole = path.read_bytes()
        os.truncate(path, len(whole) - 1)
        damaged = command()
        assert damaged.exit_code == 1
        assert damaged.stdout.startswith(
            "damaged: 1 sessions; rows: 1 calls, 1 sessions, 0 events; findings: 1 damage\ndamage:"
            " calls-"
        )
        assert "a commit cannot be read" in damaged.stdout
        assert command("--repair").exit_code == 1
        assert json.loads(command("--json").stdout)["findings"][0]["grade"] == "damage"
        path.write_bytes(whole + bytes(16))
        tail = command()
        assert tail.exit_code == 0
        assert tail.stdout.startswith(
            "needs repair: 1 sessions; rows: 2 calls, 1 sessions, 0 events; findings: 1"
            " repair\nrepair: calls-"
        )

    def test_a_repair_is_said_after_the_verdict(self, run, command):
        with calls_file(run).open("ab") as file:
            file.write(bytes(16))
        repaired = command("--repair")
        assert repaired.exit_code == 0
        assert repaired.stdout.startswith(
            "ok: 1 sessions; rows: 2 calls, 1 sessions, 0 events\nrepaired: calls-"
        )
        sound = {"verdict": "ok", "sound": True, "sessions": 1, "findings": [], "repaired": []}
        rows = {"calls": 2, "sessions": 1, "events": 0}
        assert json.loads(command("--repair", "--json").stdout) == sound | {"rows": rows}


class TestFullDisk:
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
            path = calls_file(tmp_path)
        assert verify(tmp_path).verdict == "needs repair"
        failed = (
            "a commit failed, for instance because the disk was full: its call was answered with an"
            " error"
        )
        assert found(tmp_path) == [
            ("repair", path.name, failed),
            (
                "notice",
                "session s",
                "has no row in sessions: its calls have no reward and no group",
            ),
            ("notice", "session s, call b", STARTED),
            ("notice", "session s", "the disk was full: 1 requests were refused"),
        ]
        assert verify(tmp_path, repair=True).verdict == "ok"


def no_room(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
