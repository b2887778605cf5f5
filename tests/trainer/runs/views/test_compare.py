"""Two sessions beside each other, as views and as `rolltap inspect` prints them."""

import json

import pytest

from rolltap.trainer.runs.views.compare import compare_sessions, main_line
from rolltap.trainer.traces.reader import iter_sessions
from tests.factories import make_call, make_session, says, write_run
from tests.trainer.runs.views.shown import printed

ASKED = json.dumps([{"role": "user", "content": "Count."}])


def told(content):
    return {"role": "tool", "content": content, "tool_call_id": "of one session"}


def begin(name):
    """Return the first call of a session, whose id is the name and 1."""
    asked = {"call_id": f"{name}1", "session_id": name, "messages": ASKED, "reply": says("", "wc")}
    return make_call(1, [1, 2], [3, 4], **asked)


@pytest.fixture
def run(tmp_path):
    """Write a run with four sessions. b has another result of its first tool call, c ends early, d
    has no calls."""
    rows = [begin("c"), make_session("c"), make_session("d")]
    for name, result, new in (("a", "3", 12), ("b", "4", 13)):
        first = begin(name)
        side = {"call_id": f"{name}2", "session_id": name, "role": "auxiliary"}
        then = {"call_id": f"{name}3", "messages": json.dumps([told(result)])}
        rows += [
            first,
            make_call(2, [1, 9], [ord(name)], reply=says(name), **side),
            make_call(3, [new], [5], after=first, reply=says("done"), **then),
            make_session(name),
        ]
    return write_run(tmp_path, *rows)


def sessions(run):
    return {session.session_id: session for session in iter_sessions(run)}


def difference(run, a, b):
    found = sessions(run)
    return compare_sessions(found[a], found[b])


def test_the_first_message_and_token_that_differ_are_those_of_the_same_call_of_the_main_line(run):
    found = difference(run, "a", "b")
    assert found.messages == {"common": 2, "a": told("3"), "b": told("4")}
    place = {"position": 4, "call_a": "a3", "call_b": "b3"}
    assert found.tokens == {**place, "common": [1, 2, 3, 4], "a": [12, 5], "b": [13, 5]}
    assert json.loads(printed(run, "a", "b", "--json")) == found.to_json()
    text = printed(run, "a", "b")
    assert "The first 2 messages are the same." in text
    assert "The first 4 tokens of call a3 and call b3 are the same." in text
    # a call is no session to compare with
    assert json.loads(printed(run, "a", "a3", "--json"))["call"]["call_id"] == "a3"


def test_a_session_that_ends_before_the_other_has_nothing_there(run):
    found = difference(run, "c", "a")
    assert found.messages == {"common": 2, "a": None, "b": told("3")}
    assert found.tokens["position"] == 4
    assert found.tokens["a"] == []
    assert found.tokens["b"] == [12, 5]


@pytest.mark.parametrize("other", ["a", "d"])
def test_nothing_differs_from_itself_nor_from_a_session_without_calls(run, other):
    found = difference(run, "a", other)
    assert found.messages is None
    assert found.tokens is None


def test_an_answer_that_was_asked_for_again_is_not_of_the_main_line(run):
    first, *others = sessions(run)["a"].calls
    again = make_call("again", [1, 2], [7], session_id="a", messages=ASKED, reply=says("no"))
    again.started_at = others[0].started_at
    assert [call.call_id for call in main_line([first, again, *others])] == ["a1", "a3"]
