import json

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.model_call import (
    ContextOverflow,
    DialectError,
)


def test_an_error_has_the_apis_shape():
    assert json.loads(openai_responses.encode_error(ContextOverflow(9, 8)))["error"] == {
        "message": str(ContextOverflow(9, 8)),
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }
    assert (
        json.loads(openai_responses.encode_error(DialectError("Down.", status=503)))["error"]["type"] == "server_error"
    )
