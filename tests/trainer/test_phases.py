"""Phases of sessions: seconds, and spans of a program's own OpenTelemetry or by OTLP to a
collector."""

import os
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rolltap.trainer import phases
from rolltap.trainer.phases import PhaseClock, send_spans

SEND = """
import logging
from rolltap.trainer.phases import PhaseClock, send_spans

logging.basicConfig()
for name in ("a", "b"):
    clock = PhaseClock("preparing", queued=2.0)
    clock.enter("running")
    clock.enter("")
    send_spans(clock, {"session_id": name, "reward": None})
"""


@pytest.fixture
def clock(monkeypatch):
    """Return a function that sets the time of the machine's clock, in seconds."""
    now = 100.0

    def set_to(seconds):
        nonlocal now
        now = seconds

    monkeypatch.setattr(phases.time, "monotonic_ns", lambda: int(now * 1e9))
    return set_to


def test_a_phase_ends_when_the_next_one_begins_and_may_come_again(clock):
    times = PhaseClock("preparing", queued=3.0, retried=10.0)
    entered = {105: "queued", 106: "running", 120: "queued", 122: "judging", 123: ""}
    for seconds, phase in entered.items():
        clock(seconds)
        times.enter(phase)
    seconds = {"retried": 10, "queued": 3 + 1 + 2, "preparing": 5, "running": 14, "judging": 1}
    assert times.seconds() == pytest.approx(seconds)
    ends = [each.end for each in times.intervals]
    assert [each.begin for each in times.intervals[1:]] == ends[:-1]


@pytest.fixture
def spans(monkeypatch):
    """Return the spans of a program that has set up OpenTelemetry."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    phases._tracer.cache_clear()
    yield exporter
    phases._tracer.cache_clear()


def test_a_session_is_a_span_and_its_phases_are_the_children(clock, spans):
    times = PhaseClock("preparing", queued=1.0)
    clock(104)
    times.enter("running")
    clock(109)
    times.enter("")
    send_spans(times, {"session_id": "s-0", "reward": 0.5, "policy_version": None})
    *children, session = spans.get_finished_spans()
    assert (session.name, session.parent) == ("session", None)
    assert dict(session.attributes) == {"rolltap.session_id": "s-0", "rolltap.reward": 0.5}
    assert {child.parent.span_id for child in children} == {session.context.span_id}
    assert [child.name for child in children] == ["queued", "preparing", "running"]
    begun = [(child.start_time - session.start_time) / 1e9 for child in children]
    assert begun == [0, 1, 5]
    assert session.end_time - session.start_time == 10_000_000_000


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    """Yield a collector that listens. `received` are its requests."""
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.received = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(script, **variables):
    own = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**own, **variables},
        capture_output=True,
        text=True,
        check=True,
    )


def test_spans_go_to_the_place_that_the_usual_variables_name_and_none_is_lost_at_the_end(collector):
    url = f"http://127.0.0.1:{collector.server_port}"
    ended = run(SEND, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_SERVICE_NAME="my-rollout")
    assert ended.stderr == ""
    assert {path for path, _ in collector.received} == {"/v1/traces"}
    services = set()
    sent = Counter()
    for _, request in collector.received:
        for resource in request.resource_spans:
            services.update(each.value.string_value for each in resource.resource.attributes)
            for scope in resource.scope_spans:
                sent.update(span.name for span in scope.spans)
    assert "my-rollout" in services
    assert sent == {"session": 2, "queued": 2, "preparing": 2, "running": 2}


@pytest.mark.parametrize(
    "variables",
    [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}],
    ids=["none", "none", "disabled"],
)
def test_no_span_is_sent_when_nobody_wants_one(collector, variables):
    if variables:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{collector.server_port}"
    assert run(SEND, **variables).stderr == ""
    assert collector.received == []


@pytest.mark.parametrize(
    ("endpoint", "warnings"), [({}, 0), ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, 1)]
)
def test_without_the_extra_sessions_go_on_and_one_warning_names_it(endpoint, warnings):
    script = "import sys\nsys.modules['opentelemetry.sdk.trace'] = None\n" + SEND
    ended = run(script, **endpoint)
    assert ended.stderr.count("no spans are sent") == warnings
    assert ended.stderr.count("[otel]") == warnings
