import json
import os
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.metadata import add_engine, add_recorder, read_metadata
from rolltap.addons.store.records import CALL_SCHEMA
from rolltap.addons.store.routing import Routing
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import RunWriter, read_rows, run_files
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.rollouts.recorder import started_event
from rolltap.trainer.runs.edit import split_run
from rolltap.trainer.runs.merge import merge_runs
from rolltap.trainer.runs.verify import verify_run
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from rolltap.trainer.traces.tables import TRAINED_SCHEMA
from rolltap.trainer.traces.trained import read_trained, trained_batch
from tests.factories import add_rows, make_call, make_session
from tests.trainer.runs.recorded_runs import (
    ids_of,
    ignore,
    make_run,
    record,
    rows_of,
)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", make_session("s"), make_session("t"))


def lose_the_first_call(run):
    """Change the tokens of the first call, so that its digest does not match, and return the
    file."""
    [path] = run_files(run, "calls")
    with SegmentReader(path) as reader:
        [rows] = [batch.to_pylist() for _, batch in reader]
    assert rows[0]["call_id"] == "a"
    rows[0]["completion_ids"] = [77]
    with open(path, "wb") as file, pa.ipc.new_stream(file, CALL_SCHEMA) as stream:
        stream.write_table(pa.Table.from_pylist(rows, CALL_SCHEMA))
    return path


