import json

import pytest

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.routes import (
    Route,
    advice,
    find_route,
    looks_like_model_call,
    not_served,
)

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


PROVIDERS = """
openai-chat         /chat/completions                    -
openai-responses    /responses                           -
Azure OpenAI:
openai-chat         /chat/completions?api-version=2025   /openai/deployments/my-gpt
openai-chat         /v1/chat/completions                 /openai
openai-responses    /v1/responses?api-version=preview    /openai
openai-responses    /responses?api-version=2025          /openai
openai-chat         /chat/completions                    /models
Gemini and Vertex AI, as OpenAI:
openai-chat         /chat/completions                    /v1beta/openai
openai-chat         /chat/completions                    /v1beta1/projects/p/locations/global/endpoints/openapi
as Anthropic:
anthropic-messages  /v1/messages?beta=true               /anthropic
anthropic-messages  /v1/messages                         /api/anthropic
anthropic-messages  /v1/messages                         /apps/anthropic
others:
openai-chat         /v1/chat/completions                 /api
anthropic-messages  /v1/messages                         /api
openai-chat         /chat/completions                    /api/paas/v4
openai-chat         /chat/completions                    /api/coding/paas/v4
openai-chat         /chat/completions                    /api/v3
openai-responses    /responses                           /api/v3
openai-chat         /v1/chat/completions                 /compatible-mode
openai-chat         /v1/chat/completions                 /inference
openai-chat         /chat/completions                    /inference
openai-chat         /chat/completions                    /v1/openai
openai-chat         /chat/completions                    /v2
openai-chat         /v1/chat/completions                 /client/v4/accounts/a/ai
openai-responses    /responses                           /backend-api/codex
openai-responses    /responses/compact                   /backend-api/codex
openai-responses    /v1/responses/compact                /openai
"""
"""Dialect, path and prefix of requests."""
OPERATIONS = """
openai-chat             generate     POST /v1/chat/completions
openai-chat             models       GET  /v1/models
openai-chat             models       GET  /v1/models/tiny
openai-responses        generate     POST /v1/responses
openai-responses        generate     POST /responses
openai-responses        generate     POST /v1/responses/compact
openai-responses        generate     POST /responses/compact
openai-responses        count_tokens POST /v1/responses/input_tokens
openai-responses        count_tokens POST /responses/input_tokens
openai-responses        models       GET  /backend-api/codex/models
anthropic-messages      generate     POST /v1/messages?beta=true
anthropic-messages      count_tokens POST /v1/messages/count_tokens
google-generate-content generate     POST /v1beta/models/gemini-x:generateContent
google-generate-content generate     POST /v1beta/models/gemini-x:streamGenerateContent?alt=sse
google-generate-content count_tokens POST /v1beta/models/gemini-x:countTokens
google-generate-content generate     POST /v1/models/gemini-x:generateContent
google-generate-content generate     POST /v1beta1/models/Qwen/Qwen3:8b:generateContent
google-generate-content generate     POST /v1beta1/publishers/google/models/gemini-x:streamGenerateContent
google-generate-content count_tokens POST /v1/projects/p/locations/l/publishers/google/models/gemini-x:countTokens
google-generate-content models       GET  /v1beta/models
google-generate-content models       GET  /v1beta/models/gemini-x
"""
NOT_SERVED = """
GET  /v1/responses
POST /v1/responses/r1/cancel
GET  /v1/messages
POST /v1/models
POST /v1/messages/batches
GET  /v1/modelsx
GET  /v1beta/models/gemini-x:generateContent
POST /v1beta/models/gemini-x
POST /v1beta/models
POST /v1beta/models/:generateContent
POST /v1beta/models/gemini-x:embedContent
POST /v1beta/models/gemini-x:generateContent/more
POST /v1beta/projects/p/models/gemini-x:generateContent
GET  /v1beta/models/
POST /openai/v1/chat/completions/
POST /openai/v1/chat/completions/x
POST openai/v1/chat/completions
POST /slack/messages
POST /api/messages
POST /openai/v1/completions
POST /v1/conversations
DELETE /v1/conversations/conv_7
GET  /v1/conversations/conv_7/items
GET  /v1/responses/resp_1
DELETE /v1/responses/resp_1
GET  /v1/responses/resp_1/input_items
GET  /v1beta/cachedContents
POST /v1beta/cachedContents
PATCH /v1beta/cachedContents/1
GET  /v1beta/files/1
"""
"""Paths of no API, of other applications and of parts of an API that are not served."""


