"""The error body that OpenAI's APIs share."""

from rolltap.addons.dialects.types import DialectError, dump_json


def encode_error(error: DialectError) -> bytes:
    """The body of an error reply."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return dump_json({"error": {"message": str(error), "type": kind, "param": None, "code": error.code}})
