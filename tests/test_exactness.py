"""Exactness on real parts: the store holds the tokens that vLLM sampled, and the trainer sees the
same ones."""

import asyncio
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.traces.reader import RecordedCalls
from rolltap.trainer.traces.sessions import TraceOptions, load_batch

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

pytestmark = [pytest.mark.engine, pytest.mark.harness]


@pytest.fixture(scope="module")
def recorded(engine, tmp_path_factory):
    """Record sessions of mini-swe-agent. Return the run folder and the sessions."""
    if shutil.which("mini") is None:
        pytest.skip("mini-swe-agent is not installed: tests/run.sh installs it")
    run = tmp_path_factory.mktemp("run")
    config = RolloutConfig(concurrency=3, timeout=1800)
    (task,) = load_tasks(RECIPES / "quickstart" / "tasks.jsonl")
    groups = [Group(task, task.id, [f"{task.id}-{index}" for index in range(3)])]
    how = {"harness": "mini-swe-agent", "engine": engine.url, "model": engine.model_dir}
    with Worker(config, out=run, **how) as worker:
        sessions = asyncio.run(worker.run(groups, policy_version="default"))
    return run, sessions


def test_the_harness_ran_to_its_end_in_several_turns(recorded):
    run, sessions = recorded
    assert [session.status for session in sessions] == ["completed"] * 3
    # the model skips a turn in one session of a hundred
    assert max(map(len, RecordedCalls(run).values())) >= 3


def test_every_sampled_token_is_what_vllm_reports_when_it_scores_the_same_sequence(
    recorded, engine
):
    run, _ = recorded
    for calls in RecordedCalls(run).values():
        for call in calls:
            sequence = call.prompt_ids + call.completion_ids
            body = {"model": str(engine.model_dir), "prompt": sequence}
            body |= {"max_tokens": 1, "prompt_logprobs": 0}
            answer = engine.http.post("/v1/completions", json=body, timeout=600).json()
            scored = answer["choices"][0]["prompt_logprobs"][len(call.prompt_ids) :]
            ids = []
            logprobs = []
            for entry in scored:
                ((token_id, token),) = entry.items()
                ids.append(int(token_id))
                logprobs.append(token["logprob"])
            assert ids == call.completion_ids
            assert call.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_prompts_of_later_turns_begin_with_the_earlier_turns_tokens(recorded):
    run, _ = recorded
    for calls in RecordedCalls(run).values():
        for earlier, later in itertools.pairwise(calls):
            # mini-swe-agent drops a reply without a tool call from its history: the next call is on
            # another branch
            if json.loads(earlier.reply).get("tool_calls"):
                assert (later.kind, later.parent_id) == ("bridged", earlier.call_id)
                prefix = earlier.prompt_ids + earlier.completion_ids
                assert later.prompt_ids[: len(prefix)] == prefix
        assert len(calls) < 3 or any(call.kind == "bridged" for call in calls)


def test_vllm_used_the_recorded_prompts_and_found_their_prefix_in_its_cache(recorded, engine):
    run, _ = recorded
    bridged = 0
    for calls in RecordedCalls(run).values():
        for call in calls:
            body = {"token_ids": list(call.prompt_ids), "sampling_params": {"max_tokens": 1}}
            body["return_token_ids"] = True
            used = engine.http.post("/inference/v1/generate", json=body, timeout=600).json()
            assert used["prompt_token_ids"] == call.prompt_ids
            if call.kind == "bridged":
                bridged += 1
                # vLLM caches full blocks only: the last one (128 tokens on CPU) is not cached
                assert call.cached_tokens > call.prefix_length - 256
    assert bridged


def test_on_policy_ratios_in_the_trainer_are_one(recorded, engine):
    run, sessions = recorded
    model = AutoModelForCausalLM.from_pretrained(engine.model_dir, dtype=torch.float32)
    batch = load_batch(run, {session.session_id for session in sessions}, TraceOptions())
    masked = sum(sum(trace.completion_mask) for trace in batch.traces)
    assert batch.ledger.sampled == batch.ledger.trained == masked > 0
    for trace in batch.traces:
        prompt = len(trace.prompt_ids)
        ids = torch.tensor([trace.prompt_ids + trace.completion_ids])
        with torch.no_grad():
            logprobs = model(ids).logits.log_softmax(-1)[0, prompt - 1 : -1]
        taken = logprobs.gather(1, ids[0, prompt:, None]).squeeze(1)
        difference = taken - torch.tensor(trace.logprobs)
        ratio = difference[torch.tensor(trace.completion_mask).bool()].exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)
