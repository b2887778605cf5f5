"""Two sessions beside each other, as views and as `rolltap inspect` prints them."""

import json
from datetime import timedelta

import pytest

from rolltap.trainer.runs.views.compare import compare_sessions, main_line
from rolltap.trainer.traces.reader import iter_sessions
from tests.factories import START, make_call, make_session, says, write_run
from tests.trainer.runs.views.shown import printed

ASKED = [{"role": "user", "content": "Count."}]


def turn(session, number, prompt, sampled, reply, *, after=None, messages=(), **fields):
    """Return a call of a session, that starts `number` seconds after its first one."""
    started = START + timedelta(seconds=number)
    texts = {
        "messages": json.dumps([*messages]),
        "reply": reply,
        "session_id": session,
        "started_at": started,
    }
    return make_call(f"{session}{number}", prompt, sampled, after=after, **{**texts, **fields})


def told(content):
    return {"role": "tool", "content": content, "tool_call_id": "of one session"}


@pytest.fixture
def run(tmp_path):
    """Write a run with four sessions. b has another result of its first tool call, c ends early, d
    has no calls."""
    rows = []
    for name, result, third in (("a", "3", 12), ("b", "4", 13)):
        first = turn(name, 1, [1, 2], [3, 4], says("", "wc"), messages=ASKED)
        side = turn(name, 2, [1, 9], [ord(name)], says(name), role="auxiliary")
        second = turn(name, 3, [third], [5], says("done"), after=first, messages=[told(result)])
        rows += [first, side, second, make_session(name)]
    return write_run(
        tmp_path,
        *rows,
        turn("c", 1, [1, 2], [3, 4], says("", "wc"), messages=ASKED),
        make_session("c"),
        make_session("d"),
    )


def difference(run, a, b):
    found = {session.session_id: session for session in iter_sessions(run)}
    return compare_sessions(found[a], found[b])


def test_the_first_message_and_token_that_differ_are_those_of_the_same_call_of_the_main_line(run):
    found = difference(run, "a", "b")
    ours, theirs = (
        {"role": "tool", "content": text, "tool_call_id": "of one session"} for text in "34"
    )
    assert found.messages == {"common": 2, "a": ours, "b": theirs}
    place = {"position": 4, "call_a": "a3", "call_b": "b3"}
    assert found.tokens == {**place, "common": [1, 2, 3, 4], "a": [12, 5], "b": [13, 5]}
    assert set(found.to_json()) == {"a", "b", "messages", "tokens"}


def test_a_session_that_ends_before_the_other_has_nothing_there(run):
    found = difference(run, "c", "a")
    assert (found.messages["common"], found.messages["a"], found.messages["b"]["role"]) == (
        2,
        None,
        "tool",
    )
    assert (found.tokens["position"], found.tokens["a"], found.tokens["b"]) == (4, [], [12, 5])


@pytest.mark.parametrize("other", ["a", "d"])
def test_nothing_differs_from_itself_nor_from_a_session_without_calls(run, other):
    found = difference(run, "a", other)
    assert (found.messages, found.tokens) == (None, None)


def test_an_answer_that_was_asked_for_again_is_not_of_the_main_line(run):
    calls = {session.session_id: session.calls for session in iter_sessions(run)}["a"]
    again = turn("a", 2, [1, 2], [7], says("never mind"), messages=ASKED)
    assert [call.call_id for call in main_line([calls[0], again, *calls[1:]])] == ["a1", "a3"]


def test_inspect_compares_when_the_second_name_is_a_session_and_no_call(run):
    assert json.loads(printed(run, "a", "b", "--json")) == difference(run, "a", "b").to_json()
    text = printed(run, "a", "b")
    assert "The first 2 messages are the same." in text
    assert "The first 4 tokens of call a3 and call b3 are the same." in text
    assert json.loads(printed(run, "a", "a3", "--json"))["call"]["call_id"] == "a3"
