import json

import pytest

from rolltap.addons.dialects.model_call import ModelCall
from rolltap.addons.endpoint.roles import Earlier, Role, find_role

RESULT = {"role": "tool", "content": "x", "tool_call_id": "c1"}
TOOL = {"type": "function", "function": {"name": "look"}}


def call(*, system="You are an agent.", tools=(TOOL,), **fields):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Go"}]
    return ModelCall("m", messages, list(tools), **fields)


def role(model_call, headers=None, **earlier):
    return find_role(model_call, headers or {}, Earlier(**earlier))


def test_a_call_without_evidence_of_another_role_is_the_agents():
    assert role(call()) == Role("agent", "")
    assert role(call(tools=[])) == Role("agent", "")


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("x-claude-code-request-class", "main", "agent"),
        ("x-claude-code-request-class", "subagent", "subagent"),
        ("x-claude-code-request-class", "compaction", "compaction"),
        ("x-claude-code-agent-id", "a1", "subagent"),
        ("x-codex-parent-thread-id", "t1", "subagent"),
        ("x-openai-subagent", "collab_spawn", "subagent"),
        ("x-parent-session-id", "s1", "subagent"),
        ("x-interaction-type", "conversation-subagent", "subagent"),
        ("x-interaction-type", "conversation-agent", "agent"),
        ("x-codex-turn-metadata", json.dumps({"request_kind": "turn"}), "agent"),
        ("x-codex-turn-metadata", json.dumps({"request_kind": "compaction"}), "compaction"),
        ("x-codex-turn-metadata", "not JSON", "agent"),
        ("x-codex-turn-metadata", "[1]", "agent"),
    ],
)
def test_a_header_of_the_harness_names_the_role(header, value, expected):
    found = role(call(), {header: value})
    assert found.role == expected
    assert bool(found.evidence) == (expected != "agent")


@pytest.mark.parametrize(
    ("prompt_id", "expected"), [("s########0", "agent"), ("s#explore-call_1#2", "subagent"), ("s", "agent")]
)
def test_qwen_codes_prompt_id_names_the_role(prompt_id, expected):
    assert role(call(client_metadata={"metadata.promptId": prompt_id})).role == expected


def test_a_request_for_a_compaction_has_that_role():
    assert role(call(client_metadata={"compaction": "trigger"})).role == "compaction"


def test_a_reply_that_must_match_a_schema_is_a_side_question_unless_there_are_tools():
    found = role(call(schema={}, tools=[]), tools=True, role="agent")
    assert (found.role, found.evidence) == ("auxiliary", "the reply must match a JSON schema, and it has no tools")
    assert role(call(schema={}), tools=True).role == "agent"


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-openai-subagent": "collab_spawn"}, {}),
        ({"x-claude-code-request-class": "compaction"}, {}),
        ({}, {"client_metadata": {"compaction": "trigger"}}),
        ({}, {"system": "You are the component that summarizes"}),
    ],
    ids=["a sub-agent's header", "a compaction's header", "a compaction's field", "a system prompt"],
)
def test_a_call_that_is_sampled_under_a_grammar_has_no_role_that_is_trained(headers, fields):
    assert role(call(schema={}, tools=[], **fields), headers).role == "auxiliary"


@pytest.mark.parametrize(("agent", "expected"), [("GeminiCLI/0.61.0/gemini", "subagent"), ("mine/1.0", "agent")])
def test_gemini_clis_sub_agents_have_a_tool_of_their_own(agent, expected):
    tools = [TOOL, {"type": "function", "function": {"name": "complete_task"}}]
    assert role(call(tools=tools), {"user-agent": agent}).role == expected


def test_a_conversation_keeps_its_role():
    assert role(call(), tools=True, role="subagent") == Role("subagent", "it goes on with a sub-agent's call")
    for earlier in ("agent", "compaction", "auxiliary"):
        assert role(call(), tools=True, role=earlier) == Role("agent")


def test_a_conversation_with_tools_that_begins_while_a_tool_call_waits_is_a_sub_agents():
    evidence = "it begins while a tool call of call c1 has no result"
    assert role(call(), tools=True, waiting="c1") == Role("subagent", evidence)
    assert role(call(tools=[]), tools=True, waiting="c1").role == "auxiliary"
    assert role(call(system="You are a title generator"), waiting="c1").role == "auxiliary"


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("You are a title generator. You output ONLY a thread title.", "auxiliary"),
        ("You are the component that summarizes a conversation when its context window overflows.", "compaction"),
        ("You are a coding agent. You are a title generator at times.", "agent"),
    ],
)
def test_known_system_prompts_give_the_role_by_their_first_words(system, expected):
    assert role(call(system=system, tools=[])).role == expected


def test_a_call_without_tools_is_a_side_question_after_a_call_with_tools():
    assert role(call(tools=[]), tools=True).role == "auxiliary"
    assert role(call(), tools=True).role == "agent"


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [("agent", "agent"), ("subagent", "subagent"), ("auxiliary", "auxiliary"), (None, "auxiliary")],
)
def test_a_call_without_tools_that_holds_an_agents_reply_is_that_agents(earlier, expected):
    assert role(call(tools=[]), tools=True, role=earlier).role == expected


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ([RESULT], "agent"),
        ([RESULT, {"role": "user", "content": "Now answer."}], "agent"),
        ([RESULT, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "A title?"}], "auxiliary"),
    ],
    ids=["a result", "a result and a text", "a text"],
)
def test_a_call_that_gives_the_result_of_a_tool_is_no_side_question(ending, expected):
    asked = call(tools=[])
    asked.messages += [{"role": "assistant", "content": "", "tool_calls": []}, *ending]
    assert role(asked, tools=True).role == expected


@pytest.mark.parametrize("header", ["x-openai-subagent", "x-claude-code-agent-id", "x-parent-session-id"])
def test_the_evidence_does_not_repeat_what_a_session_wrote(header):
    assert role(call(), {header: "s3cret"}).evidence == f"header {header}"
    assert "s3cret" not in role(call(client_metadata={"metadata.promptId": "s#s3cret"})).evidence


def test_a_header_of_any_depth_is_read():
    assert role(call(), {"x-codex-turn-metadata": "[" * 8000}).role == "agent"
