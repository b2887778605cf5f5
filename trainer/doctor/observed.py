"""The facts of one run of a program: its end, its calls, and what else came through the proxy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolltap.addons.store.records import Call, Event


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
        loopback: Variables and arguments of the program that name a URL on loopback, such as
            `OPENAI_BASE_URL=http://127.0.0.1:8000/v1`.
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


def loopback_urls(environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Return the variables, as NAME=VALUE, and the arguments that name a URL on loopback. Proxies are left out."""
    settings = [f"{name}={value}" for name, value in environment.items() if not name.lower().endswith("_proxy")]
    hosts = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")
    urls = [f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts]
    return [text for text in (*settings, *command) if any(url in text for url in urls)]
