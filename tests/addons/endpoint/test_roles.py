import json

import pytest

from rolltap.addons.dialects.types import ModelCall
from rolltap.addons.endpoint.roles import Role, find_role

TOOL = {"type": "function", "function": {"name": "look"}}


def call(*, system="You are an agent.", tools=(TOOL,), **fields):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Go"}]
    return ModelCall("m", messages, list(tools), **fields)


def role(model_call, headers=None, *, tools_before=False):
    return find_role(model_call, headers or {}, tools_before=tools_before)


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


def test_a_reply_that_must_match_a_schema_is_a_side_question():
    found = role(call(schema={}))
    assert (found.role, found.evidence) == ("auxiliary", "the reply must match a JSON schema")


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
    assert role(call(tools=[]), tools_before=True).role == "auxiliary"
    assert role(call(), tools_before=True).role == "agent"