def rows(text):
    """Return the words of each line, without headings."""
    return [line.split() for line in text.strip().splitlines() if not line.endswith(":")]


@pytest.mark.parametrize(("dialect", "service", "method", "path"), rows(OPERATIONS))
def test_an_operation_is_known_by_method_and_path(dialect, service, method, path):
    route = find_route(method, path, {})
    assert (str(route), route.prefix) == (f"{dialect} {service}", "")


@pytest.mark.parametrize(("method", "path"), rows(NOT_SERVED))
def test_other_requests_are_not_served(method, path):
    assert find_route(method, path, {}) is None


def test_the_list_of_models_is_anthropics_only_for_its_clients():
    headers = {"anthropic-version": "2023-06-01"}
    assert find_route("GET", "/v1/models?limit=5", headers).dialect is routes.MESSAGES
    assert find_route("GET", "/v1/models", {}).dialect is routes.CHAT
    assert find_route("POST", CHAT, headers).dialect is routes.CHAT


@pytest.mark.parametrize(("dialect", "path", "prefix"), rows(PROVIDERS))
def test_an_api_is_recognised_behind_the_prefix_of_a_provider(dialect, path, prefix):
    prefix = prefix.removeprefix("-")
    route = find_route("POST", prefix + path, {})
    assert (str(route), route.prefix + path) == (f"{dialect} generate", prefix + path)


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("GET", "/openai/v1/models", Route(routes.CHAT, "models", "/openai")),
        (
            "POST",
            "/openai/v1/responses/input_tokens",
            Route(routes.RESPONSES, "count_tokens", "/openai"),
        ),
        (
            "POST",
            "/anthropic/v1/messages/count_tokens",
            Route(routes.MESSAGES, "count_tokens", "/anthropic"),
        ),
        ("POST", "/my/gateway" + CHAT, Route(routes.CHAT, "generate", "/my/gateway")),
        ("POST", "/v1" + MESSAGES, Route(routes.MESSAGES, "generate", "/v1")),
        ("POST", "//v1/x/../chat/completions", Route(routes.CHAT, "generate", "//v1/x/..")),
        (
            "POST",
            "/v1beta/models/a/v1/chat/completions:generateContent",
            Route(routes.GEMINI, "generate"),
        ),
        ("POST", "/x" * 100_000 + CHAT, None),
        ("GET", "/google/x/main/v1/models/model.py", None),
        ("GET", "/exfil/DATA/v1beta/models/SECRET", None),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else None,
)
def test_every_operation_of_an_api_is_behind_a_prefix_too(method, path, route):
    assert find_route(method, path, {}) == route


OTHER_APIS = """
/v1/completions /v1/complete /v2/chat /api/chat /api/generate
/model/m/invoke-with-response-stream /model/m/converse-stream /v3/ai/language-model
/v1/projects/p/locations/l/publishers/anthropic/models/m:rawPredict
/v1/projects/p/locations/l/publishers/anthropic/models/m:streamRawPredict
/v1beta/interactions /v1beta1/interactions /openai/v1/realtime/calls /v1/live/sessions
/v1/threads/runs /v1/threads/t/runs /v1/threads/t/runs/r/submit_tool_outputs
/v1/batches /openai/v1/batches /v1/messages/batches?beta=true /v1beta/models/m:batchGenerateContent
"""


