"""OpenAI Chat Completions, as the OpenAI SDKs, LiteLLM and most harnesses speak it.

Field names follow the OpenAI API reference; `reasoning_content` is the extension that reasoning models' servers and
clients share.
"""

from rolltap.addons.dialects.dialect import Operation
from rolltap.addons.dialects.openai import encode_error
from rolltap.addons.dialects.openai_chat.reply import encode_models, encode_reply, encode_token_count
from rolltap.addons.dialects.openai_chat.request import decode
from rolltap.addons.dialects.openai_chat.stream import StreamEncoder

__all__ = [
    "NAME",
    "decode",
    "encode_error",
    "encode_models",
    "encode_reply",
    "encode_token_count",
    "operation",
    "stream_encoder",
]

NAME = "openai-chat"

_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/chat/completions",
        "/api/v1/chat/completions",
        "/openai/v1/chat/completions",
        "/compatible-mode/v1/chat/completions",
    }
)

stream_encoder = StreamEncoder


def operation(method: str, path: str) -> Operation | None:
    """What a request asks for. Providers serve this API under several paths, and any host counts."""
    if method == "POST" and path in _PATHS:
        return "generate"
    if method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/")):
        return "models"
    return None
