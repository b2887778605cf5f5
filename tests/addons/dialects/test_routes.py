import pytest

from rolltap.addons.dialects import anthropic, google, openai_chat, openai_responses
from rolltap.addons.dialects.routes import ROUTES, Route, advice, find_route, looks_like_model_call

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "dialect", "prefix"),
    [
        (CHAT, openai_chat, ""),
        ("/chat/completions", openai_chat, ""),
        # Azure OpenAI
        (
            "/openai/deployments/my-gpt/chat/completions?api-version=2025-01-01",
            openai_chat,
            "/openai/deployments/my-gpt",
        ),
        ("/openai/v1/chat/completions", openai_chat, "/openai"),
        ("/openai/v1/responses?api-version=preview", openai_responses, "/openai"),
        ("/openai/responses?api-version=2025-04-01-preview", openai_responses, "/openai"),
        ("/models/chat/completions", openai_chat, "/models"),
        # Gemini and Vertex AI, as OpenAI
        ("/v1beta/openai/chat/completions", openai_chat, "/v1beta/openai"),
        (
            "/v1beta1/projects/p/locations/global/endpoints/openapi/chat/completions",
            openai_chat,
            "/v1beta1/projects/p/locations/global/endpoints/openapi",
        ),
        # as Anthropic
        ("/anthropic/v1/messages?beta=true", anthropic, "/anthropic"),
        ("/api/anthropic/v1/messages", anthropic, "/api/anthropic"),
        ("/apps/anthropic/v1/messages", anthropic, "/apps/anthropic"),
        # others
        ("/api/v1/chat/completions", openai_chat, "/api"),
        ("/api/v1/messages", anthropic, "/api"),
        ("/api/paas/v4/chat/completions", openai_chat, "/api/paas/v4"),
        ("/api/coding/paas/v4/chat/completions", openai_chat, "/api/coding/paas/v4"),
        ("/api/v3/chat/completions", openai_chat, "/api/v3"),
        ("/api/v3/responses", openai_responses, "/api/v3"),
        ("/compatible-mode/v1/chat/completions", openai_chat, "/compatible-mode"),
        ("/inference/v1/chat/completions", openai_chat, "/inference"),
        ("/inference/chat/completions", openai_chat, "/inference"),
        ("/v1/openai/chat/completions", openai_chat, "/v1/openai"),
        ("/v2/chat/completions", openai_chat, "/v2"),
        ("/client/v4/accounts/a/ai/v1/chat/completions", openai_chat, "/client/v4/accounts/a/ai"),
        ("/backend-api/codex/responses", openai_responses, "/backend-api/codex"),
    ],
)
def test_an_api_is_recognised_behind_the_prefix_of_a_known_provider(path, dialect, prefix):
    route = find_route("POST", path, {})
    assert route == Route(dialect, "generate", prefix)
    assert ROUTES[str(route)] == Route(dialect, "generate")


@pytest.mark.parametrize(
    ("method", "path", "dialect", "service"),
    [
        ("GET", "/openai/v1/models", openai_chat, "models"),
        ("POST", "/openai/v1/responses/input_tokens", openai_responses, "count_tokens"),
        ("POST", "/anthropic/v1/messages/count_tokens", anthropic, "count_tokens"),
    ],
)
def test_every_operation_of_an_api_is_behind_its_prefix(method, path, dialect, service):
    assert find_route(method, path, {}) == Route(dialect, service, path.partition("/v1")[0])


def test_a_websocket_is_behind_a_prefix_too():
    route = find_route("GET", "/openai/v1/responses", {"upgrade": "websocket"})
    assert route == Route(openai_responses, "websocket", "/openai")
    assert find_route("GET", "/channels/v1/responses", {"upgrade": "websocket"}) is None


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1beta/models/m:generateContent"])
def test_an_unknown_prefix_is_served_only_if_the_option_names_it(path):
    asked = "/my/gateway" + path
    assert find_route("POST", asked, {}) is None
    assert find_route("POST", asked, {}, ["/other"]) is None
    for pattern in ("/my/gateway", "/my/*", "*"):
        assert find_route("POST", asked, {}, [pattern]).prefix == "/my/gateway"


