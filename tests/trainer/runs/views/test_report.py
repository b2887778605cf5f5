from datetime import UTC, datetime, timedelta
from io import StringIO

from rich.console import Console

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Call, Event, Session, VersionSpan
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.runs.views.report import VersionRewards, reward_steps, summarize

START = datetime(2026, 1, 1, tzinfo=UTC)


def session(number, version, reward):
    started = START + timedelta(seconds=number)
    return Session(
        session_id=f"s{number}",
        task_id="t",
        group_id="g",
        harness="h",
        status="completed",
        exit_status=0,
        reward=reward,
        error=None,
        policy_version=version,
        started_at=started,
    )


def test_steps_are_in_the_order_in_which_the_versions_were_used():
    sessions = [session(3, "10", 1.0), session(1, "9", 0.0), session(2, "9", 0.5), session(4, None, None)]
    assert reward_steps(sessions) == [
        VersionRewards("9", 2, 0.25, 0.5),
        VersionRewards("10", 1, 1.0, 1.0),
        VersionRewards("default", 1, None, None),
    ]


def test_the_attempts_at_a_step_are_one_entry_for_they_have_the_same_weights():
    sessions = [session(1, "1a2b3c4d.9.0", 0.0), session(2, "1a2b3c4d.9.1", 1.0), session(3, "1a2b3c4d.10.1", 1.0)]
    assert reward_steps(sessions) == [
        VersionRewards("1a2b3c4d.9", 2, 0.5, 1.0),
        VersionRewards("1a2b3c4d.10", 1, 1.0, 1.0),
    ]


def test_a_fault_has_no_reward_whoever_recorded_one():
    fault = session(1, "9", 1.0)
    fault.status = "infrastructure"
    assert reward_steps([fault, session(2, "9", 0.5)]) == [VersionRewards("9", 2, 0.5, 0.5)]


def test_a_runs_sessions_calls_and_failures_are_counted(tmp_path):
    write_metadata(tmp_path, {})
    writer = RunWriter(tmp_path)
    versions = [VersionSpan(version="v", start=0, end=1)]
    writer.add_call(
        Call(
            session_id="s1", call_id="a", prompt_ids=[1], completion_ids=[2], logprobs=[-1.0], weight_versions=versions
        )
    )
    writer.add_call(
        Call(
            session_id="s1",
            call_id="b",
            prompt_ids=[9],
            completion_ids=[2],
            logprobs=[1.0],
            weight_versions=versions,
            violation="log-probability 0 is positive (1.0)",
        )
    )
    writer.add_call(
        Call(
            session_id="s1",
            call_id="c",
            prompt_ids=[8],
            completion_ids=[2],
            logprobs=[-1.0],
            weight_versions=[],
            status="aborted",
        )
    )
    writer.add_call(
        Call(
            session_id="s1",
            call_id="d",
            prompt_ids=[7],
            completion_ids=[2],
            logprobs=[-1.0],
            weight_versions=versions,
            role="auxiliary",
        )
    )
    for call_id in ("a", "b", "c", "lost"):
        writer.add_event(Event(kind="call_started", session_id="s1", call_id=call_id))
    writer.add_event(Event(kind="refused", session_id="s1", host="example.com"))
    for kind in ("unauthorised", "uncaptured", "hidden", "joined", "replayed", "continued", "switched", "fault"):
        writer.add_event(Event(kind=kind))
    writer.add_session(session(1, "v", 1.0))
    summary = summarize(tmp_path)
    assert summary.calls == {"completed": 3, "aborted": 1}
    assert summary.interrupted == 1
    assert summary.refused == {"example.com": 1}
    assert summary.hidden == 1
    assert (summary.unauthorised, summary.uncaptured_calls, summary.retried, summary.continued) == (1, 1, 2, 1)
    assert (summary.switched, summary.rejected, summary.faults) == (1, 0, 1)
    assert summary.roles == {"agent": 3, "auxiliary": 1}
    assert summary.violations == {"log-probability 0 is positive (1.0)": 1}
    assert summary.ledger.left_out == {"violation": 1, "aborted": 1, "auxiliary": 1}
    assert (summary.ledger.sampled, summary.ledger.trained) == (4, 1)


def test_names_are_printed_as_they_are_and_not_as_markup(tmp_path):
    write_metadata(tmp_path, {})
    with RunWriter(tmp_path) as writer:
        writer.add_session(session(1, "[/version]", 1.0))
        writer.add_call(
            Call(
                session_id="s1",
                call_id="a",
                prompt_ids=[1],
                completion_ids=[2],
                logprobs=[1.0],
                weight_versions=[VersionSpan(version="v", start=0, end=1)],
                violation="[/violation]",
            )
        )
        writer.add_event(Event(kind="refused", session_id="s1", host="[/host]"))
        writer.add_event(Event(kind="uncaptured", session_id="s1", host="h"))
    for markup in (True, False):  # `rolltap inspect` prints without
        Console(file=(printed := StringIO()), width=200).print(summarize(tmp_path), markup=markup)
        for name in ("[/version]", "[/violation]", "[/host]"):
            assert name in printed.getvalue()
        assert "uncaptured model calls" in printed.getvalue()
        assert "[red]" not in printed.getvalue()


def test_a_run_says_how_much_of_its_prompts_came_from_the_engines_cache_and_warns_when_it_is_next_to_nothing(tmp_path):
    write_metadata(tmp_path, {})
    with RunWriter(tmp_path) as writer:
        for number, (harness, cached) in enumerate([("good", 1_000), ("bad", 16)], start=1):
            recorded = session(number, "v", 1.0)
            recorded.harness = harness
            writer.add_session(recorded)
            first = Call(session_id=f"s{number}", call_id="a", prompt_ids=[1] * 1_000, completion_ids=[2] * 200)
            first.logprobs, first.cached_tokens = [-1.0] * 200, 0
            first.weight_versions = [VersionSpan(version="v", start=0, end=200)]
            writer.add_call(first)
            prompt = [*first.prompt_ids, *first.completion_ids, *[3] * 50]
            call = Call(session_id=f"s{number}", call_id="b", prompt_ids=prompt, parent_id="a", prefix_length=1_200)
            call.kind, call.cached_tokens = "bridged", cached
            writer.add_call(call)
    summary = summarize(tmp_path)
    counted = [(row.harness, row.kind, row.prompts.known_tokens, row.share, row.unused) for row in summary.cache]
    assert counted == [
        ("bad", "bridged", 1_200, 16 / 1_250, True),
        ("bad", "root", 0, 0.0, False),
        ("good", "bridged", 1_200, 0.8, False),
        ("good", "root", 0, 0.0, False),
    ]
    assert summary.to_json()["cache"][0]["prompts"]["cached_tokens"] == 16
    Console(file=(printed := StringIO()), width=200).print(summary)
    assert "Continued calls (bad) take next to nothing from the cache" in " ".join(printed.getvalue().split())
