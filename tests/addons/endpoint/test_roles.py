"""The role of a call, from its request and from the earlier calls of its session."""

from datetime import timedelta
from typing import ClassVar

import pytest

from rolltap.addons.dialects.call import ModelCall, assistant_message, message_tool_call
from rolltap.addons.endpoint.roles import Earlier, PastCall, SessionRoles, find_role
from tests.factories import START

RESULT = {"role": "tool", "content": "x", "tool_call_id": "c1"}
TOOL = {"type": "function", "function": {"name": "look"}}
COMPLETE = {"type": "function", "function": {"name": "complete_task"}}


def call(*, system="You are an agent.", tools=(TOOL,), **fields):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Go"}]
    return ModelCall("m", messages, list(tools), **fields)


def role(model_call, headers=None, **earlier):
    return find_role(model_call, headers or {}, Earlier(**earlier))


COMPACTS = "You are the component that summarizes a conversation when its context window overflows."
AFTER_TOOLS = {"tools": True}
ANSWER = {"role": "assistant", "content": "Done."}


def without_tools(*ending):
    """Return a call without tools that gives a tool's result."""
    asked = call(tools=[])
    asked.messages += [{"role": "assistant", "content": "", "tool_calls": []}, RESULT, *ending]
    return asked


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
        ("x-codex-turn-metadata", '{"request_kind": "turn"}', "agent"),
        ("x-codex-turn-metadata", '{"request_kind": "compaction"}', "compaction"),
        ("x-codex-turn-metadata", "not JSON", "agent"),
        ("x-codex-turn-metadata", "[1]", "agent"),
        ("x-codex-turn-metadata", "[" * 8000, "agent"),
    ],
)
def test_headers_of_harnesses_name_a_role(header, value, expected):
    found = role(call(), {header: value})
    assert found.role == expected
    assert bool(found.evidence) == (expected != "agent")
    assert role(call(schema={}, tools=[]), {header: value}).role == "auxiliary"


@pytest.mark.parametrize(
    ("asked", "earlier", "expected"),
    [
        (call(), {}, "agent"),
        (call(tools=[]), {}, "agent"),
        # fields of the request; Qwen Code's prompt id
        (call(client_metadata={"metadata.promptId": "s########0"}), {}, "agent"),
        (call(client_metadata={"metadata.promptId": "s#explore-call_1#2"}), {}, "subagent"),
        (call(client_metadata={"metadata.promptId": "s"}), {}, "agent"),
        (call(client_metadata={"compaction": "trigger"}), {}, "compaction"),
        # first words of known system prompts
        (
            call(system="You are a title generator. You output ONLY a title.", tools=[]),
            {},
            "auxiliary",
        ),
        (call(system=COMPACTS, tools=[]), {}, "compaction"),
        (
            call(system="You are a coding agent. You are a title generator at times.", tools=[]),
            {},
            "agent",
        ),
        # a call that is sampled under a grammar has no role that is trained
        (call(schema={}, tools=[]), {"tools": True, "role": "agent"}, "auxiliary"),
        (call(schema={}), AFTER_TOOLS, "agent"),
        (call(schema={}, tools=[], client_metadata={"compaction": "trigger"}), {}, "auxiliary"),
        (call(schema={}, tools=[], system=COMPACTS), {}, "auxiliary"),
        # a conversation keeps its role
        (call(), {"tools": True, "role": "subagent"}, "subagent"),
        *(
            (call(), {"tools": True, "role": role}, "agent")
            for role in ("agent", "compaction", "auxiliary")
        ),
        # it begins while a tool call waits
        (call(), {"tools": True, "waiting": "c1"}, "subagent"),
        (call(tools=[]), {"tools": True, "waiting": "c1"}, "auxiliary"),
        (call(system="You are a title generator"), {"waiting": "c1"}, "auxiliary"),
        # without tools it is a side question, unless it holds an agent's reply or gives a tool's
        # result
        (call(), AFTER_TOOLS, "agent"),
        (call(tools=[]), AFTER_TOOLS, "auxiliary"),
        (call(tools=[]), {"tools": True, "role": "agent"}, "agent"),
        (call(tools=[]), {"tools": True, "role": "subagent"}, "subagent"),
        (call(tools=[]), {"tools": True, "role": "auxiliary"}, "auxiliary"),
        (without_tools(), AFTER_TOOLS, "agent"),
        (without_tools({"role": "user", "content": "Now answer."}), AFTER_TOOLS, "agent"),
        (
            without_tools(ANSWER, {"role": "user", "content": "A title?"}),
            AFTER_TOOLS,
            "auxiliary",
        ),
    ],
)
def test_the_role_of_a_call_has_evidence_unless_it_is_the_agents(asked, earlier, expected):
    found = role(asked, **earlier)
    assert (found.role, bool(found.evidence)) == (expected, expected != "agent")


