from datetime import UTC, datetime, timedelta
from typing import ClassVar

from rolltap.addons.dialects.model_call import ModelCall, assistant_message, message_tool_call
from rolltap.addons.endpoint.roles import Earlier, PastCall, SessionRoles

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


TOOL = {"type": "function", "function": {"name": "look"}}
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
