from rolltap.addons.dialects.call import Reply, ToolCall
from rolltap.addons.dialects.tools import calls_as_text


def test_calls_become_lines_after_the_text_which_stays_without_calls():
    reply = Reply(
        "So:", "Hm.", [ToolCall("c1", "look", '{"at": "é"}'), ToolCall("c2", "go", "no JSON")]
    )
    calls_as_text(reply)
    assert (
        reply.content
        == 'So:\n{"name": "look", "arguments": "{\\"at\\": \\"é\\"}"}\n{"name": "go", "arguments":'
        ' "no JSON"}'
    )
    assert (reply.reasoning, reply.tool_calls) == ("Hm.", [])
    calls_as_text(text := Reply("So."))
    assert text == Reply("So.")
