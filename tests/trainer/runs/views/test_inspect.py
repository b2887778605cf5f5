import io
import json
import re
import signal
import sys
from datetime import timedelta

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.text import Text

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import VersionSpan
from rolltap.trainer.cli.main import rolltap, run
from rolltap.trainer.cli.runs import inspect_command
from rolltap.trainer.runs.views.calls import view_call
from rolltap.trainer.runs.views.inspect import call_nodes, call_tree, find_id, view_session
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.runs.views.tables import MOST_ROWS
from rolltap.trainer.traces.ledger import Ledger
from tests.factories import START, add_rows, make_session, write_run
from tests.trainer.forests import forget_a_call
from tests.trainer.runs.views.shown import call, printed


def shape(tree):
    """Return the ids of a drawn tree as nested dicts. The calls of a chain are one key."""
    return {
        " ".join(re.findall(r"^(?:↓ )?\d+ (\w+)", child.label.plain, re.MULTILINE)): shape(child)
        for child in tree.children
    }


class TestRun:
    def test_every_session_is_counted_including_those_without_a_row(self, small_run):
        first, other = summarize(small_run).session_rows
        assert (first.session_id, first.harness, first.status, first.reward) == (
            "first",
            "codex",
            "completed",
            0.5,
        )
        assert (first.calls, first.bridged, first.rendered) == (5, 3, 1)
        assert first.ledger == Ledger(sampled=7, trained=6, left_out={"violation": 1})
        assert (other.session_id, other.harness, other.calls) == ("other", None, 1)
        assert other.ledger == Ledger(sampled=2, trained=0, left_out={"aborted": 2})
        ledger = json.loads(printed(small_run, "--json"))["ledger"]
        assert ledger == {"sampled": 9, "trained": 6, "left_out": {"violation": 1, "aborted": 2}}

    def test_the_reasons_of_rendered_prompts_are_counted_without_numbers_and_ids(self, small_run):
        for number, why in enumerate(
            ("3 earlier calls fit equally well up to message 7", "call 0123456789abcdef")
        ):
            add_rows(
                small_run,
                call(9, f"r{number}", [1], [2], session="r", kind="rendered", kind_reason=why),
            )
        assert summarize(small_run).rendered == {
            "… earlier calls fit equally well up to message …": 2,
            "call …": 1,
        }
        assert "why prompts were rendered" in printed(small_run)

    def test_the_table_of_sessions_is_cut_and_says_so(self, tmp_path):
        times = [START + timedelta(seconds=i) for i in range(MOST_ROWS + 1)]
        write_run(
            tmp_path, *(make_session(f"s{i:02}", started_at=time) for i, time in enumerate(times))
        )
        text = printed(tmp_path)
        assert f"s{MOST_ROWS - 1}" in text
        assert f"s{MOST_ROWS}" not in text
        assert f"the first {MOST_ROWS} of {MOST_ROWS + 1}; --json has all" in text
        assert len(json.loads(printed(tmp_path, "--json"))["session_rows"]) == MOST_ROWS + 1

    def test_an_id_is_whole_in_a_narrow_terminal_and_the_columns_without_room_are_named(
        self, tmp_path
    ):
        name = "count-lines-" + "0123456789abcdef." * 3
        write_run(tmp_path, make_session(name))
        narrow = CliRunner(env={"COLUMNS": "80"}).invoke(inspect_command, [str(tmp_path)]).output
        (line,) = [line for line in narrow.splitlines() if name in line]
        assert line.split()[:2] == [name, "completed"]
        assert re.search(r"no room for: .*bridged/rendered; --json has all columns", narrow)
        narrower = CliRunner(env={"COLUMNS": "20"}).invoke(inspect_command, [str(tmp_path)]).output
        assert name in narrower


