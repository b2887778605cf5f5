"""Metrics of a service for Prometheus. Counters begin at 0 with the process; gauges are read on request."""

import asyncio
import time
from collections.abc import Iterator
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


class Metrics(Collector):
    """The metrics of the groups of a service. All names begin with `rolltap_`."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._gauges: list[Metric] = []
        self._registry = CollectorRegistry()
        made: Any = {"namespace": "rolltap", "registry": self._registry}
        self._sessions = Counter("sessions", "Sessions that have ended, all attempts.", ["status"], **made)
        self._rewards = Histogram("reward", "Rewards of sessions.", buckets=[n / 10 for n in range(11)], **made)
        self._tokens = Counter("sampled_tokens", "Sampled tokens of sessions that have ended.", **made)
        self._left_out = Counter("left_out_tokens", "Of these, tokens that are not trained.", ["reason"], **made)
        self._judging = Histogram("judge_seconds", "Seconds for which a session was judged.", **made)
        ages = [0, 1, 2, 4, 8, 16]
        self._age = Histogram("policy_age", "Policies published since the one of a session.", buckets=ages, **made)
        self._registry.register(self)
        groups.observe = self.observe

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
        policies = self._groups.policies
        self._age.observe(len(policies) - 1 - policies.get(session.policy_version or "", -1))

    def collect(self) -> list[Metric]:
        """Return the gauges as they were read last."""
        return self._gauges

    async def text(self) -> bytes:
        """Return all metrics in Prometheus's format."""
        # groups and their schedule change in this loop; engines and the recorder are asked in a thread
        gauges = list(self._of_groups())
        gauges += await asyncio.to_thread(self._of_others)
        self._gauges = gauges
        return generate_latest(self._registry)

    def _of_groups(self) -> Iterator[Metric]:
        groups = self._groups
        phases = GaugeMetricFamily(
            "rolltap_phase_sessions", "Sessions in each phase of the schedule.", labels=["phase"]
        )
        for phase, number in groups.schedule.counts.items() if groups.schedule else ():
            phases.add_metric([phase], number)
        yield phases
        nodes = GaugeMetricFamily("rolltap_node_sessions", "Sessions of each node of --ray.", labels=["node", "phase"])
        for node, counts in groups.schedule.nodes.items() if groups.schedule else ():
            for phase, number in counts.items():
                nodes.add_metric([node, phase], number)
        yield nodes
        queue = GaugeMetricFamily("rolltap_queue", "Sessions of accepted groups to their ends.", labels=["priority"])
        for priority, number in groups.waiting().items():
            queue.add_metric([str(priority)], number)
        yield queue
        yield GaugeMetricFamily("rolltap_policies", "Policies that were published.", len(groups.policies))

    def _of_others(self) -> list[Metric]:
        gauges: list[Metric] = []
        try:
            for name, value in self._groups.engines.load()._asdict().items():
                name = f"rolltap_engine_{name}"
                gauges.append(GaugeMetricFamily(name, "Load of the engines; `cache` is a share.", value))
        except EngineError:
            pass  # /health says so
        lag = self._lag()
        if lag is not None:
            gauges.append(GaugeMetricFamily("rolltap_recorder_lag_seconds", "Seconds until the recorder answers.", lag))
        return gauges

    def _lag(self) -> float | None:
        """Return the time that the recorder takes to refuse a request without credentials; None without an answer."""
        started = time.monotonic()
        try:
            address = self._groups.worker.recorder.proxy("").address
            proxy = f"http://{address}"
            httpx.get("http://session.rolltap/", proxy=proxy, verify=PLAIN_HTTP, trust_env=False, timeout=10)
        except (httpx.HTTPError, RecorderError):
            return None
        return time.monotonic() - started
