"""An agent of one tool: it gives the model a shell until the model is done."""

import json
import subprocess
import sys

from openai import OpenAI

DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SYSTEM = f"Work with the tool bash, one command at a time. When you are done, run: echo {DONE}"
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the current folder.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
MOST_TURNS = 10


def run(arguments: str) -> str:
    """Return the output of the command that the model wrote, or what is wrong with it."""
    try:
        command = ["bash", "-c", json.loads(arguments)["command"]]
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60
        )
    except Exception as error:
        return f"error: {error!r}"
    return ended.stdout + ended.stderr


client = OpenAI()  # as in production: rolltap answers its calls on their way
messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.argv[1]}]
for _ in range(MOST_TURNS):
    reply = (
        client.chat.completions.create(model="any", messages=messages, tools=[BASH])
        .choices[0]
        .message
    )
    messages.append(reply.model_dump(exclude_none=True))
    for call in reply.tool_calls or []:
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)}
        )
    if not reply.tool_calls or DONE in messages[-1]["content"]:
        break
