import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Event
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.cli.main import rolltap
from rolltap.trainer.runs.edit import Filter, SplitBy, filter_run, split_run
from rolltap.trainer.runs.merge import merge_runs
from rolltap.trainer.traces.build import build_traces
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from tests.deep import examples
from tests.factories import add_rows, make_call, make_session
from tests.trainer.runs.recorded_runs import (
    ids_of,
    ignore,
    make_run,
    record,
    recorded_sessions,
    rows_of,
    traces_of,
)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", make_session("s"), make_session("t"))


def output(*arguments):
    result = CliRunner().invoke(
        rolltap, [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0
    return result.stdout


class TestSplit:
    def test_a_split_by_a_field_has_a_run_for_each_value(self, tmp_path):
        sessions = [
            make_session("s", harness="a/b"),
            make_session("t", harness=".x"),
            make_session("u", harness="a/b"),
        ]
        run = make_run(tmp_path / "run", *sessions, tokenizer_sha256="one")
        add_rows(run, make_call("a", session_id="v"))
        parts = {"a%2Fb": ["s", "u"], "%2Ex": ["t"], "_none": ["v"]}
        counts = {name: len(sessions) for name, sessions in parts.items()}
        assert split_run(run, tmp_path / "out", ignore, by="harness") == counts
        assert {part.name: ids_of(part) for part in (tmp_path / "out").iterdir()} == parts
        for part in (tmp_path / "out").iterdir():
            assert read_metadata(part) == read_metadata(run)

    def test_events_of_no_session_are_in_the_first_part(self, tmp_path):
        run = make_run(tmp_path / "run", make_session("s", status="failed"), make_session("t"))
        split_run(run, tmp_path / "out", ignore, by="status")
        events = {
            part: list(read_rows(tmp_path / "out" / part, "events"))
            for part in ("failed", "completed")
        }
        assert [event["session_id"] for event in events["failed"]] == [None, "s", "s", "s"]
        assert [event["session_id"] for event in events["completed"]] == ["t", "t", "t"]

    def test_even_parts_keep_groups_whole(self, tmp_path):
        groups = {"a": 3, "b": 1, "c": 2, "d": 1}
        sessions = [
            make_session(f"{name}{i}", group_id=name)
            for name, size in groups.items()
            for i in range(size)
        ]
        run = make_run(tmp_path / "run", *sessions)
        assert split_run(run, tmp_path / "out", ignore, parts=2) == {"part-0": 4, "part-1": 3}
        assert ids_of(tmp_path / "out" / "part-0") == ["a0", "a1", "a2", "d0"]
        assert ids_of(tmp_path / "out" / "part-1") == ["b0", "c0", "c1"]

    def test_more_parts_than_groups_and_a_run_without_sessions_are_refused(self, run, tmp_path):
        with pytest.raises(InputError, match="has only 1 groups of sessions"):
            split_run(run, tmp_path / "out", ignore, parts=2)
        with pytest.raises(InputError, match="has no sessions"):
            split_run(make_run(tmp_path / "empty"), tmp_path / "out", ignore, by="status")


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
            ({"session_ids": ["v", "s"]}, ["s", "v"]),
            ({"harnesses": ["h"], "max_reward": 0.5}, ["t"]),
        ],
        ids=str,
    )
    def test_sessions_that_fit_every_criterion_are_kept_whole(self, tmp_path, criteria, kept):
        run = make_run(
            tmp_path / "run",
            make_session("s"),
            make_session(
                "t",
                reward=0.5,
                policy_version="2",
                runtime="sandbox",
                suspicions={"git_history": 3},
            ),
            make_session(
                "u",
                "timeout",
                harness="x",
                reward=None,
                task_id="other",
                suspicions={"odd_files": 0},
            ),
        )
        add_rows(run, make_call("a", session_id="v"))
        out = tmp_path / "out"
        assert filter_run(run, out, Filter(**criteria), ignore) == len(kept)
        assert ids_of(out) == kept
        assert traces_of(out) == {session_id: traces_of(run)[session_id] for session_id in kept}
        events = Counter(event["session_id"] for event in read_rows(out, "events"))
        assert events == {session_id: 3 for session_id in kept if session_id != "v"}
        assert read_metadata(out) == read_metadata(run)

    def test_the_last_row_of_a_session_counts_and_all_of_them_are_kept(self, tmp_path):
        run = make_run(tmp_path / "run", make_session("s", reward=0.0))
        add_rows(run, make_session("s"))
        assert filter_run(run, tmp_path / "out", Filter(min_reward=1.0), ignore) == 1
        assert load_sessions(tmp_path / "out")["s"].reward == 1.0

    def test_a_role_keeps_its_calls_and_their_ancestors(self, tmp_path):
        calls = [
            make_call("root"),
            make_call("side", [1, 2, 3], [4], role="auxiliary"),
            make_call("helper", [1, 2, 5], [6], role="subagent"),
            make_call("deeper", [1, 2, 5, 6, 7], [8], role="subagent"),
            make_call("other", [9], [9]),
        ]
        run = tmp_path / "run"
        record(
            run,
            [(make_session("s"), calls), (make_session("t"), [make_call("root", session_id="t")])],
        )
        add_rows(
            run,
            *(Event(kind="replayed", session_id="s", call_id=name) for name in ("side", "helper")),
        )
        assert filter_run(run, tmp_path / "out", Filter(roles=["subagent"]), ignore) == 1
        kept = {call.call_id: call for call in RecordedCalls(tmp_path / "out")["s"]}
        roles = {call_id: call.role for call_id, call in kept.items()}
        assert roles == {"root": "agent", "helper": "subagent", "deeper": "subagent"}
        assert kept["deeper"].prompt_ids == [1, 2, 5, 6, 7]
        assert build_traces(list(kept.values()), "per_request")[1].left_out == {}
        events = [
            (event["kind"], event["call_id"]) for event in read_rows(tmp_path / "out", "events")
        ]
        started = [("call_started", name) for name in ("root", "helper", "deeper")]
        assert events == [*started, ("refused", None), ("replayed", "helper")]
        assert ids_of(tmp_path / "out") == ["s"]

    @pytest.mark.parametrize(
        ("criteria", "message"),
        [
            ({"min_reward": 2.0}, r"no session of .* fits"),
            ({"roles": ["compaction"]}, r"no session of .* fits"),
            ({"session_ids": ["s", "gone"]}, "has no session gone"),
        ],
    )
    def test_a_filter_without_a_match_writes_nothing(self, run, tmp_path, criteria, message):
        with pytest.raises(InputError, match=message):
            filter_run(run, tmp_path / "out", Filter(**criteria), ignore)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


