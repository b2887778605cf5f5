import base64
import json

import pytest

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import (
    ModelCall,
    WireTool,
    assistant_message,
    message_tool_call,
    sign,
)
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.openai_responses.reply import REPEATED
from rolltap.addons.dialects.tools import function_tool
from tests.addons.dialects import hostile
from tests.addons.harness import user

LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object"},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
}
AGENTS = json.loads("""
{
  "type": "namespace",
  "name": "agents",
  "description": "Agents.",
  "tools": [
    {
      "type": "function",
      "name": "spawn",
      "description": "Looks.",
      "parameters": {"type": "object"},
      "strict": false
    },
    {"type": "custom", "name": "exec", "description": "Runs."}
  ]
}
""")
SEARCH = {"type": "web_search", "external_web_access": False}
FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
REQUEST = json.loads(
    r"""
{
  "model": "gpt-x",
  "instructions": "Be brief.",
  "input": [
    {
      "type": "message",
      "role": "developer",
      "content": [{"type": "input_text", "text": "Be kind."}]
    },
    {
      "role": "user",
      "content": [
        {"type": "input_text", "text": "Look "},
        {"type": "input_text", "text": "there."}
      ]
    },
    {
      "type": "reasoning",
      "id": "rs_1",
      "summary": [{"type": "summary_text", "text": "I look."}],
      "content": null,
      "encrypted_content": "SIGNATURE"
    },
    {
      "type": "message",
      "role": "assistant",
      "id": "msg_1",
      "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
      "phase": "commentary"
    },
    {
      "type": "function_call",
      "call_id": "t1",
      "name": "look",
      "arguments": "{\"at\": \"\\u00e9\",  \"n\": 1}"
    },
    {"type": "custom_tool_call", "call_id": "t2", "name": "patch", "input": "+ x"},
    {
      "type": "function_call",
      "call_id": "t3",
      "namespace": "agents",
      "name": "spawn",
      "arguments": "{}"
    },
    {"type": "function_call_output", "call_id": "t1", "output": "Nothing."},
    {
      "type": "custom_tool_call_output",
      "call_id": "t2",
      "output": [{"type": "input_text", "text": "Done."}]
    },
    {"type": "function_call_output", "call_id": "t3", "output": ""}
  ],
  "tools": [
    {
      "type": "function",
      "name": "look",
      "description": "Looks.",
      "parameters": {"type": "object"},
      "strict": false
    },
    {
      "type": "custom",
      "name": "patch",
      "description": "Patches.",
      "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"}
    },
    {
      "type": "namespace",
      "name": "agents",
      "description": "Agents.",
      "tools": [
        {
          "type": "function",
          "name": "spawn",
          "description": "Looks.",
          "parameters": {"type": "object"},
          "strict": false
        },
        {"type": "custom", "name": "exec", "description": "Runs."}
      ]
    },
    {"type": "web_search", "external_web_access": false}
  ],
  "tool_choice": "auto",
  "stream": true,
  "store": false,
  "include": ["reasoning.encrypted_content"],
  "max_output_tokens": 9,
  "temperature": 0.0,
  "prompt_cache_key": "thread-1",
  "client_metadata": {"session": "s1", "n": 1}
}
""".replace("SIGNATURE", sign("c7"))
)


def decode(**changes):
    body = json.dumps({**REQUEST, **changes}).encode()
    return routes.RESPONSES.decode(parse_object(body), "/v1/responses")


def decode_items(*items, **changes):
    return decode(instructions=None, input=list(items), **changes).messages


def call(call_id, name, **fields):
    called = {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}
    return {**called, **fields}


def names_of(tools):
    return [tool["function"]["name"] for tool in tools]