@pytest.mark.parametrize(
    "path",
    [
        "/openai/v1/chat/completions/",
        "/openai//v1/chat/completions",
        "/OpenAI/v1/chat/completions",
        "/openai/v1/chat/completions/x",
        "/openai/x/../v1/chat/completions",
        "/x/openai/v1/chat/completions",
        "openai/v1/chat/completions",
        "/slack/messages",
        "/api/messages",
        "/openai/v1/completions",
    ],
)
def test_other_paths_are_not_served(path):
    assert find_route("POST", path, {}) is None


def test_a_path_of_many_folders_is_not_searched_to_its_end():
    assert find_route("POST", "/x" * 100_000 + CHAT, {}, ["*"]) is None


def test_a_model_whose_name_has_the_path_of_another_api_is_geminis():
    route = find_route("POST", "/v1beta/models/a/v1/chat/completions:generateContent", {}, ["*"])
    assert route == Route(google, "generate")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/v1/conversations/7"),
        ("GET", "/v1/conversations/7/items"),
        ("DELETE", "/api/v1/conversations/conv_7"),
        ("POST", "/v2/v1/conversations"),
        ("GET", "/api/v1beta/cachedContents"),
    ],
)
def test_paths_of_other_applications_are_no_stored_objects(method, path):
    assert find_route(method, path, {}) is None


def test_stored_objects_are_behind_the_prefix_of_azure_and_one_that_the_option_names():
    for prefix, named in [("", ()), ("/openai", ()), ("/my/gateway", ["/my/*"])]:
        route = find_route("DELETE", f"{prefix}/v1/conversations/conv_7", {}, named)
        assert route == Route(openai_responses, "stored", prefix)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/complete",
        "/v2/chat",
        "/api/chat",
        "/api/generate",
        "/model/m/invoke-with-response-stream",
        "/model/m/converse-stream",
        "/v1/projects/p/locations/l/publishers/anthropic/models/m:rawPredict",
        "/v1/projects/p/locations/l/publishers/anthropic/models/m:streamRawPredict",
        "/v3/ai/language-model",
        # batches
        "/v1/batches",
        "/openai/v1/batches",
        "/v1/messages/batches?beta=true",
        "/v1beta/models/m:batchGenerateContent",
    ],
)
def test_a_model_call_of_another_api_and_a_batch_of_calls_are_recognised(path):
    assert looks_like_model_call("POST", path)
    assert not looks_like_model_call("GET", path)


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/files", "/v1/moderations", "/api/event_logging/batch", "/chat", "/chatter", "/v1/uploads"],
)
def test_other_requests_to_a_model_api_are_none(path):
    assert not looks_like_model_call("POST", path)
    assert advice("POST", path) == ""


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat-completions", "/v1/chat/completions"),
        ("/openai/v1/chat/completons", "/v1/chat/completions"),
        ("/V1/chat/completions", "/v1/chat/completions"),
        ("/v1/response", "/v1/responses"),
        ("/v1/mesages", "/v1/messages"),
    ],
)
def test_a_mistyped_path_is_answered_with_the_nearest_one(path, meant):
    assert advice("POST", path) == f"did you mean {meant}?"


def test_a_path_behind_an_unknown_prefix_is_answered_with_the_option():
    assert advice("POST", "/my/gateway/v1/chat/completions?x=1") == "set rolltap_prefix=/my/gateway to answer it"


def test_only_a_post_is_advised():
    assert advice("GET", "/v1/chat/completion") == ""


def test_a_long_path_is_not_compared():
    assert advice("POST", "/v1/chat/" + "completion" * 100_000) == ""