def output(*arguments):
    result = CliRunner().invoke(
        rolltap, [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0
    return result.stdout


class TestMerge:
    def test_small_commits_of_all_runs_become_large_batches_in_one_file_a_table(self, tmp_path):
        runs = [make_run(tmp_path / f"{i}", make_session(f"s{i}", group_id="")) for i in range(10)]
        assert merge_runs(runs, tmp_path / "out", ignore) == (10, [])
        assert [
            len(run_files(tmp_path / "out", table)) for table in ("calls", "sessions", "events")
        ] == [1, 1, 1]
        assert rows_of(tmp_path / "out")["events"] == sum(
            (rows_of(run)["events"] for run in runs), Counter()
        )

    @pytest.mark.parametrize("key", ["tokenizer_sha256", "chat_template_sha256"])
    @pytest.mark.parametrize("other", [None, "other"])
    def test_runs_of_another_model_are_refused(self, tmp_path, key, other):
        a = make_run(tmp_path / "a", make_session("s"), **{key: "one"})
        b = make_run(tmp_path / "b", make_session("t"), **({key: other} if other else {}))
        with pytest.raises(
            InputError,
            match=f"do not have the same {key.removesuffix('_sha256').replace('_', ' ')}",
        ):
            merge_runs([a, b], tmp_path / "out", ignore)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]

    def test_a_session_with_the_same_content_in_two_runs_is_refused(self, tmp_path):
        a = make_run(tmp_path / "a", make_session("s"), make_session("t"))
        b = make_run(tmp_path / "b", make_session("s", reward=0.0), make_session("t"))
        with pytest.raises(
            InputError, match="both have session t, with the same content: leave one run out"
        ):
            merge_runs([a, b], tmp_path / "out", ignore)
        assert not (tmp_path / "out").exists()

    def test_two_rollouts_of_the_same_tasks_keep_their_sessions_and_groups_apart(self, tmp_path):
        a = make_run(tmp_path / "a", make_session("s", reward=0.0), make_session("t", reward=0.0))
        b = make_run(tmp_path / "b", make_session("s"), make_session("u"))
        numbers = dict.fromkeys(TRAINED_SCHEMA.names, 0) | {"left_out": [], "spans": []}
        values = {"differences": np.float16([-0.1]), "weights": np.float32([0.3])}
        row = {
            **numbers,
            **values,
            "version": "v",
            "session_id": "s",
            "group_id": "g",
            "reason": None,
            "digest": "",
        }
        routing = Routing(session_id="s", call_id="a", layers=1, top_k=1, experts=b"\0")
        with RunWriter(add_rows(b, routing, started_event(make_session("s")))) as writer:
            writer.add_batch("trained", trained_batch([row]))
        [said, count] = output("merge", a, b, "--out", tmp_path / "out").splitlines()
        assert said == "sessions and groups of b are named b.... : another run has equal names"
        assert count == f"4 sessions in {tmp_path / 'out'}"
        merged = load_sessions(tmp_path / "out")
        assert {name: session.group_id for name, session in merged.items()} == {
            "s": "g",
            "t": "g",
            "b.s": "b.g",
            "b.u": "b.g",
        }
        assert merged["b.s"].reward == 1.0
        assert verify_run(tmp_path / "out", ignore).findings == verify_run(b, ignore).findings
        calls = RecordedCalls(tmp_path / "out")
        assert [call.prompt_ids for call in calls["b.s"]] == [
            call.prompt_ids for call in RecordedCalls(b)["s"]
        ]
        [started] = [
            row for row in read_rows(tmp_path / "out", "events") if row["kind"] == "session_started"
        ]
        assert (started["session_id"], json.loads(started["detail"])["group_id"]) == ("b.s", "b.g")
        [trained] = read_trained(tmp_path / "out")
        assert (trained.session_id, trained.group_id) == ("b.s", "b.g")
        assert read_metadata(tmp_path / "out")["merged_from"] == [
            {"run": "a"},
            {"run": "b", "prefix": "b."},
        ]

    def test_groups_of_equal_name_of_two_runs_stay_two_and_parts_of_one_run_become_one_again(
        self, tmp_path
    ):
        a = make_run(tmp_path / "a", make_session("s"), make_session("t", status="failed"))
        split_run(a, tmp_path / "parts", ignore, by="status")
        merge_runs(
            [tmp_path / "parts" / "completed", tmp_path / "parts" / "failed"],
            tmp_path / "whole",
            ignore,
        )
        assert {session.group_id for session in load_sessions(tmp_path / "whole").values()} == {"g"}
        b = make_run(tmp_path / "b", make_session("u"))
        merge_runs([a, b], tmp_path / "both", ignore)
        groups = {
            name: session.group_id for name, session in load_sessions(tmp_path / "both").items()
        }
        assert groups == {"s": "g", "t": "g", "b.u": "b.g"}

    def test_runs_in_folders_of_equal_name_get_different_prefixes(self, tmp_path):
        runs = [
            make_run(tmp_path / name / "run", make_session("s", task_id=name)) for name in "abc"
        ]
        merge_runs(runs, tmp_path / "out", ignore)
        assert ids_of(tmp_path / "out") == ["run-2.s", "run.s", "s"]

    def test_engines_and_recorders_of_all_runs_are_kept_with_their_differences(self, tmp_path):
        runs = [
            make_run(tmp_path / name, make_session(name, group_id=""), renderer=name)
            for name in "abc"
        ]
        for run in runs:
            add_recorder(run, {"sampling": {"temperature": 1.0}})
            add_engine(run, f"http://{run.name}", {"version": run.name})
        add_recorder(runs[1], {"sampling": {"temperature": 0.5}})
        merge_runs(runs[:2], tmp_path / "ab", ignore)
        merge_runs([tmp_path / "ab", runs[2]], tmp_path / "abc", ignore)
        metadata = read_metadata(tmp_path / "abc")
        assert metadata["recorders"] == [
            {"sampling": {"temperature": 1.0}},
            {"sampling": {"temperature": 0.5}},
        ]
        assert metadata["engines"] == {f"http://{name}": {"version": name} for name in "abc"}
        assert metadata["merged_from"] == [
            {"run": "a"},
            {"run": "b", "renderer": "b"},
            {"run": "c", "renderer": "c"},
        ]

    def test_a_folder_that_is_not_empty_and_one_that_is_no_run_are_refused(self, tmp_path):
        a = make_run(tmp_path / "a", make_session("s"))
        with pytest.raises(RunError, match="exists and is not an empty folder"):
            merge_runs([a], a, ignore)
        with pytest.raises(RunError, match=r"it has no run\.json"):
            merge_runs([tmp_path], tmp_path / "out", ignore)
        (tmp_path / "out").mkdir()
        assert merge_runs([a], tmp_path / "out", ignore) == (1, [])

    def test_the_readable_rows_with_a_valid_digest_of_a_damaged_run_are_saved(self, run, tmp_path):
        lost = run_files(run, "sessions")[0]
        os.truncate(lost, lost.stat().st_size - 9)
        calls = lose_the_first_call(run)
        ended = CliRunner().invoke(rolltap, ["merge", str(run), "--out", str(tmp_path / "new")])
        assert ended.exit_code == 0
        assert ended.stdout.splitlines() == [
            (
                f"not copied from run/{calls.name}: 1 rows whose digest does not match, 0"
                " unreadable byte ranges"
            ),
            (
                f"not copied from run/{lost.name}: 0 rows whose digest does not match, 1 unreadable"
                " byte ranges"
            ),
            f"2 sessions in {tmp_path / 'new'}",
        ]
        saved = RecordedCalls(tmp_path / "new")
        names = {name: [call.call_id for call in calls] for name, calls in saved.items()}
        assert names == {"s": ["b"], "t": ["a", "b"]}
        assert saved["s"][0].violation == "parent a is not in the run"
        found = verify_run(tmp_path / "new", ignore)
        assert found.sound
        [notice] = [
            finding for finding in found.findings if finding.what == "parent a is not in the run"
        ]
        assert (notice.grade, notice.where) == ("notice", "session s, call b")
        again = tmp_path / "again"
        merge_runs([tmp_path / "new"], again, ignore)
        assert read_metadata(again)["left_behind"] == [
            {"file": f"run/{calls.name}", "rows": 1, "places": 0},
            {"file": f"run/{lost.name}", "rows": 0, "places": 1},
        ]
        assert verify_run(again, ignore).sound

    def test_the_descendants_of_a_lost_call_are_a_notice(self, tmp_path):
        chain = [
            make_call("a"),
            make_call("b", [1, 2, 3], [4]),
            make_call("c", [1, 2, 3, 4, 5], [6]),
        ]
        record(run := tmp_path / "run", [(make_session("s"), chain)])
        lose_the_first_call(run)
        merge_runs([run], tmp_path / "new", ignore)
        found = verify_run(tmp_path / "new", ignore)
        assert found.sound
        notices = [
            finding.where
            for finding in found.findings
            if "rebuilt" in finding.what or "parent" in finding.what
        ]
        assert notices == ["session s, call b", "session s, call c"]
        assert [call.violation is None for call in RecordedCalls(tmp_path / "new")["s"]] == [
            False,
            False,
        ]

    def test_a_run_without_a_row_to_save_is_not_written(self, run, tmp_path):
        for path in [*run_files(run, "sessions"), *run_files(run, "calls")]:
            os.truncate(path, path.stat().st_size - 9)
        with pytest.raises(InputError, match=r"no session of .*run can be saved"):
            merge_runs([run], tmp_path / "new", ignore)
        assert not (tmp_path / "new").exists()
