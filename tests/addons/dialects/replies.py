"""Completed calls as a session has them stored."""

import json

from rolltap.addons.dialects.model_call import Reply, Usage
from rolltap.addons.dialects.stored import StoredCall


def stored_call(call_id, messages, reply, parent_id=None, **asked):
    """Return a call whose request had `messages` after those of its parent."""
    return StoredCall(
        call_id=call_id,
        parent_id=parent_id,
        model="gpt-x",
        messages=json.dumps(messages),
        reply=json.dumps(reply.to_message()),
        sampling=json.dumps({"max_tokens": 9, "asked": asked}),
        finish_reason="length" if reply.finish_reason == "length" else "stop",
        created=5,
        usage=Usage(7, 3),
    )


def by_id(*calls):
    return {call.call_id: call for call in calls}


TALK = Reply("Hi.", "I greet.")
