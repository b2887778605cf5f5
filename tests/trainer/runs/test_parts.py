import tempfile
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Event
from rolltap.addons.store.tables import RunWriter, read_rows
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.runs.edit import Filter, filter_run, merge_runs, split_run
from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from tests.deep import examples
from tests.trainer.runs.recorded_runs import (
    ignore,
    make_call,
    make_run,
    make_session,
    record,
    recorded_sessions,
    rows_of,
    session_ids,
    traces_of,
)


class TestSplit:
    def test_a_split_by_a_field_has_a_run_for_each_value(self, tmp_path):
        sessions = [make_session("s", harness="a/b"), make_session("t", harness=".x"), make_session("u", harness="a/b")]
        run = make_run(tmp_path / "run", *sessions, tokenizer_sha256="one")
        with RunWriter(run) as writer:
            writer.add_call(make_call("v", "a", [1], [2]))
        assert split_run(run, tmp_path / "out", "harness", ignore) == {"a%2Fb": 2, "%2Ex": 1, "_none": 1}
        assert session_ids(tmp_path / "out" / "a%2Fb") == ["s", "u"]
        assert session_ids(tmp_path / "out" / "%2Ex") == ["t"]
        assert session_ids(tmp_path / "out" / "_none") == ["v"]
        for part in (tmp_path / "out").iterdir():
            assert read_metadata(part) == read_metadata(run)

    def test_events_of_no_session_are_in_the_first_part(self, tmp_path):
        run = make_run(tmp_path / "run", make_session("s", status="failed"), make_session("t"))
        split_run(run, tmp_path / "out", "status", ignore)
        events = {part: list(read_rows(tmp_path / "out" / part, "events")) for part in ("failed", "completed")}
        assert [event["session_id"] for event in events["failed"]] == [None, "s", "s", "s"]
        assert [event["session_id"] for event in events["completed"]] == ["t", "t", "t"]

    def test_even_parts_keep_groups_whole(self, tmp_path):
        groups = {"a": 3, "b": 1, "c": 2, "d": 1}
        sessions = [make_session(f"{name}{i}", group_id=name) for name, size in groups.items() for i in range(size)]
        run = make_run(tmp_path / "run", *sessions)
        assert split_run(run, tmp_path / "out", 2, ignore) == {"part-0": 4, "part-1": 3}
        assert session_ids(tmp_path / "out" / "part-0") == ["a0", "a1", "a2", "d0"]
        assert session_ids(tmp_path / "out" / "part-1") == ["b0", "c0", "c1"]

    def test_more_parts_than_groups_are_refused(self, tmp_path):
        run = make_run(tmp_path / "run", make_session("s"), make_session("t"))
        with pytest.raises(InputError, match="has only 1 groups of sessions"):
            split_run(run, tmp_path / "out", 2, ignore)

    def test_a_run_without_sessions_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="has no sessions"):
            split_run(make_run(tmp_path / "run"), tmp_path / "out", "status", ignore)


class TestFilter:
    @pytest.mark.parametrize(
        ("criteria", "kept"),
        [
            ({}, ["s", "t", "u", "v"]),
            ({"min_reward": 0.5}, ["s", "t"]),
            ({"max_reward": 0.5}, ["t"]),
            ({"min_reward": 0.0, "max_reward": 0.9}, ["t"]),
            ({"harnesses": ["x", "h"]}, ["s", "t", "u"]),
            ({"harnesses": ["x"]}, ["u"]),
            ({"policy_versions": ["2"]}, ["t"]),
            ({"statuses": ["timeout"]}, ["u"]),
            ({"tasks": ["other"]}, ["u"]),
            ({"runtimes": ["sandbox", "container"]}, ["t"]),
            ({"suspicious": True}, ["t"]),
            ({"suspicious": False}, ["s", "u", "v"]),
            ({"suspicions": ["web_search", "git_history"]}, ["t"]),
            ({"sessions": ["v", "s"]}, ["s", "v"]),
            ({"harnesses": ["h"], "max_reward": 0.5}, ["t"]),
        ],
        ids=str,
    )
    def test_sessions_that_fit_every_criterion_are_kept_whole(self, tmp_path, criteria, kept):
        run = make_run(
            tmp_path / "run",
            make_session("s"),
            make_session("t", reward=0.5, policy_version="2", runtime="sandbox", suspicions='{"git_history": 3}'),
            make_session(
                "u", harness="x", status="timeout", reward=None, task_id="other", suspicions='{"odd_files": 0}'
            ),
        )
        with RunWriter(run) as writer:
            writer.add_call(make_call("v", "a", [1], [2]))
        out = tmp_path / "out"
        assert filter_run(run, out, Filter(**criteria), ignore) == len(kept)
        assert session_ids(out) == kept
        assert traces_of(out) == {session_id: traces_of(run)[session_id] for session_id in kept}
        events = Counter(event["session_id"] for event in read_rows(out, "events"))
        assert events == {session_id: 3 for session_id in kept if session_id != "v"}
        assert read_metadata(out) == read_metadata(run)

    def test_the_last_row_of_a_session_counts_and_all_of_them_are_kept(self, tmp_path):
        run = make_run(tmp_path / "run", make_session("s", reward=0.0))
        with RunWriter(run) as writer:
            writer.add_session(make_session("s", reward=1.0))
        assert filter_run(run, tmp_path / "out", Filter(min_reward=1.0), ignore) == 1
        assert load_sessions(tmp_path / "out")["s"].reward == 1.0

    def test_a_role_keeps_its_calls_and_their_ancestors(self, tmp_path):
        calls = [
            make_call("s", "root", [1], [2]),
            make_call("s", "side", [1, 2, 3], [4], role="auxiliary"),
            make_call("s", "helper", [1, 2, 5], [6], role="subagent"),
            make_call("s", "deeper", [1, 2, 5, 6, 7], [8], role="subagent"),
            make_call("s", "other", [9], [9]),
        ]
        run = tmp_path / "run"
        record(run, [(make_session("s"), calls), (make_session("t"), [make_call("t", "root", [1], [2])])])
        with RunWriter(run) as writer:
            writer.add_event(Event(kind="replayed", session_id="s", call_id="side"))
            writer.add_event(Event(kind="replayed", session_id="s", call_id="helper"))
        assert filter_run(run, tmp_path / "out", Filter(roles=["subagent"]), ignore) == 1
        kept = {call.call_id: call for call in RecordedCalls(tmp_path / "out")["s"]}
        assert {call_id: call.role for call_id, call in kept.items()} == {
            "root": "agent",
            "helper": "subagent",
            "deeper": "subagent",
        }
        assert kept["deeper"].prompt_ids == [1, 2, 5, 6, 7]
        assert build_traces(list(kept.values()), "per_request")[1].left_out == {}
        events = [(event["kind"], event["call_id"]) for event in read_rows(tmp_path / "out", "events")]
        assert events == [
            ("call_started", "root"),
            ("call_started", "helper"),
            ("call_started", "deeper"),
            ("refused", None),
            ("replayed", "helper"),
        ]
        assert session_ids(tmp_path / "out") == ["s"]

    def test_a_filter_without_a_match_writes_nothing(self, tmp_path):
        run = make_run(tmp_path / "run", make_session("s"))
        for criteria in (Filter(min_reward=2.0), Filter(roles=["compaction"])):
            with pytest.raises(InputError, match=r"no session of .* fits"):
                filter_run(run, tmp_path / "out", criteria, ignore)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    def test_an_unknown_session_is_named(self, tmp_path):
        run = make_run(tmp_path / "run", make_session("s"))
        with pytest.raises(InputError, match="has no session gone"):
            filter_run(run, tmp_path / "out", Filter(sessions=["s", "gone"]), ignore)


