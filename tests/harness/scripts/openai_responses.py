"""An agent in a few lines: the openai SDK's Responses API, first whole and then streamed."""

import json
from pathlib import Path

import openai

TOOL = {
    "type": "function",
    "name": "write_file",
    "description": "Write a file.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
        "additionalProperties": False,
    },
    "strict": True,
}


def agent(client, task, streamed):
    items = [{"role": "user", "content": task}]
    while True:
        asked = {"model": "gpt-5.5", "input": items, "tools": [TOOL], "store": False}
        if streamed:
            with client.responses.stream(**asked) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**asked)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            arguments = json.loads(call.arguments)
            Path(arguments["path"]).write_text(arguments["content"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "written"})


for name in ("whole", "streamed"):
    print(agent(openai.OpenAI(), f"Write {name}.txt, twice.", name == "streamed"))
