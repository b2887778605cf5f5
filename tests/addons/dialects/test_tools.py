from rolltap.addons.dialects.model_call import Reply, ToolCall
from rolltap.addons.dialects.tools import calls_as_text


def test_calls_become_lines_after_the_text():
    reply = Reply("So:", "Hm.", [ToolCall("c1", "look", '{"at": "é"}'), ToolCall("c2", "go", "no JSON")])
    calls_as_text(reply)
    assert reply.content == (
        'So:\n{"name": "look", "arguments": "{\\"at\\": \\"é\\"}"}\n{"name": "go", "arguments": "no JSON"}'
    )
    assert (reply.reasoning, reply.tool_calls) == ("Hm.", [])


def test_a_reply_without_calls_is_unchanged():
    reply = Reply("So.")
    calls_as_text(reply)
    assert reply == Reply("So.")