class TestDecode:
    def test_a_request_becomes_a_model_call(self):
        made = [
            message_tool_call("t1", "look", {"at": "é", "n": 1}),
            message_tool_call("t2", "patch", {"input": "+ x"}),
            message_tool_call("t3", "agents__spawn", {}),
        ]
        assert decode() == ModelCall(
            model="gpt-x",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Look there."},
                assistant_message("Looking.", "I look.", made, "c7"),
                {"role": "tool", "content": "Nothing.", "tool_call_id": "t1", "name": "look"},
                {"role": "tool", "content": "Done.", "tool_call_id": "t2", "name": "patch"},
                {"role": "tool", "content": "", "tool_call_id": "t3", "name": "agents__spawn"},
            ],
            tools=[
                function_tool("look", "Looks.", {"type": "object"}),
                function_tool(
                    "patch",
                    "Patches.\n\nThe input must match this grammar:\nstart: LINE+",
                    FREEFORM,
                ),
                function_tool("agents__spawn", "Looks.", {"type": "object"}),
                function_tool("agents__exec", "Runs.", FREEFORM),
            ],
            stream=True,
            max_tokens=9,
            requested_sampling={
                "temperature": 0.0,
                "tool_choice": "auto",
                "store": False,
                "include": ["reasoning.encrypted_content"],
                "instructions": True,
            },
            hosted_tools=[{"type": "web_search"}],
            wire_tools={
                "patch": WireTool("patch", freeform=True),
                "agents__spawn": WireTool("spawn", namespace="agents"),
                "agents__exec": WireTool("exec", namespace="agents", freeform=True),
            },
            client_metadata={"client_metadata.session": "s1", "prompt_cache_key": "thread-1"},
            repeated={key: REQUEST[key] for key in REQUEST.keys() & {*REPEATED, "tools"}},
        )

    def test_a_users_message_ends_the_assistants_turn(self):
        turn = {"role": "assistant", "content": "a"}
        messages = decode_items(turn, user("b"), turn)
        assert [message["role"] for message in messages] == ["assistant", "user", "assistant"]

    def test_several_texts_of_one_turn_are_paragraphs(self):
        summary = [{"type": "summary_text", "text": text} for text in "xy"]
        turn = {"role": "assistant", "content": "a"}
        reasoning = {"type": "reasoning", "summary": summary}
        (message,) = decode_items(reasoning, turn, {"type": "reasoning"}, turn)
        assert message == {**turn, "content": "a\n\na", "reasoning_content": "x\n\ny"}

    @pytest.mark.parametrize("theirs", ["gAAAAABo", "eHg=", "", None, 5, sign("c7")[:-3]])
    def test_opaque_content_that_was_not_issued_here_names_no_call(self, theirs):
        (message,) = decode_items({"type": "reasoning", "summary": [], "encrypted_content": theirs})
        assert message == {"role": "assistant", "content": ""}

    def test_tools_may_stand_among_the_items(self):
        tools = [AGENTS, {**LOOK, "name": "wait"}]
        more = {"type": "additional_tools", "role": "developer", "tools": tools}
        call = decode(instructions=None, input=[more, user("Hi")], tools=[LOOK])
        assert names_of(call.tools) == ["look", "agents__spawn", "agents__exec", "wait"]
        assert call.messages == [user("Hi")]

    def test_a_tool_replaces_an_earlier_one_with_the_same_name_in_its_place(self):
        call = decode(tools=[{**PATCH, "name": "look"}, LOOK])
        assert call.tools == [function_tool("look", "Looks.", {"type": "object"})]
        assert call.wire_tools == {}
        wait = {**LOOK, "name": "wait"}
        again = decode(tools=[LOOK, wait, {**LOOK, "description": "Looks again."}])
        texts = [tool["function"]["description"] for tool in again.tools]
        assert texts == ["Looks again.", "Looks."]

    def test_a_call_of_a_tool_in_a_namespace_has_its_name_here(self):
        (message,) = decode_items(call("t1", "spawn", namespace="agents"), tools=[])
        assert message["tool_calls"][0]["function"]["name"] == "agents__spawn"

    @pytest.mark.parametrize("order", [1, -1], ids=["plain first", "plain last"])
    def test_no_two_tools_are_shown_under_one_name(self, order):
        plain = call("t1", "agents__spawn")
        inner = call("t2", "spawn", namespace="agents")
        output = {"type": "function_call_output", "call_id": "t2", "output": "Done."}
        decoded = decode(
            tools=[{**LOOK, "name": "agents__spawn"}, AGENTS][::order],
            input=[plain, inner, output],
        )
        *_, model, result = decoded.messages
        names = ["agents__spawn", "agents__spawn_1"]
        assert {*names} < {*names_of(decoded.tools)}
        assert names_of(model["tool_calls"]) == names
        assert result["name"] == "agents__spawn_1"
        assert "agents__spawn" not in decoded.wire_tools
        assert decoded.wire_tools["agents__spawn_1"] == WireTool("spawn", namespace="agents")


