import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Event
from rolltap.addons.store.tables import read_rows
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


def make(run, **sessions):
    """Write a run whose sessions have these names and fields."""
    return make_run(run, *(make_session(name, **fields) for name, fields in sessions.items()))


def events_of(run):
    """Return the number of events by session."""
    return Counter(event["session_id"] for event in read_rows(run, "events"))


class TestSplit:
    def test_a_split_by_a_field_has_a_run_for_each_value(self, tmp_path):
        harnesses = {"s": {"harness": "a/b"}, "t": {"harness": ".x"}, "u": {"harness": "a/b"}}
        run = make(tmp_path / "run", **harnesses)
        add_rows(run, make_call("a", session_id="v"))
        counts = split_run(run, tmp_path / "out", ignore, by="harness")
        assert counts == {"a%2Fb": 2, "%2Ex": 1, "_none": 1}
        parts = {part.name: part for part in (tmp_path / "out").iterdir()}
        assert {name: ids_of(part) for name, part in parts.items()} == {
            "a%2Fb": ["s", "u"],
            "%2Ex": ["t"],
            "_none": ["v"],
        }
        for part in parts.values():
            assert read_metadata(part) == read_metadata(run)
        # those of no session are in the first part
        assert events_of(parts["a%2Fb"]) == {None: 1, "s": 3, "u": 3}
        assert events_of(parts["%2Ex"]) == {"t": 3}

    def test_even_parts_keep_groups_whole(self, tmp_path):
        names = ["a0", "a1", "a2", "b0", "c0", "c1", "d0"]
        run = make(tmp_path / "run", **{name: {"group_id": name[0]} for name in names})
        assert split_run(run, tmp_path / "out", ignore, parts=2) == {"part-0": 4, "part-1": 3}
        assert ids_of(tmp_path / "out" / "part-0") == ["a0", "a1", "a2", "d0"]
        assert ids_of(tmp_path / "out" / "part-1") == ["b0", "c0", "c1"]
        with pytest.raises(InputError, match="has only 4 groups of sessions"):
            split_run(run, tmp_path / "more", ignore, parts=5)

    def test_a_run_without_sessions_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="has no sessions"):
            split_run(make(tmp_path / "empty"), tmp_path / "out", ignore, by="status")


TIMED_OUT = {
    "reward": None,
    "status": "timeout",
    "harness": "x",
    "task_id": "other",
    "suspicions": {"odd_files": 0},
}
BETTER = {
    "reward": 0.5,
    "policy_version": "2",
    "runtime": "sandbox",
    "suspicions": {"git_history": 3},
}


