"""The experts of calls behind a stand-in of vLLM that returns them as vLLM does: its CPU build
cannot."""

import base64
import io
import json

import numpy as np
import pytest

from rolltap.addons.store.routing import make_routing
from rolltap.addons.store.tables import read_rows
from tests.addons.harness import recording, user
from tests.factories import make_call
from tests.scripted_engine import Answer

LAYERS = 3
TOP_K = 2


def chosen(ids, dtype=np.uint8):
    """The experts of tokens: each has its own."""
    return (
        np.array(ids)[:, None, None] + np.arange(LAYERS)[:, None] * 7 + np.arange(TOP_K) * 3
    ).astype(dtype) % 200


def encoded(experts):
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def answers(scripted_engine):
    """Make the engine say "Hi.", with the experts of every token that was computed."""

    def say(body, experts=lambda ids: encoded(chosen(ids))):
        ids = [*scripted_engine.ids("Hi."), scripted_engine.tokenizer.eos_token_id]
        start = body["sampling_params"].get("routed_experts_prompt_start", 0)
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": i, "logprob": -1.0} for i in ids]},
            "finish_reason": "stop",
            "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
            "routed_experts": experts([*body["token_ids"], *ids][start:-1]),
        }
        return Answer(200, json.dumps({"choices": [choice]}))

    scripted_engine.otherwise = say
    return say


@pytest.fixture
async def routed(rendering, scripted_engine, answers, tmp_path):
    async with recording(rendering, tmp_path, scripted_engine.url, routing=True) as client:
        yield client


async def test_a_call_has_the_experts_from_the_last_token_of_its_parent_on(routed):
    _, reply = await routed.ask(user())
    await routed.ask(user(), reply["choices"][0]["message"], user("More."))
    parent, child = routed.calls()
    first, second = read_rows(routed.run, "routing")
    assert child["parent_id"] == parent["call_id"] == first["call_id"]
    known = parent["prompt_tail_ids"] + parent["completion_ids"]
    ids = known + child["prompt_tail_ids"] + child["completion_ids"]
    assert first["first"] == 0
    assert second["first"] == len(known) - 1
    assert first["experts"] + second["experts"] == chosen(ids[:-1]).tobytes()
    assert second["layers"] == LAYERS
    assert second["top_k"] == TOP_K
    assert second["expert_bytes"] == 1
    assert second["missing"] is None


@pytest.mark.parametrize(
    ("experts", "missing"),
    [
        (lambda ids: None, "start it with --enable-return-routed-experts"),
        (lambda ids: encoded(chosen(ids[1:])), "of shape"),
        (lambda ids: "no npy", "what is none"),
    ],
    ids=["none", "too few", "broken"],
)
async def test_a_call_without_experts_is_kept_and_says_why(
    routed, scripted_engine, answers, experts, missing
):
    scripted_engine.otherwise = lambda body: answers(body, experts)
    status, _ = await routed.ask(user())
    (call,) = routed.calls()
    (routing,) = read_rows(routed.run, "routing")
    assert status == 200
    assert call["status"] == "completed"
    assert call["violation"] is None
    assert missing in routing["missing"]
    assert routing["experts"] == b""


async def test_experts_that_cannot_be_written_cost_no_call(routed, monkeypatch):
    add_batch = routed.endpoint.writer.add_batch

    def full(table, row):
        if table == "routing":
            raise OSError("the disk is full")
        add_batch(table, row)

    monkeypatch.setattr(routed.endpoint.writer, "add_batch", full)
    assert (await routed.ask(user()))[0] == 200
    assert [call["status"] for call in routed.calls()] == ["completed"]


async def test_without_the_option_the_engine_is_not_asked(harness, scripted_engine, answers):
    await harness.ask(user())
    assert "routed_experts_prompt_start" not in scripted_engine.requests[0]["sampling_params"]
    assert not list(read_rows(harness.run, "routing"))


def test_more_than_256_experts_take_two_bytes():
    call = make_call(1, [5, 6], [7])
    routing = make_routing(call, encoded(chosen([5, 6], np.uint16) + 300))
    assert routing.expert_bytes == 2
    experts = chosen([5, 6], np.uint16) + 300
    assert routing.experts == experts.astype("<u2").tobytes()