@pytest.mark.parametrize(
    ("program", "expected"), [("GeminiCLI/0.61.0/gemini", "subagent"), ("mine/1.0", "agent")]
)
def test_gemini_clis_sub_agents_have_a_tool_of_their_own(program, expected):
    assert role(call(tools=[TOOL, COMPLETE]), {"user-agent": program}).role == expected


def test_the_evidence_says_why():
    assert role(call(), role="subagent").evidence == "it goes on with a sub-agent's call"
    assert (
        role(call(), waiting="c1").evidence
        == "it begins while a tool call of call c1 has no result"
    )
    side_question = role(call(schema={}, tools=[]))
    assert side_question.evidence == "the reply must match a JSON schema, and it has no tools"


@pytest.mark.parametrize(
    "header", ["x-openai-subagent", "x-claude-code-agent-id", "x-parent-session-id"]
)
def test_the_evidence_does_not_repeat_what_a_session_wrote(header):
    assert role(call(), {header: "s3cret"}).evidence == f"header {header}"
    assert "s3cret" not in role(call(client_metadata={"metadata.promptId": "s#s3cret"})).evidence


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
        return self.roles.ask([USER], [TOOL], opening, None).waiting

    def go_on(self, opening, parent, *ids):
        return self.roles.ask(results(*ids), [TOOL], opening, parent)


@pytest.fixture
def asked():
    return Asked()


def test_a_conversation_that_begins_while_a_tool_call_waits_has_the_call_as_evidence(asked):
    assert asked.begin("c1", MAIN, "t1", "t2") is None
    assert asked.begin("c2", HELPER, "t3", role="subagent") == "c1"
    assert asked.begin("c3", HELPER, role="subagent") == "c1"  # another of the same kind beside it
    assert asked.begin("c4", OTHER, role="subagent") == "c2"  # one of the sub-agent's own


@pytest.mark.parametrize("given", [["t1"], []], ids=["with the result", "without"])
def test_a_request_that_goes_on_ends_the_waiting_and_that_of_calls_meanwhile(asked, given):
    asked.begin("c1", MAIN, "t1")
    asked.begin(
        "c2", HELPER, "t2", role="subagent"
    )  # `t2` reports to the caller, and never gets a result
    assert asked.go_on(MAIN, "c1", *given) == Earlier(tools=True, role="agent")
    assert asked.waiting(OTHER) is None


def test_a_sub_agents_request_leaves_its_caller_waiting(asked):
    asked.begin("c1", MAIN, "t1")
    asked.begin("c2", HELPER, "t2", role="subagent")
    assert asked.go_on(HELPER, "c2", "t2").role == "subagent"
    assert asked.waiting(OTHER) == "c1"


def test_the_same_agent_again_is_no_sub_agent(asked):
    asked.begin("c1", MAIN, "submit")
    assert asked.begin("c2", MAIN, "t2") is None
    assert asked.waiting(HELPER) == "c2"


def test_a_compaction_ends_all_waiting(asked):
    asked.begin("c1", MAIN, "t1")
    asked.roles.complete("c2", "compaction", MAIN, reply())
    assert asked.waiting(OTHER) is None


def past(call_id, began, ended, messages, answer=None, parent=None, sampled_by=None, role="agent"):
    """Return a call with these messages; `began` and `ended` are seconds."""
    row = {
        "call_id": call_id,
        "parent_id": parent,
        "role": role,
        "started_at": START + timedelta(seconds=began),
        "finished_at": START + timedelta(seconds=ended),
        "reply": answer,
    }
    return PastCall(row, ModelCall("m", messages, [TOOL]), sampled_by or parent)


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
        assert roles.ask([USER], [TOOL], OTHER, None) == Earlier(tools=True, waiting="c3")
        assert roles.ask([USER], [TOOL], OTHER, "c3").role == "subagent"

    def test_a_request_that_did_not_complete_and_a_rendered_one_go_on_with_the_call_of_their_results_and_reply(
        self,
    ):
        main = past("c1", 0, 1, [USER], reply("t1"))
        failed = past("c2", 2, 3, results("t1")[1:], parent="c1")
        rendered = past("c2", 2, 3, [USER], reply(), sampled_by="c1")
        histories = [main], [main, failed], [main, rendered]
        assert [
            restored(*calls).ask([USER], [TOOL], OTHER, None).waiting for calls in histories
        ] == ["c1", None, None]

    def test_calls_side_by_side_begin_and_complete_in_the_order_of_time(self):
        main = past("c1", 0, 1, [USER], reply("t1"))
        helper = past("c2", 2, 9, self.HELPS, reply("t2"), role="subagent")
        answer = past("c3", 4, 5, results("t1")[1:], reply(), parent="c1")
        assert restored(main, answer, helper).ask([USER], [TOOL], OTHER, None).waiting == "c2"
