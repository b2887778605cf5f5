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
from tests.addons.harness import RETRY, content, user
from tests.scripted_engine import Answer, Say

LONG = "One two three four five six seven eight nine ten."
REQUESTS = {
    "/v1/chat/completions": lambda text: {"model": "m", "messages": [user(text)]},
    "/v1/responses": lambda text: {"model": "m", "input": text},
    "/v1/messages": lambda text: {"model": "m", "max_tokens": 4096, "messages": [user(text)]},
    "/v1beta/models/m:generateContent": lambda text: {
        "contents": [{"role": "user", "parts": [{"text": text}]}]
    },
}


@pytest.fixture(autouse=True)
def polite(scripted_engine):
    scripted_engine.otherwise = lambda request: Say("Hello.")


async def post(harness, path, text):
    return await harness.send(REQUESTS[path](text), path=path)


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_call_over_the_number_of_calls_gets_an_error_of_its_api(
    restart, scripted_engine, path
):
    async with restart(max_calls=1) as harness:
        assert (await post(harness, path, "Hi"))[0] == 200
        status, text = await post(harness, path, "Ho")
        again, _ = await post(harness, path, "Hu")
        other, _ = await harness.send(
            REQUESTS[path]("Hi"), path=path, session="s2"
        )  # it has a budget of its own
    assert other == 200
    assert 400 <= status < 429  # harnesses retry 429 and server errors
    assert again == status
    assert "it may make 1 model calls" in json.loads(text)["error"]["message"]
    assert len(scripted_engine.requests) == len(harness.calls()) == 2
    assert [(event["session_id"], event["path"]) for event in harness.events("budget")] == [
        ("s1", path)
    ] * 2
    assert harness.events("rejected") == harness.events("fault") == []


async def test_of_streamed_calls_at_the_same_time_no_more_than_allowed_get_a_stream(restart):
    async with restart(max_calls=3) as harness:
        replies = await asyncio.gather(*(harness.stream(user(f"Hi {n}")) for n in range(8)))
    assert [status for status, _ in replies].count(200) == len(harness.calls()) == 3
    assert all(
        400 <= status < 429 and "budget" in events[0] for status, events in replies if status != 200
    )


async def test_a_call_that_failed_because_of_the_engine_does_not_count(restart, scripted_engine):
    async with restart(max_calls=1) as harness:
        scripted_engine.replies.append(Answer(500, "no memory left"))
        assert (await harness.ask(user("Hi")))[0] >= 500
        assert (await harness.ask(user("Ho")))[0] == 200
        assert (await harness.ask(user("Hu")))[0] == 404
    async with restart(max_calls=2) as harness:
        assert (await harness.ask(user("He")))[0] == 200
        assert (await harness.ask(user("Ha")))[0] == 404


async def test_the_last_reply_is_cut_and_then_calls_are_refused(restart, scripted_engine, encode):
    few = len(encode("One two"))
    scripted_engine.replies += [Say(LONG), Say("One two", finish_reason="length")]
    async with restart(max_sampled_tokens=len(encode(LONG)) + 1 + few) as harness:
        assert (await harness.ask(user("Hi")))[1]["choices"][0]["finish_reason"] == "stop"
        assert (await harness.ask(user("Ho")))[1]["choices"][0]["finish_reason"] == "length"
        assert (await harness.ask(user("Hu")))[0] == 404
    assert [request["sampling_params"]["max_tokens"] for request in scripted_engine.requests][
        1:
    ] == [few]
    sampling = json.loads(harness.calls()[1]["sampling"])
    assert sampling["max_tokens"] == few < sampling["asked"]["max_tokens"]
    cut, refused = harness.events("budget")
    assert (cut["call_id"], refused["call_id"]) == (harness.calls()[1]["call_id"], None)
    assert (
        cut["detail"] == f"the reply was cut after the last {few} of the tokens that may be sampled"
    )


async def test_a_limit_of_the_harness_that_fits_is_not_the_budgets_nor_is_a_prompt_over_the_engines_window(
    restart, scripted_engine
):
    scripted_engine.replies.append(Say("One", finish_reason="length"))
    async with restart(max_sampled_tokens=100, max_prompt_tokens=1_000_000) as harness:
        assert (await harness.ask(user("Hi"), max_tokens=1))[0] == 200
        assert (await harness.ask(user("a " * 50_000)))[0] == 400
    assert (len(harness.events("budget")), len(harness.events("rejected"))) == (0, 1)


async def test_what_was_used_is_known_after_a_restart_and_after_the_session_was_forgotten(
    restart, scripted_engine, encode
):
    used = len(encode("Hello.")) + 1
    async with restart(max_calls=2, max_sampled_tokens=used + 3) as harness:
        assert (await harness.ask(user("Hi")))[0] == 200
    async with restart(max_calls=2, max_sampled_tokens=used + 3) as harness:
        assert (await harness.ask(user("Ho")))[0] == 200
        assert scripted_engine.requests[-1]["sampling_params"]["max_tokens"] == 3
        assert (await harness.ask(user("Hu")))[0] == 404
    async with restart(max_calls=2) as harness:
        assert (await harness.ask(user("He")))[0] == 404
        harness.endpoint.forget_idle(0)
        assert harness.endpoint.sessions == {}
        assert (await harness.ask(user("Ha")))[0] == 404


