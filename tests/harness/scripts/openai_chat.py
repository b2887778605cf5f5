"""An agent in a few lines: the openai SDK's Chat Completions, first whole and then streamed."""

import json

import openai
from tool import DECLARED, PARAMETERS, write_file

TOOL = {"type": "function", "function": {**DECLARED, "parameters": PARAMETERS}}


def agent(client, task, streamed):
    messages = [{"role": "user", "content": task}]
    while True:
        asked = {"model": "gpt-4.1", "messages": messages, "tools": [TOOL]}
        if streamed:
            with client.chat.completions.stream(**asked) as stream:
                completion = stream.get_final_completion()
        else:
            completion = client.chat.completions.create(**asked)
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            content = write_file(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


for name in ("whole", "streamed"):
    print(agent(openai.OpenAI(), f"Write {name}.txt, twice.", name == "streamed"))
