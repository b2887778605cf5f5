"""Faults and budgets of sessions: by tables of rows, and by real sessions."""

import asyncio
import re
import sys
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import cache

import pytest

import rolltap
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.traces.facts import (
    CallFact,
    EventFact,
    find_budget,
    find_divergence,
    find_fault,
    model_places,
    on_loopback,
)
from rolltap.trainer.traces.sessions import TraceOptions, load_batch
from tests.deep import cases
from tests.scripted_engine import Answer, Say
from tests.trainer.rollouts.contexts import context_of, pass_time, run_groups

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(second):
    return START + timedelta(seconds=second)


def call(second, role="agent", status="completed", sampled=2):
    return CallFact(f"c{second}", role, status, at(second), sampled)


def fault(second, call_id=None, kind="fault", path="/v1/messages"):
    method = "GET" if path.endswith("models") else "POST"
    return EventFact(kind, call_id, f"{kind} {second}", at(second), method, path)


def budget(second):
    return fault(second, kind="budget")


def told(kind, second, detail=""):
    return EventFact(
        kind, None, detail or f"{kind} {second}", at(second), "POST", "/v9/chat", "api.host"
    )


TLS = (
    r"^no model call came: api.host: .*TLS failed: unknown ca\. The program does not trust the"
    r" recorder's certif"
)


def begun(second):
    return fault(second, f"c{second}", "call_started")


@pytest.mark.parametrize(
    ("calls", "events", "why"),
    [
        ([], [], None),
        ([], [told("rerun", 1)], "diverged: it ended before the call at which it forks"),
        (
            [],
            [told("rerun", 1), told("diverged", 2, "diverged at call 2: ...")],
            "diverged at call 2: ...",
        ),
        ([call(2)], [told("rerun", 1), begun(2)], None),
        ([], [told("rerun", 1), fault(2)], None),
    ],
    ids=str,
)
def test_a_fork_that_does_not_come_to_its_call_has_diverged_unless_we_are_to_blame(
    calls, events, why
):
    assert find_divergence(calls, events) == why


@pytest.mark.parametrize(
    ("calls", "events", "reason"),
    [
        ([], [], "^no model call came: did the program use the proxy"),
        (
            [],
            [EventFact("refused", None, "SNI ''", at(1), "", "", "")],
            "^no model call came: did the program use the pr",
        ),
        (
            [],
            [told("refused", 1)],
            r"^no model call came, only other requests: POST api.host/v9/chat\.",
        ),
        ([], [told("refused", 1, "TLS failed: unknown ca"), told("refused", 2)], TLS),
        ([], [told("refused", 1, "9 refused in all, the last: TLS failed: unknown ca")], TLS),
        (
            [],
            [told("uncaptured", 1), told("refused", 2, "TLS failed: x")],
            r"that look like one: POST api.host/v9/chat \(uncaptured 1\)$",
        ),
        (
            [],
            [told("uncaptured", 1), told("rejected", 2)],
            "^every model call was refused: rejected 2$",
        ),
        ([], [told("rejected", 1), fault(2)], "no token was sampled.*: fault 2"),
        ([], [begun(1)], "no token was sampled"),
        ([], [fault(1), fault(3), fault(2)], "no token was sampled.*: fault 3"),
        # another attempt at a first prompt that is over the budget would be refused too
        ([], [budget(1)], None),
        ([], [budget(1), fault(2)], "fault 2"),
        ([call(1, status="failed", sampled=0)], [begun(1)], "no token was sampled"),
        ([call(1), call(2)], [begun(1), begun(2)], None),
        ([call(1, status="aborted")], [begun(1)], None),
        (
            [call(1), call(2, status="failed", sampled=0)],
            [fault(3, "c2")],
            "did not recover from: fault 3",
        ),
        ([call(1), call(2, status="failed"), call(4)], [fault(3, "c2")], None),
        (
            [call(1), call(2, status="failed"), call(4, status="aborted")],
            [fault(3, "c2")],
            "fault 3",
        ),
        ([call(1), call(2, status="failed"), call(4)], [fault(3, "c2"), fault(5)], "fault 5"),
        # a call that ran beside the failed one and ended later did not see the failure
        ([call(1), call(2, status="failed")], [fault(3, "c2")], "fault 3"),
        # a side question does not stand for the agent, nor a sub-agent
        ([call(1), call(2, status="failed"), call(4, "auxiliary")], [fault(3, "c2")], "fault 3"),
        ([call(1), call(2, status="failed"), call(4, "subagent")], [fault(3, "c2")], "fault 3"),
        ([call(1), call(2, "subagent", "failed"), call(4, "subagent")], [fault(3, "c2")], None),
        ([call(1), call(2, "subagent", "failed"), call(4)], [fault(3, "c2")], None),
        # a side question is no part of solving the task, unless it kept the agent from beginning
        ([call(1), call(2, "auxiliary", "failed")], [fault(3, "c2")], None),
        ([call(1, "auxiliary", "failed", 0), call(3)], [fault(2, "c1")], None),
        ([call(1, "auxiliary", "failed", 0)], [fault(2, "c1")], "no token was sampled"),
        ([call(1, "auxiliary", "failed", 1)], [fault(2, "c1")], "fault 2"),
        (
            [call(1, "auxiliary"), call(2, status="failed", sampled=0)],
            [fault(3, "c2")],
            "no token was sampled",
        ),
        ([call(1, "auxiliary")], [begun(1)], None),
        *(
            ([call(1)], [fault(2, path=path)], None)
            for path in ("/v1/models", "/v1/messages/count_tokens", "/v1beta/models/m:countTokens")
        ),
        ([call(1, "auxiliary")], [fault(2, path="/v1/models")], "fault 2"),
        # refused before it had a role
        ([call(1), call(4, "subagent")], [fault(3)], None),
        ([call(1), call(4, "auxiliary")], [fault(3)], "fault 3"),
        # the row of a call could not be written
        ([call(1)], [begun(1), begun(2)], "call c2 began and could not be recorded"),
        ([call(1), call(3)], [begun(1), begun(2), begun(3)], None),
    ],
)
def test_a_fault_is_a_failure_of_ours_that_nothing_followed(calls, events, reason):
    found = find_fault(calls, events)
    assert found is None if reason is None else re.search(reason, found)


