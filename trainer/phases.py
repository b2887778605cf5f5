"""The phases of a session: the seconds of each, for its row, and spans, for OpenTelemetry.

A program that has set up OpenTelemetry gets the spans in its own traces. Otherwise rolltap sends
them by OTLP, if the extra `otel` is installed and the usual variables name a place, such as
OTEL_EXPORTER_OTLP_ENDPOINT (https://opentelemetry.io/docs/specs/otel/protocol/exporter/).
"""

import logging
import os
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

from rolltap.addons.errors import install_command

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

logger = logging.getLogger(__name__)

_PLACES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Interval(NamedTuple):
    """A phase, and its begin and end in nanoseconds of the epoch."""

    phase: str
    begin: int
    end: int


class PhaseClock:
    """Times the phases of a session, of which one begins when the one before ends.

    Before the first phase, the session waited for `queued` seconds, and before that its earlier
    attempts took `retried` seconds.
    """

    def __init__(self, phase: str, *, queued: float = 0.0, retried: float = 0.0) -> None:
        self.intervals: list[Interval] = []
        self._phase = phase
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._begin = time.monotonic_ns()
        submitted = self._begin - int(queued * 1e9)
        self._add("retried", submitted - int(retried * 1e9), submitted)
        self._add("queued", submitted, self._begin)

    def enter(self, phase: str) -> None:
        """End the present phase, and begin another one. An empty one is the end."""
        now = time.monotonic_ns()
        self._add(self._phase, self._begin, now)
        self._phase = phase
        self._begin = now

    def seconds(self) -> dict[str, float]:
        """Return phase -> seconds of its intervals together, for the phases that have one."""
        seconds: dict[str, float] = {}
        for phase, begin, end in self.intervals:
            seconds[phase] = seconds.get(phase, 0.0) + (end - begin) / 1e9
        return seconds

    def _add(self, phase: str, begin: int, end: int) -> None:
        if phase and end > begin:
            self.intervals.append(Interval(phase, self._epoch + begin, self._epoch + end))


def send_spans(clock: PhaseClock, attributes: Mapping[str, str | float | None]) -> None:
    """Send a session that has ended as a span, and its phases as children, if OpenTelemetry is set
    up. `attributes` without a value are left out."""
    tracer = _tracer()
    if tracer is None or not clock.intervals:
        return
    from opentelemetry.trace import set_span_in_context

    first = clock.intervals[0]
    last = clock.intervals[-1]
    session = tracer.start_span("session", start_time=first.begin)
    for name, value in attributes.items():
        if value is not None:
            session.set_attribute(f"rolltap.{name}", value)
    context = set_span_in_context(session)
    for phase, begin, end in clock.intervals:
        tracer.start_span(phase, context, start_time=begin).end(end)
    session.end(last.end)


@cache
def _tracer() -> "Tracer | None":
    try:
        provider = _provider()
    except Exception as error:  # the extra is missing, or a variable is wrong: sessions go on
        logger.warning("no spans are sent: %s. They need %s", error, install_command("otel"))
        provider = None
    if provider is None:
        return None
    return provider.get_tracer("rolltap", version("rolltap"))


def _provider() -> "TracerProvider | None":
    """Return the program's own provider, or one that sends by OTLP; None if nobody wants spans.

    It sends the last ones when this process ends. Raises `ImportError`, and `ValueError` for a
    wrong variable.
    """
    wanted = any(map(os.environ.get, _PLACES))
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        if wanted:
            raise
        return None
    own = trace.get_tracer_provider()
    if isinstance(own, TracerProvider):
        return own
    if not wanted or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
