from datetime import timedelta
from io import StringIO

from rich.console import Console

from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.records import Event
from rolltap.trainer.runs.views.report import summarize, summarize_digests
from rolltap.trainer.runs.views.sessions import digest_session, session_events
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces
from tests.factories import START, make_call, make_session, write_run


def test_a_runs_sessions_calls_and_failures_are_counted(tmp_path):
    others = (
        "unauthorised",
        "uncaptured",
        "hidden",
        "joined",
        "replayed",
        "continued",
        "switched",
        "fault",
    )
    broken = {"logprobs": [1.0], "violation": "log-probability 0 is positive (1.0)"}
    write_run(
        tmp_path,
        make_call("a", [1]),
        make_call("b", [9], **broken),
        make_call("c", [8], weight_versions=[], status="aborted"),
        make_call("d", [7], role="auxiliary"),
        *(
            Event(kind="call_started", session_id="s", call_id=call_id)
            for call_id in ("a", "b", "c", "lost")
        ),
        Event(kind="refused", session_id="s", host="example.com"),
        *(Event(kind=kind) for kind in others),
        make_session(),
    )
    summary = summarize(tmp_path)
    assert summary.calls == {"completed": 3, "aborted": 1}
    assert summary.refused == {"example.com": 1}
    counts = (
        "interrupted",
        "hidden",
        "unauthorised",
        "uncaptured_calls",
        "retried",
        "continued",
        "switched",
        "faults",
    )
    assert {name: getattr(summary, name) for name in counts} == {
        **dict.fromkeys(counts, 1),
        "retried": 2,
    }
    assert summary.rejected == 0
    assert summary.roles == {"agent": 3, "auxiliary": 1}
    assert summary.violations == {"log-probability 0 is positive (1.0)": 1}
    left_out = {"violation": 1, "aborted": 1, "auxiliary": 1}
    assert summary.ledger == Ledger(sampled=4, trained=1, left_out=left_out)


def test_a_summary_is_made_of_digests_of_the_sessions_read_so_far(tmp_path):
    whole = write_run(
        tmp_path / "whole",
        make_session("a", started_at=START + timedelta(seconds=1), task_id="t", group_id="g"),
        make_call("a1", [1], session_id="a", cached_tokens=0),
        Event(kind="call_started", session_id="a", call_id="lost"),
        make_call("b1", [2], session_id="b"),
        Event(kind="call_started", session_id="events only", call_id="lost too"),
        Event(kind="unauthorised"),
    )
    with SessionIndex(whole, "events") as index:
        digests = [
            digest_session(traced, session_events(index, traced.recorded.session_id))
            for traced in iter_traces(whole, TraceOptions())
        ]
        further = [
            event
            for session_id in ("events only", None)
            for event in session_events(index, session_id)
        ]
    assert summarize_digests(digests, further) == summarize(whole)
    first = summarize_digests(digests[:1])
    assert (first.calls, first.interrupted, first.unauthorised) == ({"completed": 1}, 1, 0)
    assert [(row.session_id, row.task_id, row.group_id) for row in first.session_rows] == [
        ("a", "t", "g")
    ]
    assert summarize(whole).interrupted == 2
    assert summarize_digests([]).calls == {}


def test_names_are_printed_as_they_are_and_not_as_markup(tmp_path):
    write_run(
        tmp_path,
        make_session(policy_version="[/version]"),
        make_call(logprobs=[1.0], violation="[/violation]"),
        Event(kind="refused", session_id="s", host="[/host]"),
        Event(kind="uncaptured", session_id="s", host="h"),
    )
    for markup in (True, False):  # `rolltap inspect` prints without
        Console(file=(printed := StringIO()), width=200).print(summarize(tmp_path), markup=markup)
        for name in ("[/version]", "[/violation]", "[/host]"):
            assert name in printed.getvalue()
        assert "uncaptured model calls" in printed.getvalue()
        assert "[red]" not in printed.getvalue()


def test_a_run_says_how_much_of_its_prompts_came_from_the_engines_cache_and_warns_when_it_is_next_to_nothing(
    tmp_path,
):
    rows = []
    for harness, cached in [("good", 1_000), ("bad", 16)]:
        first = make_call("a", [1] * 1_000, [2] * 200, session_id=harness, cached_tokens=0)
        rows += [make_session(harness, harness=harness), first]
        rows.append(make_call("b", [3] * 50, [], after=first, cached_tokens=cached))
    write_run(tmp_path, *rows)
    summary = summarize(tmp_path)
    counted = [
        (row.harness, row.kind, row.prompts.known_tokens, row.share, row.unused)
        for row in summary.cache
    ]
    assert counted == [
        ("bad", "bridged", 1_200, 16 / 1_250, True),
        ("bad", "root", 0, 0.0, False),
        ("good", "bridged", 1_200, 0.8, False),
        ("good", "root", 0, 0.0, False),
    ]
    assert summary.to_json()["cache"][0]["prompts"]["cached_tokens"] == 16
    Console(file=(printed := StringIO()), width=200).print(summary)
    assert "Continued calls (bad) take next to nothing from the cache" in " ".join(
        printed.getvalue().split()
    )
