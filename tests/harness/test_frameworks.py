"""Agents written with frameworks and with SDKs for JavaScript, recorded as a user does: `rolltap
record --`."""

import shutil
from pathlib import Path

import pytest

from tests.deep import cases
from tests.harness.play import missing, tool_call

pytestmark = pytest.mark.harness

SCRIPTS = Path(__file__).parent / "frameworks"
INSTALLED = Path(__file__).parents[2] / ".venvs" / "frameworks"
OPENAI = "api.openai.com"
ANTHROPIC = "api.anthropic.com"
GOOGLE = "generativelanguage.googleapis.com"
OTHER_TRAFFIC = {
    "openai_agents.py": {"/v1/traces/ingest"},
    "litellm_agent.py": {"/BerriAI/litellm/main/model_prices_and_context_window.json"},
}
"""Paths of requests that are no model calls. The recorder refuses them."""
OWN_CHANGES = {"autogen_agent.py": "its tools are not those of any earlier call"}
"""Why the last call of a framework that rewrites its own prompt is not continued."""


@pytest.mark.parametrize(
    ("script", "mode", "host"),
    cases(
        [
            ("openai_agents.py", "whole", OPENAI),
            ("openai_agents.py", "previous_response_id", OPENAI),
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
        1,
        2,
        11,
        13,
        15,
        16,
        17,
        18,
    ),
)
def test_an_agent_of_a_framework_is_continued(
    script, mode, host, write_twice, record_agent, command, scripted_engine
):
    played = record_agent(*command(script), mode)
    calls = played.calls
    assert {call.host for call in calls} == {host}
    last = ("rendered", OWN_CHANGES[script]) if script in OWN_CHANGES else ("bridged", None)
    assert [(call.kind, call.kind_reason) for call in calls[1:]] == [("bridged", None), last]
    assert calls[0].kind == "root"
    previous = [calls[0].call_id, None if script in OWN_CHANGES else calls[1].call_id]
    assert [call.parent_id for call in calls[1:]] == previous
    assert {call.role for call in calls} == {"agent"}
    sent = [request["token_ids"] for request in scripted_engine.requests]
    assert sent == [call.prompt_ids for call in calls]
    assert {event["path"] for event in played.of("refused")} <= OTHER_TRAFFIC.get(script, set())
    played.check_whole()
    assert played.summary.hidden == (len(calls) if mode == "image" else 0)


@pytest.mark.deep
def test_the_question_after_a_reflection_without_tools_is_rendered_too(
    write_twice, record_agent, command
):
    calls = record_agent(*command("autogen_agent.py"), "asked_again").calls
    assert [call.kind for call in calls] == ["root", "bridged", "rendered", "rendered"]
    assert f"message 6 is the reply of call {calls[2].call_id}" in calls[-1].kind_reason


@pytest.mark.parametrize(
    ("script", "mode"),
    cases(
        [
            ("openai_agents.py", "whole"),
            ("langchain_agent.py", "chat"),
            ("openai_node.mjs", "chat"),
        ],
        0,
        2,
    ),
)
def test_a_tool_of_a_framework_reaches_a_local_server(
    script, mode, local_server, lead_turns, record_agent, command, scripted_engine
):
    asked = tool_call("get_page", {"url": local_server})
    written = tool_call("write_file", {"path": "notes.txt", "content": "héllo 1\n"})
    lead_turns(asked, written, "I wrote it.")
    played = record_agent(*command(script), mode)
    assert [call.kind for call in played.calls] == ["root", "bridged", "bridged"]
    assert "pong" in scripted_engine.tokenizer.decode(played.calls[1].prompt_ids)
    assert "localhost" not in [event["host"] for event in played.of("refused")]


@pytest.mark.deep  # short, programs with a preset are
def test_gptme_is_continued(lead_turns, record_agent):
    gptme = INSTALLED.with_name("gptme") / "bin" / "gptme"
    if not gptme.exists():
        missing("gptme")
    first = tool_call("save", {"path": "notes.txt", "content": "héllo 0\n"})
    second = tool_call("save", {"path": "notes.txt", "content": "héllo 1\n"})
    end = f"I wrote it.\n\n{tool_call('complete', {})}"
    lead_turns(first.replace("<tool_call>", "So:\n\n<tool_call>"), second, end)
    options = ["--non-interactive", "--model", "openai/gpt-4.1"]
    played = record_agent(gptme, *options, "Write notes.txt, twice.")
    main = played.main
    assert [call.kind for call in main] == ["root", "bridged", "bridged"]
    assert [call.parent_id for call in main[1:]] == [call.call_id for call in main[:-1]]
    # the title of the conversation
    assert [call.role for call in played.calls if call not in main] == ["auxiliary"]
    assert played.summary.uncaptured_calls == 0


@pytest.fixture
def lead_turns(lead):
    """Lead the engine by turns, by the results of tools in the prompt. A prompt without tools gets
    the last one."""

    def lead_turns(*turns):
        lead(lambda prompt: turns[prompt.count("<tool_response>") if "<tools>" in prompt else -1])

    return lead_turns


@pytest.fixture
def record_agent(record, workspace):
    """Record a program that writes notes.txt in `workspace`."""

    def record_agent(*program):
        played = record(*program)
        assert "I wrote " in played.log
        assert (workspace / "notes.txt").read_text() == "héllo 1\n"
        return played

    return record_agent


@pytest.fixture
def command(workspace):
    """Return the command that starts a script. One for Node is copied to `workspace`, beside its
    packages."""

    def command(script):
        if script.endswith(".py"):
            python = INSTALLED / "bin" / "python"
            if not python.exists():
                missing("the environment of the frameworks")
            return [python, SCRIPTS / script]
        if not (INSTALLED / "node_modules").is_dir():
            missing("the folder of the SDKs for JavaScript")
        shutil.copy(SCRIPTS / script, workspace)
        (workspace / "node_modules").symlink_to(INSTALLED / "node_modules")
        return ["node", script]

    return command
