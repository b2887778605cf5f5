from rolltap.addons.dialects.types import ModelCall, assistant_message, message_tool_call
from rolltap.addons.endpoint.roles import Earlier
from rolltap.addons.endpoint.session_roles import SessionRoles

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


def test_rows_restore_the_same():
    tool, system = {"type": "function", "function": {"name": "look"}}, {"role": "system", "content": "You help."}
    roles = SessionRoles()
    roles.restore("c1", None, "agent", ModelCall("m", [USER], [tool]), reply("t1"))
    roles.restore("c2", None, "subagent", ModelCall("m", [system, USER], [tool]), reply("t2"))
    roles.restore("c3", "c2", "subagent", ModelCall("m", results("t2")[1:], [tool]), reply("t3"))
    assert roles.ask([USER], True, OTHER, None) == Earlier(tools=True, waiting="c3")
    assert roles.ask([USER], True, OTHER, "c3").role == "subagent"
