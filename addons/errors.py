"""Errors of rolltap: one base class, and a subclass for each case that callers handle differently.

A message says what failed and where and, when the user can act on it, what to do.
"""

import json
import shlex
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extras: str) -> str:
    """Return the command that adds extras, from the checkout or the wheel that rolltap was
    installed from.

    No index has rolltap. The installer notes the origin in `direct_url.json` (PEP 610).
    """
    notes = (found.read_text("direct_url.json") for found in distributions(name="rolltap"))
    # a build leaves metadata without it in a checkout
    origin = json.loads(next(filter(None, notes), "{}"))
    url = urlsplit(origin.get("url", ""))
    path = unquote(url.path)
    if url.scheme != "file" or not Path(path).exists():
        return f"pip install '.[{extras}]' in a clone of rolltap"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{path}[{extras}]')}"


class RolltapError(Exception):
    """Base class of rolltap's public errors. A failed commit raises `OSError` instead."""


class InputError(RolltapError, ValueError):
    """An argument, an option or an input file is wrong. The user has to change it."""


class UnreadableModelError(InputError):
    """The tool calls of the model that is recorded cannot be read. The message names the setting
    that helps."""

    exit_status = 2


class MissingPackageError(RolltapError, ImportError):
    """Packages of an optional part of rolltap are not installed. The message names the extra to
    install."""


class RunError(RolltapError):
    """A run folder cannot be read or written."""


class RecorderError(RolltapError):
    """The recorder did not start, died, or does not answer. The run keeps the calls that it
    committed."""


class EngineError(RolltapError):
    """The engine did not start, does not answer, or refused a request.

    `status` is the HTTP status of the recorder's error reply to the harness. `retryable` is True
    when the same request may succeed later. `answered` is True when the engine refused this
    request: it may still serve others. `for_harness` replaces a message that names adapters or
    folders, which are not the harness's business.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 503,
        retryable: bool = False,
        answered: bool = False,
        for_harness: str | None = None,
    ) -> None:
        super().__init__(message)
        self.for_harness = for_harness or message
        self.status = status
        self.retryable = retryable
        self.answered = answered


class ServiceError(RolltapError):
    """The rollout service refused a request, or does not answer. `status` is that of HTTP, None
    without an answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RankError(RolltapError, RuntimeError):
    """Another process of the training failed. The message says which one, and how; so does that
    process."""


class HubError(RolltapError):
    """The Hugging Face Hub refused an upload or cannot be reached."""


class LedgerError(RolltapError):
    """The token counts of the ledger are inconsistent. This is a bug in rolltap. Do not train on
    the batch."""
