import json

from rolltap.addons.dialects.call import Reply, ToolCall
from rolltap.addons.dialects.tools import calls_as_text


def test_calls_become_lines_after_the_text_which_stays_without_calls():
    calls = [ToolCall("c1", "look", '{"at": "é"}'), ToolCall("c2", "go", "no JSON")]
    reply = Reply("So:", "Hm.", calls)
    calls_as_text(reply)
    text, *lines = reply.content.split("\n")
    assert text == "So:"
    assert [json.loads(line) for line in lines] == [
        {"name": "look", "arguments": '{"at": "é"}'},
        {"name": "go", "arguments": "no JSON"},
    ]
    assert (reply.reasoning, reply.tool_calls) == ("Hm.", [])
    plain = Reply("So.")
    calls_as_text(plain)
    assert plain == Reply("So.")
