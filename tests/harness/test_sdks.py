"""Agents written with the official SDKs, recorded as a user does: `rolltap record --` before the command."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.addons.store.tables import read_rows
from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.rollouts.runtimes.environment import clean_environment
from rolltap.trainer.runs.views.report import summarize
from rolltap.trainer.traces.reader import RecordedCalls
from tests.harness.play import tool_call

pytestmark = pytest.mark.harness

SCRIPTS = Path(__file__).parent / "scripts"
HOSTS = {
    "openai_chat": "api.openai.com",
    "openai_responses": "api.openai.com",
    "anthropic_messages": "api.anthropic.com",
    "google_genai": "generativelanguage.googleapis.com",
}
KEYS = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), "placeholder")


@pytest.mark.parametrize("script", HOSTS)
def test_a_script_that_uses_an_sdk_is_recorded(script, scripted_engine, tokenizer_folder, tmp_path):
    def reply(request):
        """Write the task's file in two turns, then end."""
        prompt = scripted_engine.tokenizer.decode(request["token_ids"])
        turn, path = prompt.count("<tool_response>"), re.search(r"Write (\w+\.txt), twice", prompt)[1]
        if turn == 2:
            return Say(f"<think>\nTwice.\n</think>\n\nI wrote {path}.")
        return Say(tool_call("write_file", {"path": path, "content": f"héllo {turn}\n"}))

    scripted_engine.otherwise = reply
    run, workspace = tmp_path / "run", tmp_path / "workspace"
    workspace.mkdir()
    options = ["--out", run, "--engine", scripted_engine.url, "--model", tokenizer_folder]
    ended = subprocess.run(
        [Path(sys.executable).with_name("rolltap"), "record", *options, "--", sys.executable, SCRIPTS / f"{script}.py"],
        cwd=workspace,
        env={**clean_environment(tmp_path), **KEYS},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines() == ["I wrote whole.txt.", "I wrote streamed.txt."]
    (calls,) = RecordedCalls(run).values()
    assert {call.host for call in calls} == {HOSTS[script]}
    for streamed, path in ((False, "whole.txt"), (True, "streamed.txt")):
        assert (workspace / path).read_text() == "héllo 1\n"
        agents = [call for call in calls if call.stream == streamed]
        assert [call.kind for call in agents[1:]] == ["bridged", "bridged"]
    assert {(call.status, call.violation, call.role) for call in calls} == {("completed", None, "agent")}
    assert [request["token_ids"] for request in scripted_engine.requests] == [call.prompt_ids for call in calls]
    assert {event["kind"] for event in read_rows(run, "events")} == {"call_started", "ended"}
    summary = summarize(run)
    assert summary.uncaptured_calls == 0
    sampled = sum(len(call.completion_ids) for call in calls)
    assert (summary.ledger.sampled, summary.ledger.left_out) == (sampled, {"no_reward": sampled})
