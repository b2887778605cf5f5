"""Codex's compaction over the Responses API: a summary by the model replaces the history of a conversation.

1. Codex appends a `compaction_trigger` item to the input.
2. The reply is exactly one `compaction` item. Its `encrypted_content`, opaque to Codex, contains the summary.
3. In later requests Codex sends that item in place of the history. It is decoded to a user message.

`encrypted_content` is neither encrypted nor authenticated. A forged one has the effect of a user message.
"""

import base64
import binascii

from rolltap.addons.dialects.model_call import ModelCall, ReplyContext, well_formed

_HINT, _TRIGGER = "compaction", "trigger"
_COMPACTION = "compaction"
"""Key of the recorded options: True when the reply is a compaction item."""
_MARK = "rolltap-summary:"
_REQUEST = (
    "The conversation is about to be replaced by a summary of it. Write that summary now, and nothing else: the task, "
    "the user's wishes, what was done and found, what is left to do, and every name, path and value that is needed to "
    "go on with the work."
)
_HEADING = "Summary of the conversation so far:\n\n"


def ask_for_summary(model_call: ModelCall) -> None:
    """Append the request for a summary to the messages, and mark the call as a compaction, whose reply is a text."""
    model_call.messages.append({"role": "user", "content": _REQUEST})
    model_call.client_metadata[_HINT] = _TRIGGER
    model_call.requested_sampling[_COMPACTION] = True
    model_call.may_call = False


def is_compaction(context: ReplyContext) -> bool:
    """Return True when the reply must be a compaction item."""
    return context.model_call.requested_sampling.get(_COMPACTION) is True


def seal(summary: str) -> str:
    """Return the `encrypted_content` of a compaction item."""
    return base64.b64encode(f"{_MARK}{well_formed(summary)}".encode()).decode()


def unseal(sealed: str | None) -> str | None:
    """Return the text that replaces the history, or None when `sealed` does not have the form that `seal` writes."""
    try:
        text = base64.b64decode(sealed or "", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return _HEADING + text.removeprefix(_MARK) if text.startswith(_MARK) else None
