from datetime import timedelta
from io import StringIO

import pytest
from rich.console import Console

from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.records import Event
from rolltap.trainer.runs.views.report import summarize, summarize_digests
from rolltap.trainer.runs.views.sessions import digest_session, session_events
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces
from tests.factories import START, add_rows, make_call, make_session, write_run


def started(call_id, session_id="s"):
    return Event(kind="call_started", session_id=session_id, call_id=call_id)


def test_a_runs_sessions_calls_and_failures_are_counted(tmp_path):
    broken = {"logprobs": [1.0], "violation": "log-probability 0 is positive (1.0)"}
    write_run(
        tmp_path,
        make_call("a", [1]),
        make_call("b", [9], **broken),
        make_call("c", [8], weight_versions=[], status="aborted"),
        make_call("d", [7], role="auxiliary"),
        *map(started, ["a", "b", "c", "lost"]),
        Event(kind="refused", session_id="s", host="example.com"),
        make_session(),
    )
    for kind in ("unauthorised", "uncaptured", "hidden", "joined", "replayed", "continued"):
        add_rows(tmp_path, Event(kind=kind))
    add_rows(tmp_path, Event(kind="switched"), Event(kind="fault"))
    summary = summarize(tmp_path)
    assert summary.calls == {"completed": 3, "aborted": 1}
    assert summary.refused == {"example.com": 1}
    assert summary.interrupted == 1
    assert summary.hidden == 1
    assert summary.unauthorised == 1
    assert summary.uncaptured_calls == 1
    assert summary.retried == 2
    assert summary.continued == 1
    assert summary.switched == 1
    assert summary.faults == 1
    assert summary.rejected == 0
    assert summary.roles == {"agent": 3, "auxiliary": 1}
    assert summary.violations == {"log-probability 0 is positive (1.0)": 1}
    left_out = {"violation": 1, "aborted": 1, "auxiliary": 1}
    assert summary.ledger == Ledger(sampled=4, trained=1, left_out=left_out)


def test_a_summary_is_made_of_digests_of_the_sessions_read_so_far(tmp_path):
    later = START + timedelta(seconds=1)
    write_run(
        tmp_path,
        make_session("a", started_at=later, task_id="t", group_id="g"),
        make_call("a1", [1], session_id="a", cached_tokens=0),
        started("lost", "a"),
        make_call("b1", [2], session_id="b"),
        started("lost too", "events only"),
        Event(kind="unauthorised"),
    )
    digests = []
    with SessionIndex(tmp_path, "events") as index:
        for traced in iter_traces(tmp_path, TraceOptions()):
            events = session_events(index, traced.recorded.session_id)
            digests.append(digest_session(traced, events))
        further = [*session_events(index, "events only"), *session_events(index, None)]
    whole = summarize(tmp_path)
    assert summarize_digests(digests, further) == whole
    assert whole.interrupted == 2
    first = summarize_digests(digests[:1])
    assert first.calls == {"completed": 1}
    assert first.interrupted == 1
    assert first.unauthorised == 0
    [row] = first.session_rows
    assert (row.session_id, row.task_id, row.group_id) == ("a", "t", "g")
    assert summarize_digests([]).calls == {}


@pytest.mark.parametrize("markup", [True, False])  # `rolltap inspect` prints without
def test_names_are_printed_as_they_are_and_not_as_markup(tmp_path, markup):
    write_run(
        tmp_path,
        make_session(policy_version="[/version]"),
        make_call(logprobs=[1.0], violation="[/violation]"),
        Event(kind="refused", session_id="s", host="[/host]"),
        Event(kind="uncaptured", session_id="s", host="h"),
    )
    terminal = Console(file=StringIO(), width=200)
    terminal.print(summarize(tmp_path), markup=markup)
    printed = terminal.file.getvalue()
    for shown in ("[/version]", "[/violation]", "[/host]", "uncaptured model calls"):
        assert shown in printed
    assert "[red]" not in printed


def test_a_run_says_how_much_of_its_prompts_came_from_the_engines_cache_and_warns_if_next_to_none(
    tmp_path,
):
    write_run(tmp_path)
    for harness, cached in (("good", 1_000), ("bad", 16)):
        first = make_call("a", [1] * 1_000, [2] * 200, session_id=harness, cached_tokens=0)
        second = make_call("b", [3] * 50, [], after=first, cached_tokens=cached)
        add_rows(tmp_path, make_session(harness, harness=harness), first, second)
    summary = summarize(tmp_path)
    cache = [(row.harness, row.kind, row.prompts.known_tokens, row.share) for row in summary.cache]
    assert cache == [
        ("bad", "bridged", 1_200, 16 / 1_250),
        ("bad", "root", 0, 0.0),
        ("good", "bridged", 1_200, 0.8),
        ("good", "root", 0, 0.0),
    ]
    assert [row.unused for row in summary.cache] == [True, False, False, False]
    assert summary.to_json()["cache"][0]["prompts"]["cached_tokens"] == 16
    terminal = Console(file=StringIO(), width=200)
    terminal.print(summary)
    warning = "Continued calls (bad) take next to nothing from the cache"
    assert warning in " ".join(terminal.file.getvalue().split())