class TestFilter:
    @pytest.mark.parametrize(
        ("criteria", "kept"),
        [
            ({}, "stuv"),
            ({"min_reward": 0.5}, "st"),
            ({"max_reward": 0.5}, "t"),
            ({"min_reward": 0.0, "max_reward": 0.9}, "t"),
            ({"harnesses": ["x", "h"]}, "stu"),
            ({"harnesses": ["x"]}, "u"),
            ({"policy_versions": ["2"]}, "t"),
            ({"statuses": ["timeout"]}, "u"),
            ({"tasks": ["other"]}, "u"),
            ({"runtimes": ["sandbox", "container"]}, "t"),
            ({"suspicious": True}, "t"),
            ({"suspicious": False}, "suv"),
            ({"suspicions": ["web_search", "git_history"]}, "t"),
            ({"session_ids": ["v", "s"]}, "sv"),
            ({"harnesses": ["h"], "max_reward": 0.5}, "t"),
        ],
        ids=str,
    )
    def test_sessions_that_fit_every_criterion_are_kept_whole(self, tmp_path, criteria, kept):
        run = make(tmp_path / "run", s={}, t=BETTER, u=TIMED_OUT)
        add_rows(run, make_call("a", session_id="v"))
        out = tmp_path / "out"
        assert filter_run(run, out, Filter(**criteria), ignore) == len(kept)
        assert ids_of(out) == list(kept)
        before = traces_of(run)
        assert traces_of(out) == {session_id: before[session_id] for session_id in kept}
        assert events_of(out) == dict.fromkeys(kept.replace("v", ""), 3)
        assert read_metadata(out) == read_metadata(run)

    def test_the_last_row_of_a_session_counts_and_all_of_them_are_kept(self, tmp_path):
        run = add_rows(make(tmp_path / "run", s={"reward": 0.0}), make_session("s"))
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
        alone = make_call("root", session_id="t")
        run = tmp_path / "run"
        record(run, [(make_session("s"), calls), (make_session("t"), [alone])])
        for name in ("side", "helper"):
            add_rows(run, Event(kind="replayed", session_id="s", call_id=name))
        out = tmp_path / "out"
        assert filter_run(run, out, Filter(roles=["subagent"]), ignore) == 1
        assert ids_of(out) == ["s"]
        kept = {call.call_id: call for call in RecordedCalls(out)["s"]}
        assert set(kept) == {"root", "helper", "deeper"}
        assert kept["deeper"].prompt_ids == [1, 2, 5, 6, 7]
        _, ledger = build_traces(list(kept.values()), "per_request")
        assert ledger.left_out == {}
        events = [(event["kind"], event["call_id"]) for event in read_rows(out, "events")]
        started = [("call_started", name) for name in ("root", "helper", "deeper")]
        assert events == [*started, ("refused", None), ("replayed", "helper")]

    @pytest.mark.parametrize(
        ("criteria", "message"),
        [
            ({"min_reward": 2.0}, r"no session of .* fits"),
            ({"roles": ["compaction"]}, r"no session of .* fits"),
            ({"session_ids": ["s", "gone"]}, "has no session gone"),
            ({"suspicions": ["cheating"]}, "no rule of suspicion is named 'cheating': choose ref"),
        ],
    )
    def test_a_filter_without_a_match_writes_nothing(self, tmp_path, criteria, message):
        run = make(tmp_path / "run", s={}, t={})
        with pytest.raises(InputError, match=message):
            filter_run(run, tmp_path / "out", Filter(**criteria), ignore)
        assert list(tmp_path.iterdir()) == [run]


WAYS = [{"by": field} for field in get_args(SplitBy)] + [{"parts": 1}]


class TestProperties:
    @given(recorded_sessions(), st.sampled_from(WAYS))
    @examples(60)
    def test_the_parts_of_a_run_merge_to_its_rows(self, sessions, how):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            merged = Path(folder) / "merged"
            parts = Path(folder) / "parts"
            record(run, sessions)
            names = split_run(run, parts, ignore, **how)
            merge_runs([parts / name for name in names], merged, ignore)
            assert rows_of(merged) == rows_of(run)
            assert traces_of(merged) == traces_of(run)

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
            merged = Path(folder) / "merged"
            record(run, sessions)
            parts = []
            for value in values:
                with suppress(InputError):
                    filter_run(run, Path(folder) / value, Filter(**{field: [value]}), ignore)
                    parts.append(Path(folder) / value)
            merge_runs(parts, merged, ignore)
            expected = rows_of(run)
            for row in read_rows(run, "events"):
                if not row["session_id"]:
                    expected["events"][row["digest"]] -= 1
            assert rows_of(merged) == expected

    @given(
        recorded_sessions(),
        st.sets(st.sampled_from(["agent", "subagent", "auxiliary"]), min_size=1),
    )
    @examples(60)
    def test_filtered_by_role_every_prompt_is_rebuilt(self, sessions, roles):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            out = Path(folder) / "out"
            record(run, sessions)
            before = calls_of(run)
            wanted = {key for key, call in before.items() if call.role in roles}
            try:
                filter_run(run, out, Filter(roles=roles), ignore)
            except InputError:
                assert wanted == set()
                return
            after = calls_of(out)
            assert wanted <= after.keys()
            for key, call in after.items():
                assert repr(call) == repr(before[key])


def calls_of(run):
    """Return (session, call) -> the call."""
    found = {}
    for session_id, calls in RecordedCalls(run).items():
        found |= {(session_id, call.call_id): call for call in calls}
    return found