@pytest.mark.parametrize("path", OTHER_APIS.split())
def test_a_model_call_of_another_api_and_a_batch_of_calls_are_recognised(path):
    assert looks_like_model_call("POST", path)
    assert not looks_like_model_call("GET", path)


SPELLINGS = r"""
/v1/chat/%63ompletions /v1/chat%2fcompletions /v1/chat/%2563ompletions /v1/chat/completions/ /v1/chat/completions//
/v1/chat/completions;a=b /v1/chat;a=b/completions /v1/chat/completions.json /v1//chat//completions
/V1/Chat/COMPLETIONS /v1/chat/./completions /v1/chat/x/../completions
/v1/x/%2e%2e/chat/completions/. /v1/chat\completions /v1/chat/completions%20 /v1/chat/completions%00
/v1/chat/completions%3fa=b /v1/chat/completions%23a /v1/chat/completions. /v1/chat/..;/chat/completions;
/v1/chat/completions#a /v1/messages/?beta=true /v1/Responses/ /v1beta/models/m%3AgenerateContent
/v1beta/models/gpt-4.1:generateContent; /openai/v1/Batches/ /API/Chat/
"""


@pytest.mark.parametrize("path", SPELLINGS.split())
def test_a_model_call_is_recognised_however_its_path_is_spelled(path):
    assert find_route("POST", path, {}) is None
    assert looks_like_model_call("POST", path)
    assert not looks_like_model_call("GET", path)


@pytest.mark.parametrize(
    "path",
    ["/v1/threads", "/interactions", "/v1beta/interactions/i/cancel", "/live/sessions/s/events"],
)
def test_a_path_that_only_resembles_one_of_a_model_api_is_none(path):
    assert not looks_like_model_call("POST", path)


@pytest.mark.parametrize(
    "piece", ["%25", "/:complete", "%2e%2e/", ";", "/completions-", "/threads/runs", "bidigenerate"]
)
def test_a_long_path_is_compared_in_linear_time(piece):
    assert not looks_like_model_call("POST", "/v1/" + piece * (64_000 // len(piece)) + "/x")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/files",
        "/v1/moderations",
        "/api/event_logging/batch",
        "/chat",
        "/chatter",
        "/v1/uploads",
    ],
)
def test_other_requests_to_a_model_api_are_none(path):
    assert not looks_like_model_call("POST", path)
    assert advice("POST", path) == ""


USE = "Let the program use OpenAI's Chat Completions or Responses, or Anthropic's Messages"
BEDROCK = f"the recorder does not serve Bedrock's Converse and InvokeModel. {USE}"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/v1//chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "did you mean /v1/messages?"),
        ("/v1/chat-completions", "did you mean /v1/chat/completions?"),
        ("/openai/v1/chat/completons", "did you mean /v1/chat/completions?"),
        ("/V1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/response", "did you mean /v1/responses?"),
        ("/v1/mesages", "did you mean /v1/messages?"),
        ("/v1/chat/" + "completion" * 100_000, ""),
        ("/model/us.amazon.nova-pro-v1%3A0/converse", BEDROCK),
        ("/model/arn%3Aaws%3Abedrock%3A%3A1%3Ax%2Fy/converse-stream", BEDROCK),
        ("/model/m/invoke", BEDROCK),
        (
            "/openai/v1/threads/t/runs",
            f"the recorder does not serve OpenAI's Assistants API. {USE}",
        ),
        ("/model/m/invoke-with-response-stream", BEDROCK),
    ],
    ids=lambda text: text[:40],
)
def test_a_mistyped_path_is_answered_with_the_nearest_one(path, said):
    assert advice("POST", path) == said
    assert advice("GET", path) == ""


def test_a_call_of_bedrock_is_refused_where_its_clients_read_why():
    error = json.loads(not_served("POST", "/model/m/converse", {}))
    assert error["__type"] == "ResourceNotFoundException"
    assert error["message"] == f"POST /model/m/converse is not served here: {BEDROCK}"
