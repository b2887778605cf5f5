"""Errors of rolltap: one base, and a kind for each case that a caller handles in another way.

Every message says what went wrong, where, and what to do about it.
"""


class RolltapError(Exception):
    """Base of all errors that rolltap raises for a caller to handle."""


class InputError(RolltapError, ValueError):
    """An argument, an option or an input file is wrong. Nothing was started or written."""


class MissingPackageError(RolltapError, ImportError):
    """A part of rolltap is used whose packages are not installed. The message names the extra to install."""


class RunError(RolltapError):
    """A run folder cannot be read or written."""


class RecorderError(RolltapError):
    """The recorder did not start, died, or does not answer. Calls that it committed are in the run."""


class EngineError(RolltapError):
    """The engine did not start, does not answer, or refused a request.

    `status` is the HTTP status that the recorder answers a harness with. `retryable` is True when the same request may
    succeed later.
    """

    def __init__(self, message: str, *, status: int = 503, retryable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable


class HubError(RolltapError):
    """The Hugging Face Hub refused an upload or cannot be reached."""


class LedgerError(RolltapError):
    """The ledger of sampled tokens does not add up. This is a bug of rolltap; the batch must not be trained on."""
