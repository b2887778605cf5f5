"""OpenAI Chat Completions, which the OpenAI SDKs, LiteLLM and most harnesses use.

Field names follow the OpenAI API reference. `reasoning_content` is an extension that servers of reasoning models and
their clients share.
"""

from rolltap.addons.dialects.dialect import Operation
from rolltap.addons.dialects.openai import encode_error as encode_error
from rolltap.addons.dialects.openai_chat.reply import StreamEncoder
from rolltap.addons.dialects.openai_chat.reply import encode_models as encode_models
from rolltap.addons.dialects.openai_chat.reply import encode_reply as encode_reply
from rolltap.addons.dialects.openai_chat.reply import encode_token_count as encode_token_count
from rolltap.addons.dialects.openai_chat.request import decode as decode

NAME = "openai-chat"
stream_encoder = StreamEncoder

_PATHS = frozenset({"/v1/chat/completions", "/chat/completions"})


def operation(method: str, path: str) -> Operation | None:
    """Return the operation of a request. The host is not checked."""
    if method == "POST" and path in _PATHS:
        return "generate"
    if method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/")):
        return "models"
    return None