ASKER = """
import httpx, json, os, sys, threading, time
URL, HERE, OPEN = "https://api.openai.com/v1/chat/completions", sys.argv[1], []
def body(text, **fields):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
def ask(text, **fields):
    return httpx.post(URL, json=body(text, **fields), timeout=600).status_code
def first_text(text):
    "Return when the first text of a stream has come. The stream stays open."
    OPEN.append(httpx.stream("POST", URL, json=body(text, stream=True), timeout=600))
    for line in OPEN[0].__enter__().iter_lines():
        if line and json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content"):
            return
def give_up_when_the_engine_is_down(text):
    threading.Thread(target=ask, args=[text], daemon=True).start()
    while not os.path.exists(HERE + "/down"):
        time.sleep(0.01)
def work_on():
    open(HERE + "/works", "w").close()
    time.sleep(600)
"""
SAY = Say("Hi.")
DOWN = Answer(500, "the engine is broken")


@pytest.fixture(scope="module")
def recorder_with(engine, tokenizer_folder, tmp_path_factory):
    """Return the recorder with a patience in seconds, which the tests share."""
    with ExitStack() as stack:

        @cache
        def recorder(patience):
            options = {"rolltap_patience": str(patience)}
            run = tmp_path_factory.mktemp("run")
            return stack.enter_context(
                Recorder(run, engine=engine.url, model=tokenizer_folder, options=options)
            )

        yield recorder


@pytest.fixture
def play(tmp_path, engine, recorder_with, request, monkeypatch):
    async def play(
        script, *replies, patience=0, timeout=600.0, evaluate=("true",), recorder=None, quirks=()
    ):
        """Run one session of a harness. Return its row, and its ledger. Its time limit has passed
        when it works on."""
        recorder = recorder or recorder_with(patience)
        engine.replies.extend(replies)
        task = rolltap.Task(id="t", instruction="go", evaluate=list(evaluate))
        headless = ["-c", ASKER + script, str(tmp_path)]
        harness = rolltap.Harness(
            name="x", program=sys.executable, headless=headless, quirks=list(quirks)
        )
        context = context_of(recorder, tmp_path, harness, timeout=timeout)
        group = Group(task, "g", [re.sub(r"\W+", "-", request.node.name)])
        passing = asyncio.create_task(pass_time(monkeypatch, timeout, tmp_path / "works"))
        (session,) = await run_groups([group], context)
        passing.cancel()
        batch = load_batch(recorder.path, [session.session_id], TraceOptions())
        assert len(batch.rewards) == (session.reward is not None)
        batch.ledger.check()
        return session, batch.ledger

    engine.otherwise = None
    yield play
    engine.replies.clear()
    engine.release()
    engine.loop.call_soon_threadsafe(engine._released.clear)  # the next generation is held again