class TestProperties:
    @given(recorded_sessions(), st.sampled_from(["harness", "task_id", "group_id", "policy_version", "status", 1]))
    @examples(60)
    def test_the_parts_of_a_run_merge_to_its_rows(self, sessions, parts):
        with tempfile.TemporaryDirectory() as folder:
            run, out = Path(folder) / "run", Path(folder) / "parts"
            record(run, sessions)
            names = split_run(run, out, parts, ignore)
            merge_runs([out / name for name in names], Path(folder) / "merged", ignore)
            assert rows_of(Path(folder) / "merged") == rows_of(run)
            assert traces_of(Path(folder) / "merged") == traces_of(run)

    @given(recorded_sessions(), st.sampled_from([{"harnesses": ["h1"]}, {"policy_versions": ["1"]}]))
    @examples(60)
    def test_matching_and_other_sessions_merge_to_the_rows_of_all_sessions(self, sessions, criteria):
        complement = {field: {"h1": ["h2"], "1": ["2"]}[value] for field, (value,) in criteria.items()}
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            record(run, sessions)
            parts = []
            for number, part in enumerate((criteria, complement)):
                try:
                    filter_run(run, Path(folder) / str(number), Filter(**part), ignore)
                except InputError:
                    continue
                parts.append(Path(folder) / str(number))
            merge_runs(parts, Path(folder) / "merged", ignore)
            expected = rows_of(run)
            expected["events"] -= Counter(
                row["digest"] for row in read_rows(run, "events") if row["session_id"] is None
            )
            assert rows_of(Path(folder) / "merged") == expected

    @given(recorded_sessions(), st.sets(st.sampled_from(["agent", "subagent", "auxiliary"]), min_size=1))
    @examples(60)
    def test_filtered_by_role_every_prompt_is_rebuilt(self, sessions, roles):
        with tempfile.TemporaryDirectory() as folder:
            run, out = Path(folder) / "run", Path(folder) / "out"
            record(run, sessions)
            before = {(s, call.call_id): repr(call) for s, calls in RecordedCalls(run).items() for call in calls}
            wanted = {(s.session_id, call.call_id) for s, calls in sessions for call in calls if call.role in roles}
            try:
                filter_run(run, out, Filter(roles=roles), ignore)
            except InputError:
                assert wanted == set()
                return
            after = {(s, call.call_id): repr(call) for s, calls in RecordedCalls(out).items() for call in calls}
            assert wanted <= after.keys()
            assert after.items() <= before.items()


def test_the_commands_split_filter_and_merge(tmp_path):
    run = make_run(tmp_path / "run", make_session("s"), make_session("t", harness="x", reward=0.0))
    parts, best, merged = tmp_path / "parts", tmp_path / "best", tmp_path / "merged"

    def output(*arguments):
        result = CliRunner().invoke(rolltap, [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    assert output("split", run, "--by", "harness", "--out", parts) == (
        f"1 sessions in {parts / 'h'}\n1 sessions in {parts / 'x'}\n"
    )
    assert output("filter", run, "--min-reward", 0.5, "--role", "agent", "--out", best) == f"1 sessions in {best}\n"
    assert output("merge", best, parts / "x", "--out", merged) == f"2 sessions in {merged}\n"
    assert session_ids(merged) == ["s", "t"]


@pytest.mark.parametrize("options", [[], ["--by", "status", "--parts", "2"]])
def test_split_without_a_criterion_is_refused(tmp_path, options):
    run = make_run(tmp_path / "run", make_session("s"))
    result = CliRunner().invoke(rolltap, ["split", str(run), "--out", str(tmp_path / "out"), *options])
    assert result.exit_code == 2
    assert "give either --by or --parts" in result.stderr
