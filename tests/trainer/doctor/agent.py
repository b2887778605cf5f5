"""A small agent of the Chat Completions API with one shell tool. Its first argument says what is odd about it."""

import json
import subprocess
import sys
import threading

import httpx

odd = sys.argv[1] if len(sys.argv) > 1 else ""
parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "shell", "description": "Run it.", "parameters": parameters}}]
messages = [{"role": "user", "content": "Hello"}]
extra = {}
if odd == "schema":
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    extra = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
if odd in ("schema", "toolless"):  # beside tools no schema holds
    tools = []
url = "https://api.openai.com/v1/chat/completions"
if odd == "elsewhere":
    url = "https://bedrock-runtime.us-east-1.amazonaws.com/model/m/converse"
if odd == "hangs":
    threading.Event().wait()
with httpx.Client(timeout=60, trust_env=odd != "direct") as client:
    if odd == "direct":
        url = "http://127.0.0.1:9/v1/chat/completions"
    for _ in range(10):
        body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {}), **extra}
        reply = client.post(url, json=body)
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
        if odd == "raises":
            raise ValueError("boom")
        if odd == "rewrites":
            messages[0]["content"] += "!"
print(messages[-1]["content"])
