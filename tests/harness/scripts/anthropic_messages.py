"""An agent in a few lines: the anthropic SDK's Messages API, first whole and then streamed."""

import anthropic
from tool import DECLARED, PARAMETERS, write_file

TOOL = {**DECLARED, "input_schema": PARAMETERS}


def agent(client, task, streamed):
    messages = [{"role": "user", "content": task}]
    while True:
        asked = {
            "model": "claude-sonnet-4-5",
            "max_tokens": 1000,
            "messages": messages,
            "tools": [TOOL],
        }
        if streamed:
            with client.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return message.content[0].text
        results = []
        for call in calls:
            results.append(
                {"type": "tool_result", "tool_use_id": call.id, "content": write_file(**call.input)}
            )
        messages.append({"role": "user", "content": results})


for name in ("whole", "streamed"):
    print(agent(anthropic.Anthropic(), f"Write {name}.txt, twice.", name == "streamed"))
