import io
import json
import re
from datetime import timedelta

import pytest
from rich.console import Console
from rich.text import Text

from rolltap.addons.errors import InputError, LedgerError
from rolltap.addons.store.records import VersionSpan
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
    shapes = {}
    for child in tree.children:
        names = re.findall(r"^(?:↓ )?\d+ (\w+)", child.label.plain, re.MULTILINE)
        shapes[" ".join(names)] = shape(child)
    return shapes


class TestRun:
    def test_every_session_is_counted_including_those_without_a_row(self, small_run):
        first, other = summarize(small_run).session_rows
        assert first.session_id == "first"
        assert first.harness == "codex"
        assert first.status == "completed"
        assert first.reward == 0.5
        assert (first.calls, first.bridged, first.rendered) == (5, 3, 1)
        assert first.ledger == Ledger(sampled=7, trained=6, left_out={"violation": 1})
        assert other.session_id == "other"
        assert other.harness is None
        assert other.ledger == Ledger(sampled=2, trained=0, left_out={"aborted": 2})
        ledger = json.loads(printed(small_run, "--json"))["ledger"]
        assert ledger == {"sampled": 9, "trained": 6, "left_out": {"violation": 1, "aborted": 2}}

    def test_the_reasons_of_rendered_prompts_are_counted_without_numbers_and_ids(self, small_run):
        fit = "3 earlier calls fit equally well up to message 7"
        rendered = {"session": "r", "kind": "rendered"}
        add_rows(
            small_run,
            call(8, "r0", [1], [2], kind_reason=fit, **rendered),
            call(9, "r1", [1], [2], kind_reason="call 0123456789abcdef", **rendered),
        )
        assert summarize(small_run).rendered == {
            "… earlier calls fit equally well up to message …": 2,
            "call …": 1,
        }
        assert "why prompts were rendered" in printed(small_run)

    def test_the_table_of_sessions_is_cut_and_says_so(self, tmp_path):
        for number in range(MOST_ROWS + 1):
            started = START + timedelta(seconds=number)
            write_run(tmp_path, make_session(f"s{number:02}", started_at=started))
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
        narrow = printed(tmp_path, columns=80)
        assert re.search(rf"{name} +completed", narrow)
        assert re.search(r"no room for: .*bridged/rendered; --json has all columns", narrow)
        assert name in printed(tmp_path, columns=20)

    def test_a_ledger_that_does_not_add_up_is_an_error(self, small_run, monkeypatch):
        forget_a_call(monkeypatch)
        with pytest.raises(LedgerError, match="the calls hold 7 sampled tokens, the ledger says 5"):
            summarize(small_run)


class TestSession:
    def test_the_call_tree_is_that_of_the_traces(self, small_run):
        view = view_session(small_run, "first")
        nodes = {node.call_id: node for node in view.calls}
        parents = {call_id: node.parent_id for call_id, node in nodes.items()}
        assert parents == {"a1": None, "a2": "a1", "b3": "a2", "b4": None, "b5": "a2"}
        third = nodes["b3"]
        assert (third.prompt_tokens, third.new_tokens, third.completion_tokens) == (9, 1, 1)
        tree = call_tree(view.calls, Text("title"))
        assert shape(tree) == {"a1 a2": {"b3": {}, "b5": {}}, "b4": {}}
        printed_json = json.loads(printed(small_run, "first", "--json"))
        assert printed_json["session"]["started_at"] == START.isoformat()
        assert [node["call_id"] for node in printed_json["calls"]] == list(nodes)
        assert printed_json["ledger"]["sampled"] == 7

    def test_a_chain_is_drawn_as_one_node_and_a_line_shows_the_outcome_of_a_call(self, small_run):
        lines = {}
        for line in printed(small_run, "first").splitlines()[1:6]:
            place, _, outcome = line.partition(" agent ")
            lines[place] = outcome
        assert list(lines) == ["├── 1 a1", "│   ↓ 2 a2", "│   ├── 3 b3", "│   └── 5 b5", "└── 4 b4"]
        first, second, third, fifth, _ = lines.values()
        assert "root 3+2 tokens stop  I look at it." in first
        assert '1+2 tokens stop  bash({"command": "ls"})' in second
        assert third.endswith("x" * 59 + "…")
        assert "not trained: violation log-probability 0 is positive" in fifth

    def test_a_long_chain_is_one_level_deep(self):
        calls = [call(0, "c0", [1], [2])]
        for i in range(1, 400):
            calls.append(call(i, f"c{i}", [3], [4], parent=calls[-1]))
        (names,) = shape(call_tree(call_nodes(calls), Text("title")))
        assert names.split() == [each.call_id for each in calls]

    def test_the_calls_of_a_chain_can_be_told_apart_where_lines_are_folded(self, small_run):
        narrow = Console(file=io.StringIO(), width=30)
        narrow.print(view_session(small_run, "first"))
        starts = r"^[│├└ ─]*(?:↓ )?\d ([ab]\d) agent"
        found = re.findall(starts, narrow.file.getvalue(), re.MULTILINE)
        assert found == ["a1", "a2", "b3", "b5", "b4"]

    def test_one_without_a_row_is_shown(self, small_run):
        assert json.loads(printed(small_run, "other", "--json"))["session"] is None
        assert "aborted" in printed(small_run, "other")

    def test_all_weights_that_sampled_its_tokens_are_named(self, tmp_path):
        write_run(tmp_path, make_session("first", policy_version="one"))
        lost = VersionSpan(version="lost", start=0, end=0)
        for number, version in enumerate(["one", "two", "one"]):
            spans = [lost, VersionSpan(version=version, start=0, end=1)]
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
            ("a", [], r"session s has no call 'a'$"),
        ],
    )
    def test_another_prefix_is_refused_with_the_most_similar_ids(self, prefix, ids, message):
        with pytest.raises(InputError, match=message):
            find_id(prefix, ids, "call", "session s")

    def test_a_call_has_the_number_that_the_tree_shows_and_both_ids_may_be_abbreviated(
        self, small_run
    ):
        assert view_call(small_run, "first", "3").call.call_id == "b3"
        assert view_call(small_run, "fi", "a2").call.call_id == "a2"
        for outside in ("0", "6", "z1"):
            why = rf"first \(calls 1 to 5\) has no call '{outside}'"
            with pytest.raises(InputError, match=why):
                view_call(small_run, "first", outside)
