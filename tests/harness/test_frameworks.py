"""Agents written with frameworks and with SDKs for JavaScript, recorded as a user does: `rolltap record --`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.addons.store.tables import read_rows
from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.rollouts.environment import clean_environment
from rolltap.trainer.traces.reader import RecordedCalls
from rolltap.trainer.views.report import summarize
from tests.harness.play import tool_call

pytestmark = pytest.mark.harness

SCRIPTS = Path(__file__).parent / "frameworks"
INSTALLED = Path(__file__).parents[2] / ".venvs" / "frameworks"
OPENAI, ANTHROPIC, GOOGLE = "api.openai.com", "api.anthropic.com", "generativelanguage.googleapis.com"
KEYS = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"), "placeholder")
OTHER_TRAFFIC = {
    "openai_agents.py": {"/v1/traces/ingest"},
    "litellm_agent.py": {"/BerriAI/litellm/main/model_prices_and_context_window.json"},
}
"""Paths of requests that are no model calls. The recorder refuses them."""


def waits(*case, reason):
    """Return a case that fails until the recorder has what `reason` names."""
    return pytest.param(*case, marks=pytest.mark.xfail(strict=True, reason=reason))


@pytest.mark.parametrize(
    ("script", "mode", "host"),
    [
        ("openai_agents.py", "whole", OPENAI),
        ("openai_agents.py", "previous_response_id", OPENAI),
        ("openai_agents.py", "conversation", OPENAI),
        ("langchain_agent.py", "chat", OPENAI),
        ("langchain_agent.py", "responses", OPENAI),
        ("langchain_agent.py", "previous_response_id", OPENAI),
        ("langchain_agent.py", "anthropic", ANTHROPIC),
        ("langchain_agent.py", "google", GOOGLE),
        ("pydantic_agent.py", "chat", OPENAI),
        ("pydantic_agent.py", "image", OPENAI),
        ("pydantic_agent.py", "responses", OPENAI),
        ("pydantic_agent.py", "anthropic", ANTHROPIC),
        ("pydantic_agent.py", "google", GOOGLE),
        ("litellm_agent.py", "chat", OPENAI),
        ("litellm_agent.py", "anthropic", ANTHROPIC),
        ("litellm_agent.py", "google", GOOGLE),
        ("autogen_agent.py", "chat", OPENAI),
        ("openai_node.mjs", "chat", OPENAI),
        ("anthropic_node.mjs", "messages", ANTHROPIC),
        ("vercel_ai.mjs", "chat", OPENAI),
        ("vercel_ai.mjs", "responses", OPENAI),
    ],
)
def test_an_agent_of_a_framework_is_continued(script, mode, host, scripted_engine, tokenizer_folder, tmp_path):
    def reply(request):
        """Write the task's file in two turns, then end."""
        prompt = scripted_engine.tokenizer.decode(request["token_ids"])
        turn = prompt.count("<tool_response>")
        if turn < 2:
            return Say(tool_call("write_file", {"path": "notes.txt", "content": f"héllo {turn}\n"}))
        return Say("<think>\nTwice.\n</think>\n\nI wrote it.")

    scripted_engine.otherwise = reply
    run, workspace = tmp_path / "run", tmp_path / "workspace"
    workspace.mkdir()
    options = ["--out", run, "--engine", scripted_engine.url, "--model", tokenizer_folder]
    ended = subprocess.run(
        [Path(sys.executable).with_name("rolltap"), "record", *options, "--", *command(script, workspace), mode],
        cwd=workspace,
        env={**clean_environment(tmp_path), **KEYS},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "I wrote it." in ended.stdout
    assert (workspace / "notes.txt").read_text() == "héllo 1\n"
    (calls,) = RecordedCalls(run).values()
    assert {call.host for call in calls} == {host}
    assert [(call.kind, call.kind_reason) for call in calls[1:]] == [("bridged", None)] * 2
    assert calls[0].kind == "root"
    assert {(call.status, call.violation, call.role) for call in calls} == {("completed", None, "agent")}
    assert [request["token_ids"] for request in scripted_engine.requests] == [call.prompt_ids for call in calls]
    refused = {event["path"] for event in read_rows(run, "events") if event["kind"] == "refused"}
    assert refused <= OTHER_TRAFFIC.get(script, set())
    assert summarize(run).uncaptured_calls == 0


def command(script, workspace):
    """Return the command that starts a script. One for Node is copied to `workspace`, beside its packages."""
    if script.endswith(".py"):
        python = INSTALLED / "bin" / "python"
        if not python.exists():
            pytest.skip("the frameworks are not installed: tests/run.sh installs them")
        return [python, SCRIPTS / script]
    if not (INSTALLED / "node_modules").is_dir():
        pytest.skip("the SDKs for JavaScript are not installed: tests/run.sh installs them")
    shutil.copy(SCRIPTS / script, workspace)
    (workspace / "node_modules").symlink_to(INSTALLED / "node_modules")
    return ["node", script]
