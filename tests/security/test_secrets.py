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
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
MCP = {
    "type": "mcp",
    "server_label": "docs",
    "server_url": "https://example.org/mcp",
    "authorization": "Bearer x",
    "headers": {"x-api-key": "x"},
    "require_approval": {"always": {"tool_names": ["x"]}},
    "allowed_tools": ["x"],
}
LOCATION = {"user_location": {"city": "x"}}
SEARCH = {"type": "web_search", "filters": {"allowed_domains": ["x"]}, **LOCATION}
KEY = {"apiKeyConfig": {"apiKeyString": "x"}}
FORMAT = {"type": "json_schema", "name": "x", "strict": True}
USER = {"role": "user", "content": "Hi"}


def fields(names):
    return dict.fromkeys(names.split())


REQUESTS = {
    "/v1/chat/completions": {
        "messages": [USER],
        "tools": [{"type": "function", "function": FUNCTION}, MCP, SEARCH],
        "web_search_options": {"user_location": {"approximate": {"city": "x"}}},
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {"type": "text", "json_schema": {"name": "x"}},
        "stream_options": {"include_usage": True},
        "metadata": {"promptId": "x"},
        "logit_bias": {"1": 1},
        "prediction": {"type": "content", "content": "x"},
        **fields(
            "temperature top_p seed n max_tokens reasoning_effort user verbosity service_tier store"
            " prompt_cache_key safety_identifier functions logprobs modalities stream"
            " parallel_tool_calls audio function_call unknown"
        ),
    },
    "/v1/responses": {
        "input": [USER],
        "tools": [{"type": "function", **FUNCTION}, MCP, SEARCH],
        "tool_choice": {"type": "mcp", "server_label": "x", "name": "x"},
        "text": {"format": {**FORMAT, "type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "context_management": [{"type": "compaction", "compact_threshold": 1}],
        "client_metadata": {"session": "x"},
        "metadata": {"x": "x"},
        "include": ["reasoning.encrypted_content"],
        **fields(
            "temperature top_p max_output_tokens service_tier truncation prompt_cache_key store"
            " max_tool_calls user conversation prompt background top_logprobs previous_response_id"
            " stream parallel_tool_calls unknown safety_identifier"
        ),
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [USER],
        "tools": [
            {"name": "look", "input_schema": {"type": "object"}},
            {
                "type": "web_search_20250305",
                "name": "web_search",
                "allowed_domains": ["x"],
                **LOCATION,
            },
            {"type": "mcp_toolset", "mcp_server_name": "x", "configs": {"x": {"enabled": True}}},
        ],
        "mcp_servers": [
            {"type": "url", "name": "x", "url": "https://example.org", "authorization_token": "x"}
        ],
        "tool_choice": {"type": "tool", "name": "look"},
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        "output_config": {"effort": "low", "format": {"type": "text"}},
        "context_management": {
            "edits": [{"type": "clear_tool_uses_20250919", "exclude_tools": ["x"]}]
        },
        "metadata": {"user_id": "x"},
        "diagnostics": {"previous_message_id": "x"},
        **fields(
            "temperature top_p top_k service_tier speed inference_geo container fallbacks"
            " fallback_credit_token"
        ),
        **fields("user_profile_id stream unknown"),
    },
    "/v1beta/models/m:generateContent": {
        "contents": [{"role": "user", "parts": [{"text": "Hi"}]}],
        "tools": [
            {"functionDeclarations": [FUNCTION]},
            {"googleMaps": {"authConfig": KEY}},
            {
                "mcpServers": [
                    {
                        "name": "x",
                        "streamableHttpTransport": {"url": "https://x", "headers": {"k": "x"}},
                    }
                ]
            },
            {"retrieval": {"externalApi": {"endpoint": "https://x", "apiAuth": KEY}}},
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["look"]}},
        "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        "labels": {"x": "x"},
        "generationConfig": {
            "thinkingConfig": {"includeThoughts": True, "thinkingLevel": "LOW"},
            "responseModalities": ["TEXT"],
            "speechConfig": {"languageCode": "x"},
            "routingConfig": {"manualMode": {"modelName": "x"}},
            **fields(
                "temperature topP topK seed maxOutputTokens candidateCount logprobs"
                " responseLogprobs unknown"
            ),
            **fields("responseMimeType mediaResolution"),
        },
        **fields("cachedContent serviceTier store unknown"),
    },
}
CONTENT = frozenset(
    {
        "messages",
        "input",
        "contents",
        "function",
        "functionDeclarations",
        "parameters",
        "input_schema",
    }
)
"""Fields that are recorded because they are the conversation or the tools. (`model`, `stop` and
schemas are too.)"""
HEADERS = [
    "x-codex-turn-metadata",
    "x-codex-parent-thread-id",
    "x-claude-code-request-class",
    "x-claude-code-agent-id",
    "x-openai-subagent",
    "x-parent-session-id",
    "x-stainless-retry-count",
    "x-unknown",
]


def places(value, path=()):
    """Yield the path of each value that is no part of the conversation."""
    if path:
        yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        is_tool = (
            path[:1] == ("tools",)
            and isinstance(value, dict)
            and (key == "name" or value.get("name") == "look")
        )
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
