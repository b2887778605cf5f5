"""The role of a call, from its request and from the earlier calls of its session."""

import json
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import pytest

from rolltap.addons.dialects.model_call import ModelCall, assistant_message, message_tool_call
from rolltap.addons.endpoint.roles import Earlier, PastCall, Role, SessionRoles, find_role

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


MAIN, HELPER, OTHER = b"main", b"helper", b"other"
USER = {"role": "user", "content": "Go"}


def reply(*ids):
    return assistant_message("", "", [message_tool_call(i, "look", {}) for i in ids])


def results(*ids):
    return [USER, *({"role": "tool", "content": "x", "tool_call_id": i} for i in ids)]


class Asked:
    """The roles of a session. `begin` asks and completes the first call of a conversation."""

    def __init__(self):
        self.roles = SessionRoles()

    def begin(self, call_id, opening, *tool_calls, role="agent"):
        waiting = self.waiting(opening)
        self.roles.complete(call_id, role, opening, reply(*tool_calls))
        return waiting

    def waiting(self, opening):
        """Return the call that waits while a conversation with this opening begins."""
        return self.roles.ask([USER], True, opening, None).waiting

    def go_on(self, opening, parent, *ids):
        return self.roles.ask(results(*ids), True, opening, parent)


def test_a_conversation_that_begins_while_a_tool_call_waits_has_the_call_as_evidence():
    asked = Asked()
    assert asked.begin("c1", MAIN, "t1", "t2") is None
    assert asked.begin("c2", HELPER, "t3", role="subagent") == "c1"
    assert asked.begin("c3", HELPER, role="subagent") == "c1"  # another of the same kind beside it
    assert asked.begin("c4", OTHER, role="subagent") == "c2"  # one of the sub-agent's own


def test_a_request_that_gives_the_result_ends_the_waiting_and_that_of_calls_meanwhile():
    asked = Asked()
    asked.begin("c1", MAIN, "t1")
    asked.begin("c2", HELPER, "t2", role="subagent")  # `t2` reports to the caller, and never gets a result
    assert asked.go_on(MAIN, "c1", "t1") == Earlier(tools=True, role="agent")
    assert asked.waiting(OTHER) is None


def test_a_request_that_goes_on_without_a_result_ends_it_too():
    asked = Asked()
    asked.begin("c1", MAIN, "t1")
    asked.go_on(MAIN, "c1")
    assert asked.waiting(HELPER) is None


def test_a_sub_agents_request_leaves_its_caller_waiting():
    asked = Asked()
    asked.begin("c1", MAIN, "t1")
    asked.begin("c2", HELPER, "t2", role="subagent")
    assert asked.go_on(HELPER, "c2", "t2").role == "subagent"
    assert asked.waiting(OTHER) == "c1"


def test_the_same_agent_again_is_no_sub_agent():
    asked = Asked()
    asked.begin("c1", MAIN, "submit")
    assert asked.begin("c2", MAIN, "t2") is None
    assert asked.waiting(HELPER) == "c2"


def test_a_compaction_ends_all_waiting():
    asked = Asked()
    asked.begin("c1", MAIN, "t1")
    asked.roles.complete("c2", "compaction", MAIN, reply())
    assert asked.waiting(OTHER) is None


START = datetime(2026, 1, 1, tzinfo=UTC)


def past(call_id, began, ended, messages, answer=None, parent=None, sampled_by=None, role="agent"):
    """Return a call with these messages; `began` and `ended` are seconds."""
    times = START + timedelta(seconds=began), START + timedelta(seconds=ended)
    return PastCall(call_id, parent, sampled_by or parent, role, *times, ModelCall("m", messages, [TOOL]), answer)


def restored(*calls):
    roles = SessionRoles()
    roles.restore(calls)
    return roles


class TestRows:
    HELPS: ClassVar = [{"role": "system", "content": "You help."}, USER]

    def test_they_restore_the_same(self):
        roles = restored(
            past("c1", 0, 1, [USER], reply("t1")),
            past("c2", 2, 3, self.HELPS, reply("t2"), role="subagent"),
            past("c3", 4, 5, results("t2")[1:], reply("t3"), parent="c2", role="subagent"),
        )
        assert roles.ask([USER], True, OTHER, None) == Earlier(tools=True, waiting="c3")
        assert roles.ask([USER], True, OTHER, "c3").role == "subagent"

    def test_a_request_that_did_not_complete_has_given_its_results(self):
        main = past("c1", 0, 1, [USER], reply("t1"))
        failed = past("c2", 2, 3, results("t1")[1:], parent="c1")
        assert restored(main).ask([USER], True, OTHER, None).waiting == "c1"
        assert restored(main, failed).ask([USER], True, OTHER, None).waiting is None

    def test_a_rendered_call_goes_on_with_the_call_of_its_reply(self):
        main, rendered = past("c1", 0, 1, [USER], reply("t1")), past("c2", 2, 3, [USER], reply(), sampled_by="c1")
        assert restored(main, rendered).ask([USER], True, OTHER, None).waiting is None

    def test_calls_side_by_side_begin_and_complete_in_the_order_of_time(self):
        main = past("c1", 0, 1, [USER], reply("t1"))
        helper = past("c2", 2, 9, self.HELPS, reply("t2"), role="subagent")
        answer = past("c3", 4, 5, results("t1")[1:], reply(), parent="c1")
        assert restored(main, answer, helper).ask([USER], True, OTHER, None).waiting == "c2"
