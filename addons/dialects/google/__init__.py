"""The Gemini API, which the Google Gen AI SDKs, Gemini CLI and clients of Vertex AI use.

It serves generateContent, streamGenerateContent, countTokens and the list of models.

Field names follow the Gemini API reference.
"""

import re

from rolltap.addons.dialects.dialect import Operation
from rolltap.addons.dialects.google.reply import encode_error as encode_error
from rolltap.addons.dialects.google.reply import encode_models as encode_models
from rolltap.addons.dialects.google.reply import encode_reply as encode_reply
from rolltap.addons.dialects.google.reply import encode_token_count as encode_token_count
from rolltap.addons.dialects.google.reply import stream_encoder as stream_encoder
from rolltap.addons.dialects.google.request import METHOD
from rolltap.addons.dialects.google.request import decode as decode

NAME = "google-generate-content"

_MODELS = re.compile(r"/v1beta/models(/[^:]+)?")  # /v1/models is routed to OpenAI, which has it too


def operation(method: str, path: str) -> Operation | None:
    """Return the operation of a request. The host is not checked."""
    if method == "GET" and _MODELS.fullmatch(path):
        return "models"
    match = METHOD.fullmatch(path) if method == "POST" else None
    if match is None:
        return None
    return "count_tokens" if match["method"] == "countTokens" else "generate"
