"""The Anthropic Messages API, which the Anthropic SDKs and Claude Code use.

Field names follow Anthropic's API reference.
"""

from rolltap.addons.dialects.anthropic.reply import StreamEncoder
from rolltap.addons.dialects.anthropic.reply import encode_error as encode_error
from rolltap.addons.dialects.anthropic.reply import encode_models as encode_models
from rolltap.addons.dialects.anthropic.reply import encode_reply as encode_reply
from rolltap.addons.dialects.anthropic.reply import encode_token_count as encode_token_count
from rolltap.addons.dialects.anthropic.request import decode as decode
from rolltap.addons.dialects.dialect import Operation

NAME = "anthropic-messages"
stream_encoder = StreamEncoder


def operation(method: str, path: str) -> Operation | None:
    """Return the operation of a request. OpenAI has the same path for its models: see `routes.find_route`."""
    if method == "POST" and path == "/v1/messages":
        return "generate"
    if method == "POST" and path == "/v1/messages/count_tokens":
        return "count_tokens"
    if method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/")):
        return "models"
    return None
