"""The facts of one run of a program: its end, its calls, and what else came through the proxy."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from rolltap.addons.store.records import Call, Event

_ADDRESS = re.compile(r"^(?!ROLLTAP_)(.*_)?(BASE_?URL|API_?BASE|ENDPOINT|HOST)$", re.I)
"""The name of a variable that may hold the address of a model."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""The hosts of `NO_PROXY`, which programs reach without the recorder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One run of a program under the recorder.

    Attributes:
        program: The program as it was given, or the name of its preset.
        exit_status: Minus the signal's number when a signal ended it; None when it was stopped.
        stopped: Why it was stopped, for instance `timeout`; None when it ended by itself.
        timeout: Seconds after which it was to be stopped.
        output: The last lines of its stdout and stderr.
        calls: Its model calls in the order in which they started.
        events: Facts of the wire that are no calls, in the order in which they were recorded.
        version: Version that the program of a preset reports; empty when it is not known.
        tested_version: Version that the preset was tested with; empty without one.
        install: Command that installs the tested version.
        quirks: Facts of the preset.
        node: Version of the Node that runs it; empty for another program.
        loopback: Variables and arguments that may tell the program to ask a model on loopback, each with the address:
            `OPENAI_BASE_URL (127.0.0.1:8000)`.
    """

    program: str
    exit_status: int | None = 0
    stopped: str | None = None
    timeout: float = 0.0
    output: str = ""
    calls: Sequence[Call] = ()
    events: Sequence[Event] = ()
    version: str = ""
    tested_version: str = ""
    install: str = ""
    quirks: Sequence[str] = ()
    node: str = ""
    loopback: Sequence[str] = field(default_factory=tuple)

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def continued(self) -> list[Call]:
        """The calls that continue the call before them token for token."""
        return [call for call in self.calls if call.kind == "bridged" and not wrote_reply(call)]


def wrote_reply(call: Call) -> bool:
    """Return True when a call has an assistant message, after the reply that it continues, that no model wrote.

    The program wrote it in the place of a reply, so that the call continues an earlier one than the last.
    """
    return call.kind == "bridged" and any(message.get("role") == "assistant" for message in call.parsed_messages)


def loopback_urls(environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Return the variables that name the address of a model, and the arguments, that have a URL on loopback.

    Each has its name and the host alone: a URL may have a secret in it.
    """
    settings = [(name, value) for name, value in environment.items() if _ADDRESS.search(name)]
    for argument in command:
        name, separator, value = argument.partition("=")
        settings.append((name, value) if separator and name.startswith("-") else ("an argument", argument))
    return [f"{name} ({host})" for name, value in settings if (host := _loopback_host(value))]


def _loopback_host(url: str) -> str:
    """Return the host and port of a URL on loopback, without its user name and password; "" for another text."""
    try:
        parts = urlsplit(url)
        on_loopback = parts.scheme in ("http", "https") and parts.hostname in _LOOPBACK
    except ValueError:
        return ""
    return parts.netloc.rpartition("@")[2] if on_loopback else ""
