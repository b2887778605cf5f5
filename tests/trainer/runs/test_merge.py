import json
import os
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner

from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.metadata import add_engine, add_recorder, read_metadata
from rolltap.addons.store.routing import Routing
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
from tests.trainer.runs.recorded_runs import ids_of, ignore, make_run, record, rows_of
from tests.trainer.traces.changed import change_rows


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a run to a folder of this name, with these sessions."""

    def make(name, *sessions, **metadata):
        rows = [each if not isinstance(each, str) else make_session(each) for each in sessions]
        return make_run(tmp_path / name, *rows, **metadata)

    return make


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def groups_of(run):
    return {name: session.group_id for name, session in load_sessions(run).items()}


def is_first(row):
    return row["session_id"] == "s" and row["call_id"] == "a"


def lose_the_first_call(run):
    """Change the tokens of the first call, so that its digest does not match, and return the
    file."""
    change_rows(run, "calls", is_first, completion_ids=[77])
    [path] = run_files(run, "calls")
    return path


def cut_end(path):
    os.truncate(path, path.stat().st_size - 9)


def test_small_commits_of_all_runs_become_large_batches_in_one_file_a_table(make, out):
    runs = [make(str(i), make_session(f"s{i}", group_id="")) for i in range(10)]
    assert merge_runs(runs, out, ignore) == (10, [])
    for table in ("calls", "sessions", "events"):
        assert len(run_files(out, table)) == 1
    events = Counter()
    for run in runs:
        events += rows_of(run)["events"]
    assert rows_of(out)["events"] == events


class TestNames:
    def test_two_rollouts_of_the_same_tasks_keep_their_sessions_and_groups_apart(self, make, out):
        a = make("a", make_session("s", reward=0.0), make_session("t", reward=0.0))
        b = make("b", "s", "u")
        row = dict.fromkeys(TRAINED_SCHEMA.names, 0)
        row |= {"version": "v", "session_id": "s", "group_id": "g", "reason": None, "digest": ""}
        row |= {"differences": np.float16([-0.1]), "weights": np.float32([0.3])}
        row |= {"left_out": [], "spans": []}
        routing = Routing(session_id="s", call_id="a", layers=1, top_k=1, experts=b"\0")
        with RunWriter(add_rows(b, routing, started_event(make_session("s")))) as writer:
            writer.add_batch("trained", trained_batch([row]))
        line = ["merge", str(a), str(b), "--out", str(out)]
        assert CliRunner().invoke(rolltap, line).stdout.splitlines() == [
            "sessions and groups of b are named b.... : another run has equal names",
            f"4 sessions in {out}",
        ]
        assert groups_of(out) == {"s": "g", "t": "g", "b.s": "b.g", "b.u": "b.g"}
        assert load_sessions(out)["b.s"].reward == 1.0
        assert verify_run(out, ignore).findings == verify_run(b, ignore).findings
        for ours, theirs in zip(RecordedCalls(out)["b.s"], RecordedCalls(b)["s"], strict=True):
            assert ours.prompt_ids == theirs.prompt_ids
        events = {row["kind"]: row for row in read_rows(out, "events")}
        started = events["session_started"]
        assert started["session_id"] == "b.s"
        assert json.loads(started["detail"])["group_id"] == "b.g"
        [trained] = read_trained(out)
        assert trained.session_id == "b.s"
        assert trained.group_id == "b.g"
        origins = [{"run": "a"}, {"run": "b", "prefix": "b."}]
        assert read_metadata(out)["merged_from"] == origins

    def test_parts_of_one_run_become_one_again_and_groups_of_two_runs_stay_two(
        self, make, out, tmp_path
    ):
        a = make("a", "s", make_session("t", status="failed"))
        split_run(a, tmp_path / "parts", ignore, by="status")
        merge_runs(sorted((tmp_path / "parts").iterdir()), tmp_path / "whole", ignore)
        assert groups_of(tmp_path / "whole") == {"s": "g", "t": "g"}
        merge_runs([a, make("b", "u")], out, ignore)
        assert groups_of(out) == {"s": "g", "t": "g", "b.u": "b.g"}

    def test_runs_in_folders_of_equal_name_get_different_prefixes(self, make, out):
        runs = [make(f"{name}/run", make_session("s", task_id=name)) for name in "abc"]
        merge_runs(runs, out, ignore)
        assert ids_of(out) == ["run-2.s", "run.s", "s"]


def test_engines_and_recorders_of_all_runs_are_kept_with_their_differences(make, out, tmp_path):
    hot = {"sampling": {"temperature": 1.0}}
    cold = {"sampling": {"temperature": 0.5}}
    runs = []
    for name in "abc":
        run = make(name, make_session(name, group_id=""), renderer=name)
        add_recorder(run, hot)
        add_engine(run, f"http://{name}", {"version": name})
        runs.append(run)
    add_recorder(runs[1], cold)
    merge_runs(runs[:2], tmp_path / "ab", ignore)
    merge_runs([tmp_path / "ab", runs[2]], out, ignore)
    metadata = read_metadata(out)
    assert metadata["recorders"] == [hot, cold]
    assert metadata["engines"] == {f"http://{name}": {"version": name} for name in "abc"}
    assert metadata["merged_from"] == [
        {"run": "a"},
        {"run": "b", "renderer": "b"},
        {"run": "c", "renderer": "c"},
    ]


class TestRefused:
    @pytest.mark.parametrize("key", ["tokenizer", "chat_template"])
    @pytest.mark.parametrize("other", [{}, {"sha256": "other"}], ids=str)
    def test_runs_of_another_model(self, make, out, key, other):
        a = make("a", "s", **{f"{key}_sha256": "one"})
        b = make("b", "t", **{f"{key}_{name}": value for name, value in other.items()})
        same = f"do not have the same {key.replace('_', ' ')}"
        with pytest.raises(InputError, match=same):
            merge_runs([a, b], out, ignore)
        assert sorted(out.parent.iterdir()) == [a, b]

    def test_a_session_with_the_same_content_in_two_runs(self, make, out):
        a = make("a", "s", "t")
        b = make("b", make_session("s", reward=0.0), "t")
        why = "both have session t, with the same content: leave one run out"
        with pytest.raises(InputError, match=why):
            merge_runs([a, b], out, ignore)
        assert not out.exists()

    def test_a_folder_that_is_not_empty_and_one_that_is_no_run(self, make, out, tmp_path):
        a = make("a", "s")
        with pytest.raises(RunError, match="exists and is not an empty folder"):
            merge_runs([a], a, ignore)
        with pytest.raises(RunError, match=r"it has no run\.json"):
            merge_runs([tmp_path], out, ignore)
        out.mkdir()
        assert merge_runs([a], out, ignore) == (1, [])

    def test_a_run_without_a_row_to_save(self, make, out):
        run = make("run", "s", "t")
        for path in [*run_files(run, "sessions"), *run_files(run, "calls")]:
            cut_end(path)
        with pytest.raises(InputError, match=r"no session of .*run can be saved"):
            merge_runs([run], out, ignore)
        assert not out.exists()


class TestDamaged:
    def test_the_readable_rows_with_a_valid_digest_of_a_damaged_run_are_saved(
        self, make, out, tmp_path
    ):
        run = make("run", "s", "t")
        [sessions] = run_files(run, "sessions")
        cut_end(sessions)
        calls = lose_the_first_call(run)
        ended = CliRunner().invoke(rolltap, ["merge", str(run), "--out", str(out)])
        assert ended.exit_code == 0
        digest = "rows whose digest does not match"
        assert ended.stdout.splitlines() == [
            f"not copied from run/{calls.name}: 1 {digest}, 0 unreadable byte ranges",
            f"not copied from run/{sessions.name}: 0 {digest}, 1 unreadable byte ranges",
            f"2 sessions in {out}",
        ]
        saved = RecordedCalls(out)
        assert [call.call_id for call in saved["s"]] == ["b"]
        assert [call.call_id for call in saved["t"]] == ["a", "b"]
        assert saved["s"][0].violation == "parent a is not in the run"
        found = verify_run(out, ignore)
        assert found.sound
        grades = {finding.what: finding.grade for finding in found.findings}
        assert grades["parent a is not in the run"] == "notice"
        merge_runs([out], tmp_path / "again", ignore)
        assert read_metadata(tmp_path / "again")["left_behind"] == [
            {"file": f"run/{calls.name}", "rows": 1, "places": 0},
            {"file": f"run/{sessions.name}", "rows": 0, "places": 1},
        ]
        assert verify_run(tmp_path / "again", ignore).sound

    def test_the_descendants_of_a_lost_call_are_a_notice(self, out, tmp_path):
        chain = [
            make_call("a"),
            make_call("b", [1, 2, 3], [4]),
            make_call("c", [1, 2, 3, 4, 5], [6]),
        ]
        record(tmp_path / "run", [(make_session("s"), chain)])
        lose_the_first_call(tmp_path / "run")
        merge_runs([tmp_path / "run"], out, ignore)
        found = verify_run(out, ignore)
        assert found.sound
        lost = [finding.where for finding in found.findings if "started" not in finding.what]
        assert lost == ["session s, call b", "session s, call c"]
        assert all(call.violation for call in RecordedCalls(out)["s"])
