"""An agent in a few lines with LiteLLM, in OpenAI's form for each provider."""

import json
import sys
from pathlib import Path

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path", "content"],
        },
    },
}
MODELS = {
    "chat": "openai/gpt-4.1",
    "anthropic": "anthropic/claude-sonnet-4-5",
    "google": "gemini/gemini-2.5-pro",
}

messages = [{"role": "user", "content": "Write notes.txt, twice."}]
while True:
    message = litellm.completion(MODELS[sys.argv[1]], messages, tools=[TOOL]).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        Path(arguments["path"]).write_text(arguments["content"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "written"})
