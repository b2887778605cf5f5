"""Agents in a few lines that send only new items, and ids of earlier replies: the openai SDK's
Responses API."""

import json

import openai
from tool import STRICT, write_file


def agent(client, task, ask):
    response = ask(None, [{"role": "user", "content": task}])
    while calls := [item for item in response.output if item.type == "function_call"]:
        results = []
        for call in calls:
            output = write_file(**json.loads(call.arguments))
            results.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": output}
            )
        response = ask(response, results)
    return response.output_text


client = openai.OpenAI()
how = {"model": "gpt-5.5", "instructions": "Be brief.", "tools": [STRICT]}


def by_previous_response(response, new):
    return client.responses.create(**how, input=new, previous_response_id=response and response.id)


said = []


def by_references(response, new):
    said.extend(
        {"type": "item_reference", "id": item.id} for item in (response.output if response else [])
    )
    said.extend(new)
    return client.responses.create(**how, input=said)


print(agent(client, "Write previous.txt, twice.", by_previous_response))
print(agent(client, "Write references.txt, twice.", by_references))