async def test_an_engine_that_is_down_from_the_start_is_a_fault(play, tokenizer_folder, tmp_path):
    options = {"rolltap_patience": "0"}
    with Recorder(
        tmp_path / "run", engine="http://127.0.0.1:9", model=tokenizer_folder, options=options
    ) as recorder:
        session, ledger = await play("ask('a')", recorder=recorder)
    assert (session.status, session.reward) == ("infrastructure", None)
    assert "no token was sampled" in session.error
    assert "the engine at http://127.0.0.1:9 cannot be reached" in session.error
    assert ledger.sampled == 0


async def test_a_harness_that_makes_no_call_has_no_reward_and_if_it_failed_its_last_line_comes_first(
    play,
):
    session, _ = await play("print('give a key\\n'); sys.exit(3)")
    assert (session.status, session.exit_status, session.reward) == ("infrastructure", 3, None)
    assert session.error.startswith(
        "give a key; no model call came: did the program use the proxy?"
    )
    assert session.error.endswith(
        f"the harness ended with status 3); its output is in {session.session_id}.log"
    )
    session, _ = await play("print('bye')")
    assert session.error.endswith(", and ends with: bye")


async def test_a_crash_of_node_names_the_version_that_was_found_and_the_one_that_the_harness_needs(
    play,
):
    quirks = "Speaks the OpenAI Responses API.", "Needs Node 22.19 or newer."
    session, _ = await play(
        "print('SyntaxError\\n\\nNode.js v20.20.2'); sys.exit(1)", quirks=quirks
    )
    assert session.error.startswith(
        "Node.js v20.20.2 (Needs Node 22.19 or newer.); no model call came"
    )


WRONG = "httpx.post('https://api.openai.com/v1/chat/completions', content=b'{')"
TITLE = (
    "ask('a', response_format={'type': 'json_schema', 'json_schema': {'name': 't', 'schema': {}}})"
)
REFUSED = Answer(200, '{"error": {"message": "bad", "code": 413}}')
CUT = Say("Hello there.", break_after=1)
HELD = Say("Hello there.", hold_after=1)
PLAYS = {
    "dies in the middle": (
        "assert (ask('a'), ask('b'), ask('c')) == (200, 502, 502)",
        [SAY, DOWN, DOWN],
        {},
    ),
    "dies within a reply": ("ask('a'); ask('b')", [SAY, CUT], {"failed": 1}),
    "refuses": ("ask('a'); assert ask('b') in (400, 413)", [SAY, Answer(400, "bad")], {}),
    "refuses in a reply": ("ask('a'); assert ask('b') in (400, 413)", [SAY, REFUSED], {}),
}


@pytest.mark.parametrize(("script", "replies", "failed"), PLAYS.values(), ids=PLAYS)
async def test_an_engine_that_fails_after_a_first_call_is_a_fault(play, script, replies, failed):
    session, ledger = await play(script, *replies)
    assert (session.status, session.exit_status, session.reward) == ("infrastructure", 0, None)
    assert "it did not recover from: the engine at" in session.error
    assert ledger.left_out == {**failed, "infrastructure": ledger.sampled - sum(failed.values())}
    assert ledger.sampled > sum(failed.values())


async def test_a_harness_that_gives_up_while_the_engine_is_down_has_a_fault(play, engine, tmp_path):
    asked = []

    def down(request):
        asked.append(request)
        if len(asked) == 2:  # the recorder has read the first answer
            (tmp_path / "down").touch()
        return DOWN

    engine.otherwise = down
    session, _ = await play(
        "ask('a'); give_up_when_the_engine_is_down('b'); os._exit(0)", SAY, patience=60
    )
    assert (session.status, session.exit_status, session.reward) == ("infrastructure", 0, None)
    assert "answered 500: its log says why" in session.error


