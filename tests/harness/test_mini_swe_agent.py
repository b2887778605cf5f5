"""mini-swe-agent from PyPI, unmodified, led by the scripted engine over TLS."""

import json
import shutil
from pathlib import Path

import pytest

from rolltap.addons.store import RunWriter, read_rows
from rolltap.trainer.dataset import load_calls
from rolltap.trainer.rollouts.harness import load_harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.scheduler import Plan, rollout
from rolltap.trainer.rollouts.task import Task
from rolltap.trainer.traces import build_traces
from tests.scripted_engine import Say

PRESET = Path(__file__).resolve().parents[2] / "recipes" / "harnesses" / "mini-swe-agent.toml"

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(shutil.which("mini") is None, reason="mini-swe-agent is not installed: see tests/run.sh"),
]


def bash(command, reasoning):
    """A tool call with JSON that no serialiser would write: the harness re-serialises it when it echoes the turn."""
    odd = json.dumps(command, ensure_ascii=False).replace("e", "\\u0065")
    call = f'{{"arguments":{{ "command" :  {odd}}}, "name": "bash"}}'
    return Say(f"<think>\n{reasoning}\n</think>\n\n<tool_call>\n{call}\n</tool_call>")


async def test_a_multi_turn_session_with_tools_is_one_unbroken_trace(scripted_engine, tiny_model, tmp_path):
    scripted_engine.replies += [
        bash("echo héllo > greeting.txt", "I write the file."),
        bash("cat greeting.txt", "I read it back."),
        bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "Done."),
    ]
    task = Task(id="greet", instruction="Greet.", evaluate=["grep", "-q", "héllo", "greeting.txt"])
    run = tmp_path / "run"
    with Recorder(run, engine=scripted_engine.url, model=str(tiny_model)) as recorder:
        plan = Plan(load_harness(PRESET), 1, 1, 300.0)
        (session,) = await rollout(
            [task], plan, recorder, RunWriter(run), policy_version="default", done=lambda session: None
        )
    assert (session.status, session.reward, session.error) == ("completed", 1.0, None)
    calls = load_calls(run)[session.session_id]
    assert [call.kind for call in calls] == ["root", "bridged", "bridged"]
    assert [request["token_ids"] for request in scripted_engine.requests] == [call.prompt_ids for call in calls]
    (trace,), ledger = build_traces(calls, "prefix_merging")
    assert trace.call_ids == [call.call_id for call in calls]
    assert ledger.sampled == ledger.trained == sum(trace.completion_mask)
    assert [e["kind"] for e in read_rows(run, "events")] == ["call_started"] * 3  # and nothing was refused