class TestProperties:
    @given(
        recorded_sessions(),
        st.sampled_from([*({"by": field} for field in get_args(SplitBy)), {"parts": 1}]),
    )
    @examples(60)
    def test_the_parts_of_a_run_merge_to_its_rows(self, sessions, parts):
        with tempfile.TemporaryDirectory() as folder:
            run, out = Path(folder) / "run", Path(folder) / "parts"
            record(run, sessions)
            names = split_run(run, out, ignore, **parts)
            merge_runs([out / name for name in names], Path(folder) / "merged", ignore)
            assert rows_of(Path(folder) / "merged") == rows_of(run)
            assert traces_of(Path(folder) / "merged") == traces_of(run)

    @given(
        recorded_sessions(),
        st.sampled_from([("harnesses", ["h1", "h2"]), ("policy_versions", ["1", "2"])]),
    )
    @examples(60)
    def test_matching_and_other_sessions_merge_to_the_rows_of_all_sessions(
        self, sessions, criterion
    ):
        field, values = criterion
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            record(run, sessions)
            parts = []
            for value in values:
                with suppress(InputError):
                    filter_run(run, Path(folder) / value, Filter(**{field: [value]}), ignore)
                    parts.append(Path(folder) / value)
            merge_runs(parts, Path(folder) / "merged", ignore)
            expected = rows_of(run)
            expected["events"] -= Counter(
                row["digest"] for row in read_rows(run, "events") if not row["session_id"]
            )
            assert rows_of(Path(folder) / "merged") == expected

    @given(
        recorded_sessions(),
        st.sets(st.sampled_from(["agent", "subagent", "auxiliary"]), min_size=1),
    )
    @examples(60)
    def test_filtered_by_role_every_prompt_is_rebuilt(self, sessions, roles):
        with tempfile.TemporaryDirectory() as folder:
            run, out = Path(folder) / "run", Path(folder) / "out"
            record(run, sessions)
            wanted = {
                (s.session_id, call.call_id)
                for s, calls in sessions
                for call in calls
                if call.role in roles
            }
            try:
                filter_run(run, out, Filter(roles=roles), ignore)
            except InputError:
                assert wanted == set()
                return
            after = {
                (s, call.call_id): repr(call)
                for s, calls in RecordedCalls(out).items()
                for call in calls
            }
            before = {
                (s, call.call_id): repr(call)
                for s, calls in RecordedCalls(run).items()
                for call in calls
            }
            assert wanted <= after.keys()
            assert after.items() <= before.items()


def test_the_commands_split_filter_and_merge(tmp_path):
    run = make_run(tmp_path / "run", make_session("s"), make_session("t", harness="x", reward=0.0))
    parts, best, merged = tmp_path / "parts", tmp_path / "best", tmp_path / "merged"
    split = output("split", run, "--by", "harness", "--out", parts)
    assert split == f"1 session in {parts / 'h'}\n1 session in {parts / 'x'}\n"
    assert (
        output("filter", run, "--min-reward", 0.5, "--role", "agent", "--out", best)
        == f"1 session in {best}\n"
    )
    assert output("merge", best, parts / "x", "--out", merged) == f"2 sessions in {merged}\n"
    assert ids_of(merged) == ["s", "t"]


@pytest.mark.parametrize("options", [[], ["--by", "status", "--parts", "2"]])
def test_split_without_a_criterion_is_refused(run, tmp_path, options):
    result = CliRunner().invoke(
        rolltap, ["split", str(run), "--out", str(tmp_path / "out"), *options]
    )
    assert result.exit_code == 2
    assert "give either --by or --parts" in result.stderr
