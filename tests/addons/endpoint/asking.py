"""Requests of the tests of the endpoint, and parts of its answers."""

from tests.addons.harness import said

GEMINI = "/v1beta/models/m:generateContent"


def assistant(content, **fields):
    """Return a message of the assistant."""
    return {"role": "assistant", "content": content, **fields}


def system(content="You help."):
    return {"role": "system", "content": content}


async def told(harness, *messages, **fields):
    """Ask, and return the text of the reply, which is no error."""
    status, reply = await harness.ask(*messages, **fields)
    assert status == 200, reply
    return said(reply)


async def refused(harness, *messages, **fields):
    """Ask, and return the status and the code of the error."""
    status, reply = await harness.ask(*messages, **fields)
    return status, reply["error"]["code"]


def values(rows, name):
    """Return the values of a column."""
    return [row[name] for row in rows]


def kinds(harness):
    return values(harness.calls(), "kind")
