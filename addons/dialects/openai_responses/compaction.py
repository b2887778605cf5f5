"""Codex's compaction over the Responses API: the model's summary of a conversation, as an item that stands for it.

Codex asks with a `compaction_trigger` item at the end of the input, takes a reply of exactly one `compaction` item, and
from then on sends that item in place of the history. Its `encrypted_content` is opaque to Codex; here it holds the
summary, since nothing is stored. It is only text: who forges it has written a user message.
"""

import base64
import binascii

from rolltap.addons.dialects.types import ModelCall, ReplyContext, well_formed

_HINT, _TRIGGER = "compaction", "trigger"
_MARK = "rolltap-summary:"
_REQUEST = (
    "The conversation is about to be replaced by a summary of it. Write that summary now, and nothing else: the task, "
    "the user's wishes, what was done and found, what is left to do, and every name, path and value that is needed to "
    "go on with the work."
)
_HEADING = "Summary of the conversation so far:\n\n"


def ask_for_summary(model_call: ModelCall) -> None:
    """Adds what the trigger item says to the model."""
    model_call.messages.append({"role": "user", "content": _REQUEST})
    model_call.client_metadata[_HINT] = _TRIGGER


def is_compaction(context: ReplyContext) -> bool:
    """Whether the reply is to be a compaction item."""
    return context.model_call.client_metadata.get(_HINT) == _TRIGGER


def seal(summary: str) -> str:
    """The `encrypted_content` of a compaction item."""
    return base64.b64encode(f"{_MARK}{well_formed(summary)}".encode()).decode()


def unseal(sealed: str | None) -> str | None:
    """The model's text in place of the history, or None when `sealed` was not issued here."""
    try:
        text = base64.b64decode(sealed or "", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return _HEADING + text.removeprefix(_MARK) if text.startswith(_MARK) else None
