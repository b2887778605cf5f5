import pytest

from rolltap.addons.dialects.routes import advice, looks_like_model_call


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