async def test_a_retry_is_no_call_of_its_own_also_of_a_reply_that_was_cut_and_after_a_restart(
    restart, scripted_engine
):
    scripted_engine.replies.append(Say("One", finish_reason="length"))
    replies = []
    for headers in ({}, RETRY):
        async with restart(max_calls=1, max_sampled_tokens=1) as harness:
            for sent in (headers, RETRY):
                replies.append(
                    await harness.send({"model": "m", "messages": [user("Hi")]}, headers=sent)
                )
    assert {status for status, _ in replies} == {200}
    first, *others = [{**json.loads(reply), "created": 0} for _, reply in replies]
    assert others == [first] * 3
    assert len(scripted_engine.requests) == 1


async def test_calls_at_the_same_time_cannot_use_more_than_there_is(
    restart, scripted_engine, encode
):
    one = len(encode("Hello.")) + 1
    async with restart(max_sampled_tokens=2 * one) as harness:
        replies = await asyncio.gather(*(harness.ask(user(f"Hi {n}")) for n in range(6)))
    assert sorted(status for status, _ in replies) == [200, 200, 404, 404, 404, 404]
    assert sum(len(call["completion_ids"]) for call in harness.calls()) == 2 * one
    assert all("cut" not in event["detail"] for event in harness.events("budget"))


async def test_a_call_waits_for_what_a_running_one_may_give_back(restart, scripted_engine):
    """The second call is not cut, although the first has reserved more than it will use."""
    scripted_engine.replies.append(Say("Hello.", hold_after=1))
    async with restart(max_sampled_tokens=100) as harness:
        first = asyncio.create_task(harness.stream(user("Hi"), max_tokens=60))
        await asyncio.to_thread(scripted_engine.holding.wait)
        second = asyncio.create_task(harness.stream(user("Ho"), max_tokens=60))
        third = await harness.stream(user("He"), max_tokens=40)  # there is room for it
        assert not second.done()
        scripted_engine.release()
        assert (
            content("\n\n".join(f"data: {event}" for event in [*(await second)[1], ""])) == "Hello."
        )
        assert ((await first)[0], third[0]) == (200, 200)
    assert [request["sampling_params"]["max_tokens"] for request in scripted_engine.requests] == [
        60,
        40,
        60,
    ]
    assert harness.events("budget") == []


async def test_the_end_of_a_session_ends_the_calls_that_wait(restart, scripted_engine, monkeypatch):
    waits, given_back = asyncio.Queue(), SessionBudget.given_back

    async def wait(budget):
        waits.put_nowait(budget)
        await given_back(budget)

    monkeypatch.setattr(SessionBudget, "given_back", wait)
    async with restart(max_sampled_tokens=10) as harness:
        first = await harness.held(scripted_engine, Say("Hello.", hold_after=1))
        second = asyncio.create_task(harness.ask(user("Ho")))
        third = asyncio.create_task(harness.ask(user("Hu")))
        await asyncio.gather(waits.get(), waits.get())
        assert await harness.end() == (200, "")
        assert [(await call)[0] for call in (first, second, third)] == [503, 410, 410]
        scripted_engine.release()


WORDS = ["maximum context length is 20 tokens"] * 2 + [
    "prompt is too long: ",
    "maximum number of tokens allowed (20)",
]


@pytest.mark.parametrize(("path", "words"), list(zip(REQUESTS, WORDS, strict=True)))
async def test_a_long_prompt_gets_its_apis_error_for_a_full_context_window(
    restart, scripted_engine, path, words
):
    """Harnesses compact their history after it and go on."""
    async with restart(max_prompt_tokens=20) as harness:
        status, text = await post(harness, path, LONG * 10)
        assert (status, words in text) == (400, True), text
        (model,) = (await harness.get("/v1/models", {"x-api-key": "x", "anthropic-version": "1"}))[
            "data"
        ]
        assert 20 in model.values()  # the model's window is the most that a prompt may have
        assert (await post(harness, path, "Hi"))[0] == 200
    assert len(scripted_engine.requests) == 1
    assert len(harness.events("budget")) == 1


CALL = Call(session_id="s", call_id="c", prompt_ids=[])


@given(
    most=st.builds(
        SimpleNamespace, max_calls=st.integers(0, 5), max_sampled_tokens=st.integers(0, 40)
    ),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 30)),
            st.tuples(st.sampled_from(["completed", "aborted", "failed"]), st.integers(0, 30)),
        )
    ),
)
def test_no_order_of_calls_goes_over_a_budget_and_no_call_waits_for_nothing(most, steps):
    budget, running, used = SessionBudget(most, Used()), [], Used()
    for step, number in steps:
        if step == "take":
            try:
                grant = budget.take(routes.CHAT, number)
            except BudgetUsedUp:
                calls_out = most.max_calls and used.calls + len(running) >= most.max_calls
                assert calls_out or (
                    most.max_sampled_tokens
                    and used.tokens >= most.max_sampled_tokens
                    and not running
                )
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
            grant.give_back(
                replace(CALL, status=step, completion_ids=[0] * sampled), fault=step == "failed"
            )
            used.add(step, sampled, None, fault=step == "failed")
        if most.max_calls:
            assert used.calls + len(running) <= most.max_calls
        if most.max_sampled_tokens:
            assert used.tokens + sum(grant.tokens for grant in running) <= most.max_sampled_tokens
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