RECOVERS = "ask('a'); ask('b') == 200 or ask('b'); sys.exit(ask('c') != 200)"
SLOW = {"evaluate": ["false"]}
STOPPED = ("timeout", 0.0, "stopped after 600 s, the limit of --timeout or of the task's 'timeout'")
NOTHING_TO_JUDGE = "no model call was completed, so that there is no reward"
GOOD, FAILED = ("completed", 1.0, None), ("failed", 1.0, "the harness ended with status 1")
FAULTLESS = {
    "a call after a failure is given up": (
        "ask('a'); first_text('b'); os._exit(0)",
        [SAY, DOWN, HELD],
        {"patience": 60},
        GOOD,
        1,
    ),
    "the harness recovers": (RECOVERS, [SAY, DOWN, SAY, SAY], {}, GOOD, 0),
    "the recorder recovers": (RECOVERS, [SAY, DOWN, SAY, SAY], {"patience": 60}, GOOD, 0),
    "the agent fails": (
        f"ask('a'); assert {WRONG}.status_code == 400; sys.exit(1)",
        [SAY],
        {},
        FAILED,
        0,
    ),
    "the context window is full": (
        "ask('a'); assert ask('so ' * 20_000) == 400",
        [SAY],
        {},
        GOOD,
        0,
    ),
    "stopped while it works": ("ask('a'); work_on()", [SAY], SLOW, STOPPED, 0),
    "stopped within a reply": (
        "ask('a'); first_text('b'); work_on()",
        [SAY, HELD],
        SLOW,
        STOPPED,
        1,
    ),
    "a side question fails": (f"ask('a'); assert {TITLE} == 502", [SAY, DOWN], {}, GOOD, 0),
    "the first call is given up": (
        "first_text('a'); os._exit(0)",
        [HELD],
        {},
        ("completed", None, NOTHING_TO_JUDGE),
        1,
    ),
}


@pytest.mark.parametrize(
    ("script", "replies", "how", "expected", "aborted"),
    cases(FAULTLESS.values(), 0, 3, 5),
    ids=cases(FAULTLESS, 0, 3, 5),
)
async def test_what_the_agent_does_and_what_it_recovers_from_is_no_fault(
    play, script, replies, how, expected, aborted
):
    session, ledger = await play(script, *replies, **how)
    assert (session.status, session.reward, session.error) == expected
    assert ledger.left_out == ({"aborted": aborted} if aborted else {})
    assert ledger.trained == ledger.sampled - aborted


async def test_a_session_whose_judge_has_no_verdict_is_unjudged(play):
    session, ledger = await play("ask('a'); sys.exit(3)", SAY, evaluate=["sh", "-c", "exit 7"])
    assert (session.status, session.exit_status, session.reward) == ("unjudged", 3, None)
    assert session.evidence["ended"] == "failed"  # for a later reward
    assert "the judge ended with status 7" in session.error
    assert ledger.left_out == {"unjudged": ledger.sampled}


async def test_events_name_what_was_ours_and_what_was_the_harnesss(play, recorder_with):
    session, _ = await play(f"{WRONG}; ask('a'); ask('b')", SAY, DOWN)
    rows = {}
    for table in ("calls", "events"):
        every = read_rows(recorder_with(0).path, table)
        rows[table] = [row for row in every if row["session_id"] == session.session_id]
    named = [event for event in rows["events"] if event["kind"] in ("rejected", "fault")]
    assert [event["kind"] for event in named] == ["rejected", "fault"]
    failed = [call["call_id"] for call in rows["calls"] if call["status"] == "failed"]
    assert [event["call_id"] for event in named] == [None, *failed]


@pytest.mark.parametrize(
    ("calls", "events", "expected"),
    [
        ([call(1)], [], None),
        ([call(1)], [budget(2)], "budget: budget 2"),
        ([call(1)], [budget(2), budget(4), budget(3)], "budget: budget 4"),
        # a harness that compacts its history goes on
        ([call(1), call(3, "compaction")], [budget(2)], None),
        ([call(1), call(3, status="failed")], [budget(2)], "budget: budget 2"),
        # a reply that was cut began before the event
        ([call(1), call(2)], [budget(3)], "budget: budget 3"),
        ([call(1)], [fault(2)], None),
    ],
)
def test_a_budget_ended_a_session_when_no_later_call_was_completed(calls, events, expected):
    assert find_budget(calls, events) == expected


def test_a_model_on_loopback_is_named_with_the_place_that_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("OpenAI(base_url='http://127.0.0.1:8000/v1')")
    base_url = {"OPENAI_BASE_URL": "http://localhost:11434/v1", "OTHER": "http://localhost"}
    assert (
        on_loopback(model_places(["python", "agent.py"], base_url))
        == "A model on loopback is asked past the recorder, and there is"
        " 'http://localhost:11434/v1' in OPENAI_BASE_URL and 'http://127.0.0.1:8000/v1' in"
        " agent.py"
    )
    elsewhere = {"OPENAI_BASE_URL": "http://model.rolltap/v1"}
    assert not on_loopback(model_places(["python", "other.py"], elsewhere))
