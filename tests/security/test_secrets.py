"""A secret that a harness puts anywhere in a request, other than in its conversation and its tools,
is not stored."""

import copy
import functools
import json
import operator

import pytest

from rolltap.addons.store.tables import read_rows
from tests.addons.conftest import harness, rendering  # noqa: F401 - fixtures
from tests.scripted_engine import Say

SECRET = "sk-canary-0123456789abcdefghijklmnopqrstuvwxyz"
USER = {"role": "user", "content": "Hi"}
MCP = {
    "type": "mcp",
    "server_label": "docs",
    "server_url": "https://example.org/mcp",
    "authorization": "Bearer x",
}
REQUESTS = json.loads(r"""
{
"/v1/chat/completions": {
  "messages": [{"role": "user", "content": "Hi"}],
  "tools": [
    {"type": "function", "function": {"name": "look", "description": "Looks.",
      "parameters": {"type": "object"}}},
    {"type": "mcp", "server_label": "docs", "server_url": "https://example.org/mcp",
      "authorization": "Bearer x", "headers": {"x-api-key": "x"},
      "require_approval": {"always": {"tool_names": ["x"]}}, "allowed_tools": ["x"]},
    {"type": "web_search", "filters": {"allowed_domains": ["x"]}, "user_location": {"city": "x"}}
  ],
  "web_search_options": {"user_location": {"approximate": {"city": "x"}}},
  "tool_choice": {"type": "function", "function": {"name": "look"}},
  "response_format": {"type": "text", "json_schema": {"name": "x"}},
  "stream_options": {"include_usage": true},
  "metadata": {"promptId": "x"},
  "logit_bias": {"1": 1},
  "prediction": {"type": "content", "content": "x"},
  "temperature": null, "top_p": null, "seed": null, "n": null, "max_tokens": null,
  "reasoning_effort": null, "user": null, "verbosity": null, "service_tier": null, "store": null,
  "prompt_cache_key": null, "safety_identifier": null, "functions": null, "logprobs": null,
  "modalities": null, "stream": null, "parallel_tool_calls": null, "audio": null,
  "function_call": null, "unknown": null
},
"/v1/responses": {
  "input": [{"role": "user", "content": "Hi"}],
  "tools": [
    {"type": "function", "name": "look", "description": "Looks.",
      "parameters": {"type": "object"}},
    {"type": "mcp", "server_label": "docs", "server_url": "https://example.org/mcp",
      "authorization": "Bearer x", "headers": {"x-api-key": "x"},
      "require_approval": {"always": {"tool_names": ["x"]}}, "allowed_tools": ["x"]},
    {"type": "web_search", "filters": {"allowed_domains": ["x"]}, "user_location": {"city": "x"}}
  ],
  "tool_choice": {"type": "mcp", "server_label": "x", "name": "x"},
  "text": {"format": {"type": "text", "name": "x", "strict": true}, "verbosity": "low"},
  "reasoning": {"effort": "low", "summary": "auto"},
  "context_management": [{"type": "compaction", "compact_threshold": 1}],
  "client_metadata": {"session": "x"},
  "metadata": {"x": "x"},
  "include": ["reasoning.encrypted_content"],
  "temperature": null, "top_p": null, "max_output_tokens": null, "service_tier": null,
  "truncation": null, "prompt_cache_key": null, "store": null, "max_tool_calls": null,
  "user": null, "conversation": null, "prompt": null, "background": null, "top_logprobs": null,
  "previous_response_id": null, "stream": null, "parallel_tool_calls": null, "unknown": null,
  "safety_identifier": null
},
"/v1/messages": {
  "max_tokens": 9,
  "messages": [{"role": "user", "content": "Hi"}],
  "tools": [
    {"name": "look", "input_schema": {"type": "object"}},
    {"type": "web_search_20250305", "name": "web_search", "allowed_domains": ["x"],
      "user_location": {"city": "x"}},
    {"type": "mcp_toolset", "mcp_server_name": "x", "configs": {"x": {"enabled": true}}}
  ],
  "mcp_servers": [
    {"type": "url", "name": "x", "url": "https://example.org", "authorization_token": "x"}
  ],
  "tool_choice": {"type": "tool", "name": "look"},
  "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
  "output_config": {"effort": "low", "format": {"type": "text"}},
  "context_management": {"edits": [{"type": "clear_tool_uses_20250919", "exclude_tools": ["x"]}]},
  "metadata": {"user_id": "x"},
  "diagnostics": {"previous_message_id": "x"},
  "temperature": null, "top_p": null, "top_k": null, "service_tier": null, "speed": null,
  "inference_geo": null, "container": null, "fallbacks": null, "fallback_credit_token": null,
  "user_profile_id": null, "stream": null, "unknown": null
},
"/v1beta/models/m:generateContent": {
  "contents": [{"role": "user", "parts": [{"text": "Hi"}]}],
  "tools": [
    {"functionDeclarations": [{"name": "look", "description": "Looks.",
      "parameters": {"type": "object"}}]},
    {"googleMaps": {"authConfig": {"apiKeyConfig": {"apiKeyString": "x"}}}},
    {"mcpServers": [{"name": "x", "streamableHttpTransport": {"url": "https://x",
      "headers": {"k": "x"}}}]},
    {"retrieval": {"externalApi": {"endpoint": "https://x",
      "apiAuth": {"apiKeyConfig": {"apiKeyString": "x"}}}}}
  ],
  "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["look"]}},
  "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
  "labels": {"x": "x"},
  "generationConfig": {
    "thinkingConfig": {"includeThoughts": true, "thinkingLevel": "LOW"},
    "responseModalities": ["TEXT"],
    "speechConfig": {"languageCode": "x"},
    "routingConfig": {"manualMode": {"modelName": "x"}},
    "temperature": null, "topP": null, "topK": null, "seed": null, "maxOutputTokens": null,
    "candidateCount": null, "logprobs": null, "responseLogprobs": null, "unknown": null,
    "responseMimeType": null, "mediaResolution": null
  },
  "cachedContent": null, "serviceTier": null, "store": null, "unknown": null
}
}
""")
"""Path -> a request that uses all that its API has; null for what any value is as good."""
CONTENT = [
    "messages",
    "input",
    "contents",
    "function",
    "functionDeclarations",
    "parameters",
    "input_schema",
]
"""Fields that are recorded because they are the conversation or the tools. (`model`, `stop` and
schemas are too.)"""
HEADERS = """x-codex-turn-metadata
x-codex-parent-thread-id
x-claude-code-request-class
x-claude-code-agent-id
x-openai-subagent
x-parent-session-id
x-stainless-retry-count
x-unknown""".splitlines()


