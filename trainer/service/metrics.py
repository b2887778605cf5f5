"""Metrics of a service for Prometheus. Counters begin at 0 with the process; gauges are read on
request."""

import asyncio
import time
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rolltap.addons.errors import EngineError, RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.boxes.environment import PLAIN_HTTP
from rolltap.trainer.service.groups import Groups
from rolltap.trainer.traces.ledger import Ledger

_TENTHS = [number / 10 for number in range(11)]
_AGES = [0, 1, 2, 4, 8, 16]


class Metrics(Collector):
    """The metrics of the groups of a service. All names begin with `rolltap_`."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._gauges: list[Metric] = []
        self._registry = CollectorRegistry()
        made: Any = {"namespace": "rolltap", "registry": self._registry}
        ended = "Sessions that have ended, all attempts."
        self._sessions = Counter("sessions", ended, ["status"], **made)
        self._rewards = Histogram("reward", "Rewards of sessions.", buckets=_TENTHS, **made)
        sampled = "Sampled tokens of sessions that have ended."
        self._tokens = Counter("sampled_tokens", sampled, **made)
        left_out = "Of these, tokens that are not trained."
        self._left_out = Counter("left_out_tokens", left_out, ["reason"], **made)
        judging = "Seconds for which a session was judged."
        self._judging = Histogram("judge_seconds", judging, **made)
        age = "Policies published since the one of a session."
        self._age = Histogram("policy_age", age, buckets=_AGES, **made)
        self._registry.register(self)
        groups.recorded.observe = self.observe

    def observe(self, session: Session, judging: float, ledger: Ledger) -> None:
        """Count a session that has ended. `judging` is in seconds."""
        self._sessions.labels(session.status).inc()
        if session.reward is not None:
            self._rewards.observe(session.reward)
        if judging:
            self._judging.observe(judging)
        self._tokens.inc(ledger.sampled)
        for reason, number in ledger.left_out.items():
            self._left_out.labels(reason).inc(number)
        policies = self._groups.book.policies
        published = policies.get(session.policy_version or "", -1)
        self._age.observe(len(policies) - 1 - published)

    def collect(self) -> list[Metric]:
        """Return the gauges as they were read last."""
        return self._gauges

    async def text(self) -> bytes:
        """Return all metrics in Prometheus's format."""
        # groups and their runner change in this loop; others are asked in a thread
        gauges = self._of_groups()
        gauges += await asyncio.to_thread(self._of_others)
        self._gauges = gauges
        return generate_latest(self._registry)

    def _of_groups(self) -> list[Metric]:
        book = self._groups.book
        runner = self._groups.recorded.runner
        phases = _gauge("phase_sessions", "Sessions in each phase.", "phase")
        nodes = _gauge("node_sessions", "Sessions of each node of --ray.", "node", "phase")
        if runner is not None:
            for phase, number in runner.counts.items():
                phases.add_metric([phase], number)
            for node, counts in runner.nodes.items():
                for phase, number in counts.items():
                    nodes.add_metric([node, phase], number)
        queue = _gauge("queue", "Sessions of accepted groups to their ends.", "priority")
        for priority, number in book.waiting().items():
            queue.add_metric([str(priority)], number)
        policies = _gauge("policies", "Policies that were published.")
        policies.add_metric([], len(book.policies))
        return [phases, nodes, queue, policies]

    def _of_others(self) -> list[Metric]:
        gauges: list[Metric] = []
        try:
            load = self._groups.recorded.engines.load()
        except EngineError:
            load = None  # /health says so
        if load is not None:
            for name, value in load._asdict().items():
                gauge = _gauge(f"engine_{name}", "Load of the engines; `cache` is a share.")
                gauge.add_metric([], value)
                gauges.append(gauge)
        lag = self._lag()
        if lag is not None:
            gauge = _gauge("recorder_lag_seconds", "Seconds until the recorder answers.")
            gauge.add_metric([], lag)
            gauges.append(gauge)
        return gauges

    def _lag(self) -> float | None:
        """Return the seconds that the recorder takes to refuse a request without credentials.

        None without an answer.
        """
        started = time.monotonic()
        try:
            proxy = f"http://{self._groups.worker.recorder.proxy('').address}"
            httpx.get(
                "http://session.rolltap/",
                proxy=proxy,
                verify=PLAIN_HTTP,
                trust_env=False,
                timeout=10,
            )
        except (httpx.HTTPError, RecorderError):
            return None
        return time.monotonic() - started


def _gauge(name: str, what: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rolltap_{name}", what, labels=labels)