SUMMARY = base64.b64encode(b"rolltap-summary:They greeted.").decode()
"""The content of a compaction item, as it is issued."""
REFUSED = hostile.cases("""
'input'
    {"input": []}
    {"input": ""}
    {"input": null}
    {"input": {"role": "user"}}
    {"instructions": null, "input": [{"type": "additional_tools", "tools": []}]}
'input[0]'
    {"input": ["Hi"]}
'input[0].type'
    {"input": [{"type": ["message"]}]}
'input[1].role'
    {"input": [{"role": "user", "content": "x"}, {"role": "robot"}]}
'input[0].content'
    {"input": [{"role": "user", "content": 5}]}
'input[0].content[0]'
    {"input": [{"role": "user", "content": ["x"]}]}
'input[0].content[0].text'
    {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}
'input[0].summary'
    {"input": [{"type": "reasoning", "summary": "x"}]}
'input[0].name'
    {"input": [{"type": "function_call", "call_id": "t", "arguments": "{}"}]}
'input[0].arguments'
    {"input": [{"type": "function_call", "call_id": "t", "name": "x"}]}
'input[0].call_id'
    {"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}
    {"input": [{"type": "function_call_output", "output": "x"}]}
'input[0].input'
    {"input": [{"type": "custom_tool_call", "call_id": "t", "name": "x"}]}
'input[0].output'
    {"input": [{"type": "function_call_output", "call_id": "t", "output": {}}]}
'input[0]' has type 'web_search_call'
    {"input": [{"type": "web_search_call", "id": "ws_1"}]}
'input[0].tools'
    {"input": [{"type": "additional_tools", "tools": "x"}]}
'instructions'
    {"instructions": 5}
'tools'
    {"tools": "x"}
'tools[1]'
    {"tools": [{"type": "function", "name": "look", "description": "Looks.",
        "parameters": {"type": "object"}, "strict": false}, "x"]}
'tools[0].name'
    {"tools": [{"type": "function"}]}
'tools[0].tools[0].type'
    {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search",
        "external_web_access": false}]}]}
'max_output_tokens'
    {"max_output_tokens": 0}
'background'
    {"background": true}
'prompt'
    {"prompt": {"id": "pmpt_1"}}
'input[0].content[1]' has type 'x'; this model
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "See"}, {"type": "x"}]}]}
'input[0].output[1]' has type 'x'; this model takes text only
    {"input": [{"type": "function_call_output", "call_id": "t", "output": [{"type": "input_text",
        "text": "See"}, {"type": "x"}]}]}
Unsupported parameter: 'top_logprobs'
    {"top_logprobs": 1}
'include' must be a list without 'message.output_text.logprobs'
    {"include": ["message.output_text.logprobs"]}
""")
"""Changes of the request, and the place or the words of the refusal."""
MEANS = hostile.means("""
messages = [{"role": "user", "content": "Hi"}]
    {"instructions": null, "input": "Hi"}
schema = {"a": 1}
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}}}}
schema = {}
    {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}
schema = null
    {"text": {"format": {"type": "text"}}}
    {"text": {"format": null}}
""")
"""Changes of the request, and a field of the decoded call with its value."""
NAMES = "type role content summary text call_id name namespace tools arguments output"
KINDS = """
message reasoning function_call custom_tool_call compaction compaction_trigger namespace user
assistant
"""
MUTABLE = {
    **REQUEST,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [AGENTS]},
        *REQUEST["input"],
        {"type": "compaction_trigger"},
    ],
}
bodies = hostile.bodies([MUTABLE], hostile.values([*KINDS.split(), sign("c1")], NAMES.split()))
