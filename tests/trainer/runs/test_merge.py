import os

import pyarrow as pa
import pytest
from click.testing import CliRunner

from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.metadata import add_engine, add_recorder, read_metadata
from rolltap.addons.store.schemas import CALL_SCHEMA
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import read_rows, run_files
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.runs.edit import merge_runs
from rolltap.trainer.runs.verify import verify_run
from rolltap.trainer.traces.reader import RecordedCalls
from tests.trainer.runs.recorded_runs import (
    ignore,
    make_call,
    make_run,
    make_session,
    record,
    rows_of,
)


class TestMerge:
    def test_the_merged_run_has_the_rows_of_all_runs(self, tmp_path):
        a = make_run(tmp_path / "a", make_session("s"), make_session("t"))
        b = make_run(tmp_path / "b", make_session("u"))
        assert merge_runs([a, b], tmp_path / "out", ignore) == (3, [])
        expected = {table: rows + rows_of(b)[table] for table, rows in rows_of(a).items()}
        assert rows_of(tmp_path / "out") == expected
        assert sum(event["session_id"] is None for event in read_rows(tmp_path / "out", "events")) == 2

    def test_small_commits_become_large_batches_in_one_file_a_table(self, tmp_path):
        runs = [make_run(tmp_path / f"{i}", make_session(f"s{i}")) for i in range(10)]
        merge_runs(runs, tmp_path / "out", ignore)
        assert [len(run_files(tmp_path / "out", table)) for table in ("calls", "sessions", "events")] == [1, 1, 1]

    @pytest.mark.parametrize("key", ["tokenizer_sha256", "chat_template_sha256"])
    @pytest.mark.parametrize("other", [None, "other"])
    def test_runs_of_another_model_are_refused(self, tmp_path, key, other):
        a = make_run(tmp_path / "a", make_session("s"), **{key: "one"})
        b = make_run(tmp_path / "b", make_session("t"), **({key: other} if other else {}))
        with pytest.raises(InputError, match=f"do not have the same {key.removesuffix('_sha256').replace('_', ' ')}"):
            merge_runs([a, b], tmp_path / "out", ignore)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]

    @pytest.mark.parametrize(("reward", "what"), [(1.0, "with the same content"), (0.0, "with other content")])
    def test_a_session_that_is_in_two_runs_is_refused(self, tmp_path, reward, what):
        a = make_run(tmp_path / "a", make_session("s"), make_session("t"))
        b = make_run(tmp_path / "b", make_session("u"), make_session("t", reward=reward))
        with pytest.raises(InputError, match=f"both have session t, {what}"):
            merge_runs([a, b], tmp_path / "out", ignore)
        assert not (tmp_path / "out").exists()

    def test_engines_and_recorders_of_all_runs_are_kept_with_their_differences(self, tmp_path):
        runs = [make_run(tmp_path / name, make_session(name), renderer=name) for name in "abc"]
        for run in runs:
            add_recorder(run, {"sampling": {"temperature": 1.0}})
            add_engine(run, f"http://{run.name}", {"version": run.name})
        add_recorder(runs[1], {"sampling": {"temperature": 0.5}})
        merge_runs(runs[:2], tmp_path / "ab", ignore)
        merge_runs([tmp_path / "ab", runs[2]], tmp_path / "abc", ignore)
        metadata = read_metadata(tmp_path / "abc")
        assert metadata["recorders"] == [{"sampling": {"temperature": 1.0}}, {"sampling": {"temperature": 0.5}}]
        assert metadata["engines"] == {f"http://{name}": {"version": name} for name in "abc"}
        assert metadata["merged_from"] == [{"run": "a"}, {"run": "b", "renderer": "b"}, {"run": "c", "renderer": "c"}]

    def test_a_folder_that_is_not_empty_is_refused(self, tmp_path):
        a = make_run(tmp_path / "a", make_session("s"))
        with pytest.raises(RunError, match="exists and is not an empty folder"):
            merge_runs([a], a, ignore)
        (tmp_path / "out").mkdir()
        assert merge_runs([a], tmp_path / "out", ignore) == (1, [])

    def test_the_readable_rows_with_a_valid_digest_of_a_damaged_run_are_saved(self, tmp_path):
        run = make_run(tmp_path / "run", make_session("s"), make_session("t"))
        lost = run_files(run, "sessions")[0]
        os.truncate(lost, lost.stat().st_size - 9)
        calls = run_files(run, "calls")[0]
        with SegmentReader(calls) as reader:
            [rows] = [batch.to_pylist() for _, batch in reader]
        assert (rows[0]["session_id"], rows[0]["call_id"]) == ("s", "a")
        rows[0]["completion_ids"] = [77]
        with open(calls, "wb") as file, pa.ipc.new_stream(file, CALL_SCHEMA) as stream:
            stream.write_table(pa.Table.from_pylist(rows, CALL_SCHEMA))

        ended = CliRunner().invoke(rolltap, ["merge", str(run), "--out", str(tmp_path / "new")])
        assert ended.exit_code == 0
        assert ended.stdout.splitlines() == [
            f"not copied from run/{calls.name}: 1 rows whose digest does not match, 0 unreadable byte ranges",
            f"not copied from run/{lost.name}: 0 rows whose digest does not match, 1 unreadable byte ranges",
            f"2 sessions in {tmp_path / 'new'}",
        ]
        saved = RecordedCalls(tmp_path / "new")
        assert {name: [call.call_id for call in calls] for name, calls in saved.items()} == {
            "s": ["b"],
            "t": ["a", "b"],
        }
        assert saved["s"][0].violation == "parent a is not in the run"
        found = verify_run(tmp_path / "new", ignore)
        assert found.sound
        [notice] = [finding for finding in found.findings if finding.what == "parent a is not in the run"]
        assert (notice.grade, notice.where) == ("notice", "session s, call b")
        again = tmp_path / "again"
        merge_runs([tmp_path / "new"], again, ignore)
        assert read_metadata(again)["left_behind"] == [
            {"file": f"run/{calls.name}", "rows": 1, "places": 0},
            {"file": f"run/{lost.name}", "rows": 0, "places": 1},
        ]
        assert verify_run(again, ignore).sound

    def test_the_descendants_of_a_lost_call_are_a_notice(self, tmp_path):
        chain = [make_call("s", "a", [1], [2]), make_call("s", "b", [1, 2, 3], [4])]
        chain.append(make_call("s", "c", [1, 2, 3, 4, 5], [6]))
        record(run := tmp_path / "run", [(make_session("s"), chain)])
        calls = run_files(run, "calls")[0]
        with SegmentReader(calls) as reader:
            [rows] = [batch.to_pylist() for _, batch in reader]
        rows[0]["completion_ids"] = [77]
        with open(calls, "wb") as file, pa.ipc.new_stream(file, CALL_SCHEMA) as stream:
            stream.write_table(pa.Table.from_pylist(rows, CALL_SCHEMA))
        merge_runs([run], tmp_path / "new", ignore)
        found = verify_run(tmp_path / "new", ignore)
        assert found.sound
        notices = [finding.where for finding in found.findings if "rebuilt" in finding.what or "parent" in finding.what]
        assert notices == ["session s, call b", "session s, call c"]
        assert [call.violation is None for call in RecordedCalls(tmp_path / "new")["s"]] == [False, False]

    def test_a_run_without_a_row_to_save_is_not_written(self, tmp_path):
        run = make_run(tmp_path / "run", make_session("s"))
        for path in [*run_files(run, "sessions"), *run_files(run, "calls")]:
            os.truncate(path, path.stat().st_size - 9)
        with pytest.raises(InputError, match=r"no session of .*run can be saved"):
            merge_runs([run], tmp_path / "new", ignore)
        assert not (tmp_path / "new").exists()

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path):
        with pytest.raises(RunError, match=r"it has no run\.json"):
            merge_runs([tmp_path], tmp_path / "out", ignore)
