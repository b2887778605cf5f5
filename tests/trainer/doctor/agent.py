"""A small agent of the Chat Completions API with one shell tool. Its arguments say what is odd
about it."""

import json
import subprocess
import sys
import threading

import httpx

odd = sys.argv[1:]
parameters = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
tools = [
    {
        "type": "function",
        "function": {"name": "shell", "description": "Run it.", "parameters": parameters},
    }
]
messages = [{"role": "user", "content": "Hello"}]
url = "https://api.openai.com/v1/chat/completions"
if "hangs" in odd:
    threading.Event().wait()
with httpx.Client(timeout=120, trust_env="direct" not in odd) as client:
    if "direct" in odd:
        url = "http://127.0.0.1:9/v1/chat/completions"
    if "elsewhere" in odd:
        client.post("https://bedrock-runtime.us-east-1.amazonaws.com/model/m/converse", json={})
    if "schema" in odd:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        reply = client.post(url, json={"model": "m", "messages": messages, "response_format": form})
        print(reply.json()["choices"][0]["message"]["content"])
    for _ in range(10):
        reply = client.post(url, json={"model": "m", "messages": messages, "tools": tools})
        if reply.status_code != 200:
            sys.exit(f"status {reply.status_code}")
        message = reply.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
        if "rewrites" in odd:
            messages[0]["content"] += "!"
print(messages[-1]["content"])
