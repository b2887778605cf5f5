"""An agent in a few lines: the openai SDK's Responses API, first whole and then streamed."""

import json

import openai
from tool import STRICT, write_file


def agent(client, task, streamed):
    items = [{"role": "user", "content": task}]
    while True:
        asked = {"model": "gpt-5.5", "input": items, "tools": [STRICT], "store": False}
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
            output = write_file(**json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": output}
            )


for name in ("whole", "streamed"):
    print(agent(openai.OpenAI(), f"Write {name}.txt, twice.", name == "streamed"))
