import base64

from rolltap.addons.dialects.call import Reply, ToolCall, sign, signed_call


def test_a_signature_that_is_long_was_not_issued_here():
    assert signed_call(sign("c7")) == "c7"
    assert signed_call(base64.b64encode(b"rolltap:" + b"A" * 1_000_000).decode()) is None


def test_each_tool_call_of_a_reply_has_an_id_of_its_own():
    ids = set()
    for call_id in ("a", "b"):
        reply = Reply(tool_calls=[ToolCall("", "look", "{}") for _ in range(3)])
        reply.issue(call_id)
        ids.update(call.id for call in reply.tool_calls)
    assert len(ids) == 6
