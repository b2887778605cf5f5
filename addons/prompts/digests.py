"""Digests of conversations: messages are compared by them, and only the digests are kept.

The digest of a prefix covers the tools, the echo rule and the canonical form of each message.
"""

import hashlib
import json
import marshal
import secrets
from itertools import takewhile

from rolltap.addons.dialects.types import Message, ModelCall
from rolltap.addons.prompts.canonical import canonical

_BEFORE, _AFTER = 30, 50
"""Characters shown before and after the start of a difference."""


def fingerprint(message: Message) -> bytes:
    """Return a digest that differs for messages with different values or types. Faster than the canonical form."""
    try:
        values = marshal.dumps(message, 0)
    except ValueError:  # nested too deeply: equal to no other
        return secrets.token_bytes(16)
    return hashlib.blake2b(values, digest_size=16).digest()


def first_digest(model_call: ModelCall) -> bytes:
    """Return the digest of a conversation without messages."""
    return _tools_digest(model_call, model_call.echo_rule and model_call.echo_rule.__name__)


def extend_digest(digest: bytes, message: Message, model_call: ModelCall) -> bytes:
    """Return the digest of a prefix and the message after it."""
    text = canonical(message, model_call).encode("utf-8", "replace")
    return hashlib.blake2b(digest + text, digest_size=16).digest()


def opening_digest(model_call: ModelCall) -> bytes:
    """Return the digest of the tools and the leading system messages, which an agent's conversations have in common.

    Rows do not hold the echo rule, so the digest does not depend on it.
    """
    digest = _tools_digest(model_call, None)
    for message in takewhile(lambda message: message["role"] == "system", model_call.messages):
        digest = extend_digest(digest, message, model_call)
    return digest


def message_digest(message: Message, model_call: ModelCall) -> bytes:
    """Return the digest of a message by itself: equal for a reply and its echo in any conversation."""
    return extend_digest(b"", message, model_call)


def describe_difference(ours: str, theirs: str) -> str:
    """Return an excerpt of both texts around the first character in which they differ. `theirs` may be cut."""
    if ours.startswith(theirs):
        return f"it differs after {len(theirs)} characters"
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, at - _BEFORE)
    return f"{ours[start : at + _AFTER]!r} where it had {theirs[start : at + _AFTER]!r}"


def _tools_digest(model_call: ModelCall, rule: str | None) -> bytes:
    first = json.dumps([model_call.tools, rule], sort_keys=True)
    return hashlib.blake2b(first.encode(), digest_size=16).digest()
