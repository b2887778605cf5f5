"""The endpoint before a real vLLM: its records, and calls that arrive while weights are loaded."""

import asyncio

import pytest

from tests.addons.harness import said, spans, user

pytestmark = pytest.mark.engine


@pytest.fixture
async def harness(engine, recorded):
    async with recorded(engine.url, key=engine.key) as harness:
        yield harness


async def test_a_streamed_call_is_sampled_after_the_tokens_of_the_call_before(engine, harness):
    _, first = await harness.ask(user(), max_tokens=20)
    turns = [user(), {"role": "assistant", "content": said(first)}, user("And then?")]
    status, events = await harness.stream(*turns, max_tokens=20)
    before, call = harness.calls()
    assert (status, events[-1], call["status"], call["kind"]) == (
        200,
        "[DONE]",
        "completed",
        "bridged",
    )
    prompt = before["prompt_tail_ids"] + before["completion_ids"] + call["prompt_tail_ids"]
    assert len(prompt) == call["prompt_length"]
    body = {
        "model": str(engine.model_dir),
        "prompt": prompt + call["completion_ids"],
        "max_tokens": 1,
    }
    answer = engine.http.post("/v1/completions", json={**body, "prompt_logprobs": 0}).json()
    scored = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
    expected = [next(iter(entry.values()))["logprob"] for entry in scored]
    assert call["logprobs"] == pytest.approx(expected, abs=1e-4)
    for each in (before, call):
        assert (each["violation"], spans(each)) == (
            None,
            [("default", 0, len(each["completion_ids"]))],
        )


async def test_a_call_that_arrives_during_a_reload_waits_and_is_sampled_by_the_new_weights(
    engine, harness
):
    weights = {"method": "reload_weights", "kwargs": {"weights_path": str(engine.model_dir)}}
    engine.http.post("/pause?mode=wait")
    try:
        asked = asyncio.create_task(harness.ask(user(), max_tokens=20))
        loaded = await asyncio.to_thread(engine.http.post, "/collective_rpc", json=weights)
        assert loaded.is_success
        engine.http.post("/update_weight_version", json={"new_version": "new"})
        engine.http.post("/resume")
        status, _ = await asked
    finally:
        engine.http.post("/update_weight_version", json={"new_version": "default"})
        engine.http.post("/resume")
    (call,) = harness.calls()
    assert (status, call["status"], call["error"], call["violation"]) == (
        200,
        "completed",
        None,
        None,
    )
    assert spans(call) == [("new", 0, len(call["completion_ids"]))]
    assert harness.events("continued") + harness.events("fault") == []