def places(value, path=()):
    """Yield the path of each value that is no part of the conversation."""
    if path:
        yield path
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        is_tool = False
        if path[:1] == ("tools",) and isinstance(value, dict):
            is_tool = key == "name" or value.get("name") == "look"
        if key not in CONTENT and not is_tool:
            yield from places(inner, (*path, key))


def at(request, path):
    """Return the value that the path leads to."""
    return functools.reduce(operator.getitem, path, request)


def changed(request, path, key, value):
    """Return a copy of the request with another value under `key` in the object or list at
    `path`."""
    body = copy.deepcopy(request)
    at(body, path)[key] = value
    return body


def variants(request):
    """Yield the request with the secret in one place each: as a value, within a value, and as a
    key."""
    url = f"https://user:{SECRET}@example.org/{SECRET}?key={SECRET}"
    for path in places(request):
        for value in (SECRET, {SECRET: SECRET}, [SECRET], url):
            yield changed(request, path[:-1], path[-1], value)
        if isinstance(at(request, path), dict):
            yield changed(request, path, SECRET, SECRET)


@pytest.mark.parametrize("path", REQUESTS)
async def test_no_option_metadata_or_hosted_tool_brings_a_secret_into_the_run(
    path,
    harness,  # noqa: F811
    scripted_engine,
    caplog,
):
    scripted_engine.otherwise = lambda request: Say("Hi.")
    statuses = []

    async def send(body, headers, query=""):
        headers = {**harness.endpoint.headers("s1", "api"), **headers}
        url = harness.url(path + query)
        async with harness.client.post(
            url, data=json.dumps(body).encode(), headers=headers
        ) as response:
            await response.read()
            statuses.append(response.status)

    request = {key: value for key, value in REQUESTS[path].items() if value is not None}
    for body in variants(REQUESTS[path]):
        await send(body, {})
    for header in HEADERS:
        await send(request, {header: SECRET})
        await send(request, {header: json.dumps({"request_kind": SECRET})})
    await send(request, {}, f"?key={SECRET}&alt=sse")
    assert {200, 400} <= set(statuses) <= {200, 400, 404}  # 404 for an id of no reply
    assert statuses.count(200) > len(HEADERS)
    rows = [row for table in ("calls", "events") for row in read_rows(harness.run, table)]
    assert len(rows) > len(statuses)
    assert SECRET not in str(rows)
    files = [file for file in harness.run.rglob("*") if file.is_file()]
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    assert SECRET not in caplog.text


async def test_a_hosted_tool_is_recorded_by_its_type_and_name(harness, scripted_engine):  # noqa: F811
    scripted_engine.otherwise = lambda request: Say("Hi.")
    status, _ = await harness.ask(USER, tools=[MCP])
    assert status == 200
    (call,) = harness.calls()
    (tool,) = json.loads(call["sampling"])["asked"]["hosted_tools"]
    assert tool == {"type": "mcp", "server_label": "docs"}
