"""Budgets of a session, over HTTP: what a harness sees, what the engine is asked, and what a
restart keeps."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import routes
from rolltap.addons.endpoint.budget import BudgetUsedUp, SessionBudget, Used
from rolltap.addons.store.records import Call
from tests.addons.endpoint.asking import GEMINI, refused, told, values
from tests.addons.harness import RETRY, user
from tests.scripted_engine import Answer, Say

LONG = "One two three four five six seven eight nine ten."
CHAT = "/v1/chat/completions"
PATHS = [CHAT, "/v1/responses", "/v1/messages", GEMINI]
USED_UP = (404, "insufficient_quota")


@pytest.fixture(autouse=True)
def polite(scripted_engine):
    scripted_engine.otherwise = lambda request: Say("Hello.")


async def post(harness, path, text, session="s1"):
    """Ask by an API. The fields of the others are ignored."""
    contents = [{"role": "user", "parts": [{"text": text}]}]
    body = {"model": "m", "max_tokens": 4096, "input": text, "contents": contents}
    return await harness.send({**body, "messages": [user(text)]}, path=path, session=session)


def max_tokens(engine):
    return [request["sampling_params"]["max_tokens"] for request in engine.requests]


@pytest.mark.parametrize("path", PATHS)
async def test_a_call_over_the_number_of_calls_gets_an_error_of_its_api(
    restart, scripted_engine, path
):
    async with restart(max_calls=1) as harness:
        assert (await post(harness, path, "Hi"))[0] == 200
        status, text = await post(harness, path, "Ho")
        assert (await post(harness, path, "Hu"))[0] == status
        # it has a budget of its own
        assert (await post(harness, path, "Hi", "s2"))[0] == 200
    assert 400 <= status < 429  # harnesses retry 429 and server errors
    assert "it may make 1 model calls" in json.loads(text)["error"]["message"]
    assert len(scripted_engine.requests) == len(harness.calls()) == 2
    over = harness.events("budget")
    assert values(over, "session_id") == ["s1", "s1"]
    assert values(over, "path") == [path, path]
    assert harness.events("rejected") == harness.events("fault") == []


async def test_a_call_that_failed_because_of_the_engine_does_not_count(restart, scripted_engine):
    async with restart(max_calls=1) as harness:
        scripted_engine.replies.append(Answer(500, "no memory left"))
        assert await refused(harness, user("Hi")) == (502, "engine_error")
        await told(harness, user("Ho"))
        assert await refused(harness, user("Hu")) == USED_UP
    async with restart(max_calls=2) as harness:
        await told(harness, user("He"))
        assert await refused(harness, user("Ha")) == USED_UP


async def test_the_last_reply_is_cut_and_then_calls_are_refused(restart, scripted_engine, encode):
    few = len(encode("One two"))
    scripted_engine.replies += [Say(LONG), Say("One two", finish_reason="length")]
    async with restart(max_sampled_tokens=len(encode(LONG)) + 1 + few) as harness:
        await told(harness, user("Hi"))
        await told(harness, user("Ho"))
        assert await refused(harness, user("Hu")) == USED_UP
    assert max_tokens(scripted_engine)[1:] == [few]
    _, call = harness.calls()
    assert call["finish_reason"] == "length"
    sampling = json.loads(call["sampling"])
    assert sampling["max_tokens"] == few < sampling["asked"]["max_tokens"]
    cut, over = harness.events("budget")
    assert cut["call_id"] == call["call_id"]
    assert over["call_id"] is None
    why = f"the reply was cut after the last {few} of the tokens that may be sampled"
    assert cut["detail"] == why


async def test_a_limit_of_the_harness_that_fits_is_not_the_budgets_nor_is_a_prompt_over_the_engines_window(
    restart, scripted_engine
):
    scripted_engine.replies.append(Say("One", finish_reason="length"))
    async with restart(max_sampled_tokens=100, max_prompt_tokens=1_000_000) as harness:
        await told(harness, user("Hi"), max_tokens=1)
        assert await refused(harness, user("a " * 50_000)) == (400, "context_length_exceeded")
    assert harness.events("budget") == []
    assert len(harness.events("rejected")) == 1


async def test_what_was_used_is_known_after_a_restart_and_after_the_session_was_forgotten(
    restart, scripted_engine, encode
):
    most = len(encode("Hello.")) + 1 + 3
    async with restart(max_calls=2, max_sampled_tokens=most) as harness:
        await told(harness, user("Hi"))
    async with restart(max_calls=2, max_sampled_tokens=most) as harness:
        await told(harness, user("Ho"))
        assert max_tokens(scripted_engine)[-1] == 3
        assert await refused(harness, user("Hu")) == USED_UP
        harness.endpoint.forget_idle(0)
        assert harness.endpoint.sessions == {}
        assert await refused(harness, user("Ha")) == USED_UP


async def test_a_retry_is_no_call_of_its_own_also_of_a_reply_that_was_cut_and_after_a_restart(
    restart, scripted_engine
):
    scripted_engine.replies.append(Say("One", finish_reason="length"))
    replies = []
    for first in ({}, RETRY):
        async with restart(max_calls=1, max_sampled_tokens=1) as harness:
            for headers in (first, RETRY):
                body = {"model": "m", "messages": [user("Hi")]}
                status, reply = await harness.send(body, headers=headers)
                assert status == 200
                replies.append({**json.loads(reply), "created": 0})
    assert replies == replies[:1] * 4
    assert len(scripted_engine.requests) == 1


@pytest.mark.parametrize("budget", ["tokens", "calls"])
async def test_calls_at_the_same_time_cannot_use_more_than_there_is(restart, encode, budget):
    """A stream of a call that is refused has its status: nothing of it was sent."""
    most = 2 * (len(encode("Hello.")) + 1)
    limits = {"tokens": {"max_sampled_tokens": most}, "calls": {"max_calls": 2}}
    async with restart(**limits[budget]) as harness:
        asked = [harness.stream(user(f"Hi {number}")) for number in range(6)]
        replies = await asyncio.gather(*asked)
    assert sorted(status for status, _ in replies) == [200] * 2 + [404] * 4
    assert sum(len(call["completion_ids"]) for call in harness.calls()) == most
    assert not any("cut" in event["detail"] for event in harness.events("budget"))


async def test_a_call_waits_for_what_a_running_one_may_give_back(restart, scripted_engine):
    """The second call is not cut, although the first has reserved more than it will use."""
    scripted_engine.replies.append(Say("Hello.", hold_after=1))
    async with restart(max_sampled_tokens=100) as harness:
        first = asyncio.create_task(told(harness, user("Hi"), max_tokens=60))
        await asyncio.to_thread(scripted_engine.holding.wait)
        second = asyncio.create_task(told(harness, user("Ho"), max_tokens=60))
        await told(harness, user("He"), max_tokens=40)  # there is room for it
        assert not second.done()
        scripted_engine.release()
        assert await second == await first == "Hello."
    assert max_tokens(scripted_engine) == [60, 40, 60]
    assert harness.events("budget") == []


async def test_the_end_of_a_session_ends_the_calls_that_wait(restart, scripted_engine, monkeypatch):
    waits = asyncio.Queue()
    given_back = SessionBudget.given_back

    async def wait(budget):
        waits.put_nowait(budget)
        await given_back(budget)

    monkeypatch.setattr(SessionBudget, "given_back", wait)
    async with restart(max_sampled_tokens=10) as harness:
        first = await harness.held(scripted_engine, Say("Hello.", hold_after=1))
        others = [asyncio.create_task(harness.ask(user(text))) for text in ("Ho", "Hu")]
        await asyncio.gather(waits.get(), waits.get())
        assert await harness.end() == (200, "")
        assert [(await call)[0] for call in (first, *others)] == [503, 410, 410]
        scripted_engine.release()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (CHAT, "maximum context length is 20 tokens"),
        ("/v1/responses", "maximum context length is 20 tokens"),
        ("/v1/messages", "prompt is too long: "),
        (GEMINI, "maximum number of tokens allowed (20)"),
    ],
)
async def test_a_long_prompt_gets_its_apis_error_for_a_full_context_window(
    restart, scripted_engine, path, words
):
    """Harnesses compact their history after it and go on."""
    async with restart(max_prompt_tokens=20) as harness:
        status, text = await post(harness, path, LONG * 10)
        assert status == 400
        assert words in text
        headers = {"x-api-key": "x", "anthropic-version": "1"}
        (model,) = (await harness.get("/v1/models", headers))["data"]
        assert 20 in model.values()  # the model's window is the most that a prompt may have
        assert (await post(harness, path, "Hi"))[0] == 200
    assert len(scripted_engine.requests) == 1
    assert len(harness.events("budget")) == 1


CALL = Call(session_id="s", call_id="c", prompt_ids=[])
limits = st.builds(
    SimpleNamespace, max_calls=st.integers(0, 5), max_sampled_tokens=st.integers(0, 40)
)
steps = st.tuples(st.just("take"), st.integers(1, 30)) | st.tuples(
    st.sampled_from(["completed", "aborted", "failed"]), st.integers(0, 30)
)


@given(most=limits, steps=st.lists(steps))
def test_no_order_of_calls_goes_over_a_budget_and_no_call_waits_for_nothing(most, steps):
    budget = SessionBudget(most, Used())
    running = []
    used = Used()
    for step, number in steps:
        if step == "take":
            try:
                grant = budget.take(routes.CHAT, number)
            except BudgetUsedUp:
                tokens_out = most.max_sampled_tokens and used.tokens >= most.max_sampled_tokens
                calls_out = most.max_calls and used.calls + len(running) >= most.max_calls
                assert calls_out or (tokens_out and not running)
                continue
            if grant is None:
                assert running
                continue
            assert 0 < grant.tokens <= number
            assert grant.cut == (grant.tokens < number)
            running.append(grant)
        elif running:
            grant = running.pop()
            sampled = min(number, grant.tokens)
            fault = step == "failed"
            ended = replace(CALL, status=step, completion_ids=[0] * sampled)
            grant.give_back(ended, fault=fault)
            used.add(step, sampled, None, fault=fault)
        reserved = sum(grant.tokens for grant in running)
        assert not most.max_calls or used.calls + len(running) <= most.max_calls
        assert not most.max_sampled_tokens or used.tokens + reserved <= most.max_sampled_tokens
    assert budget.used == used


@pytest.mark.parametrize(
    ("status", "error", "fault", "calls"),
    [
        ("completed", None, False, 1),
        ("aborted", "the harness closed the connection", False, 1),
        ("aborted", "the session ended, while it waited for an engine: none is up", False, 0),
        ("failed", "no such token", False, 1),
        ("failed", "no engine answers", True, 0),
    ],
)
def test_every_call_that_an_engine_was_asked_counts_unless_it_ends_in_a_fault_of_ours(
    status, error, fault, calls
):
    budget = SessionBudget(SimpleNamespace(max_calls=9, max_sampled_tokens=0), Used())
    grant = budget.take(routes.CHAT, 5)
    grant.give_back(replace(CALL, status=status, error=error), fault=fault)
    assert budget.used.calls == calls
    if status != "failed":
        row = {"status": status, "error": error, "completion_ids": None}
        assert Used.of([row]).calls == calls