class TestSession:
    def test_the_call_tree_is_that_of_the_traces(self, small_run):
        view = view_session(small_run, "first")
        parents = {branch.call_id: branch.parent_id for branch in view.calls}
        assert parents == {"a1": None, "a2": "a1", "b3": "a2", "b4": None, "b5": "a2"}
        third = next(branch for branch in view.calls if branch.call_id == "b3")
        assert (third.prompt_tokens, third.new_tokens, third.completion_tokens) == (9, 1, 1)
        assert view.ledger == Ledger(sampled=7, trained=6, left_out={"violation": 1})

    def test_a_chain_is_one_node_and_its_branches_are_below_it(self, small_run):
        tree = call_tree(view_session(small_run, "first").calls, Text("title"))
        assert shape(tree) == {"a1 a2": {"b3": {}, "b5": {}}, "b4": {}}
        drawn = [
            line[: line.index(" agent")] for line in printed(small_run, "first").splitlines()[1:6]
        ]
        assert drawn == ["├── 1 a1", "│   ↓ 2 a2", "│   ├── 3 b3", "│   └── 5 b5", "└── 4 b4"]

    def test_a_long_chain_is_one_level_deep(self):
        calls = [call(0, "c0", [1], [2])]
        for i in range(1, 400):
            calls.append(call(i, f"c{i}", [3], [4], parent=calls[-1]))
        assert shape(call_tree(call_nodes(calls), Text("title"))) == {
            " ".join(f"c{i}" for i in range(400)): {}
        }

    def test_the_calls_of_a_chain_can_be_told_apart_where_lines_are_folded(self, small_run):
        narrow = Console(file=io.StringIO(), width=30)
        narrow.print(view_session(small_run, "first"))
        starts = [
            line
            for line in narrow.file.getvalue().splitlines()
            if re.match(r"[│├└ ─]*(↓ )?\d [ab]\d agent", line)
        ]
        assert [re.search(r"[ab]\d", line)[0] for line in starts] == ["a1", "a2", "b3", "b5", "b4"]

    def test_a_line_shows_the_outcome_of_a_call(self, small_run):
        drawn = printed(small_run, "first").splitlines()[1:6]
        lines = {line.strip("│├└─↓ ").split(" ")[1]: line for line in drawn}
        assert "a1 agent root 3+2 tokens stop  I look at it." in lines["a1"]
        assert '1+2 tokens stop  bash({"command": "ls"})' in lines["a2"]
        assert lines["b3"].endswith("x" * 59 + "…")
        assert "not trained: violation log-probability 0 is positive" in lines["b5"]

    def test_as_json_it_has_the_sessions_row_if_there_is_one(self, small_run):
        view = json.loads(printed(small_run, "first", "--json"))
        assert view["session"]["started_at"] == START.isoformat()
        assert [branch["call_id"] for branch in view["calls"]] == ["a1", "a2", "b3", "b4", "b5"]
        assert view["ledger"]["sampled"] == 7
        assert json.loads(printed(small_run, "other", "--json"))["session"] is None
        assert "aborted" in printed(small_run, "other")

    def test_all_weights_that_sampled_its_tokens_are_named(self, tmp_path):
        write_run(tmp_path, make_session("first", policy_version="one"))
        for number, version in enumerate(["one", "two", "one"]):
            spans = [
                VersionSpan(version="lost", start=0, end=0),
                VersionSpan(version=version, start=0, end=1),
            ]
            add_rows(tmp_path, call(number, f"c{number}", [number], [9], weight_versions=spans))
        assert view_session(tmp_path, "first").policy_versions == ["one", "two"]
        assert "weights one, two" in printed(tmp_path, "first")


class TestIds:
    IDS = ("abc1", "abc2", "xyz", "abc")

    @pytest.mark.parametrize(("prefix", "found"), [("x", "xyz"), ("abc", "abc")])
    def test_a_unique_prefix_of_an_id_is_accepted_and_a_whole_id_though_it_is_a_prefix(
        self, prefix, found
    ):
        assert find_id(prefix, self.IDS, "call", "session s") == found

    @pytest.mark.parametrize(
        ("prefix", "ids", "message"),
        [
            ("ab", IDS, "3 calls of session s begin with 'ab': abc, abc1, abc2"),
            ("xyy", IDS, "session s has no call 'xyy', only xyz, "),
            ("n17x", [f"n{i}" for i in range(40)], r"n17.* and 35 more$"),
        ],
    )
    def test_another_prefix_is_refused_with_the_most_similar_ids(self, prefix, ids, message):
        with pytest.raises(InputError, match=message):
            find_id(prefix, ids, "call", "session s")

    def test_in_a_run_without_sessions_nothing_is_shown_and_no_similar_ids_are_named(
        self, tmp_path
    ):
        write_run(tmp_path)
        assert printed(tmp_path)
        with pytest.raises(InputError, match=r"has no session 'a'$"):
            view_session(tmp_path, "a")

    def test_a_call_has_the_number_that_the_tree_shows(self, small_run):
        assert view_call(small_run, "first", "3").call.call_id == "b3"
        for outside in ("0", "6"):
            with pytest.raises(
                InputError, match=rf"first \(calls 1 to 5\) has no call '{outside}', only "
            ):
                view_call(small_run, "first", outside)

    def test_both_ids_may_be_abbreviated(self, small_run):
        assert view_call(small_run, "fi", "a2").call.call_id == "a2"
        with pytest.raises(InputError, match=r"session first .* has no call 'z1'"):
            view_call(small_run, "first", "z1")


class TestLedger:
    def test_a_ledger_that_does_not_add_up_is_a_message_and_status_1(
        self, small_run, monkeypatch, capsys
    ):
        forget_a_call(monkeypatch)
        monkeypatch.setattr(sys, "argv", ["rolltap", "inspect", str(small_run)])
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as ended:
                run(rolltap)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert ended.value.code == 1
        assert "the calls hold 7 sampled tokens, the ledger says 5" in " ".join(
            capsys.readouterr().err.split()
        )
