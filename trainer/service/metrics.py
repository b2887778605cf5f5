"""Metrics of a service for Prometheus. Counters begin at 0 with the process; gauges are read on
request."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rolltap.addons.errors import EngineError, RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.boxes.environment import PLAIN_HTTP
from rolltap.trainer.rollouts.queue import Phase
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
        # groups and their runner change in this loop; engines and the recorder are asked in a
        # thread
        gauges = self._of_groups()
        gauges += await asyncio.to_thread(self._of_others)
        self._gauges = gauges
        return generate_latest(self._registry)

    def _of_groups(self) -> list[Metric]:
        groups = self._groups
        counts: Mapping[Phase, int] = {}
        of_nodes: Mapping[str, Mapping[Phase, int]] = {}
        if groups.recorded.runner is not None:
            counts = groups.recorded.runner.counts
            of_nodes = groups.recorded.runner.nodes
        what = "Sessions in each phase."
        phases = GaugeMetricFamily("rolltap_phase_sessions", what, labels=["phase"])
        for phase, number in counts.items():
            phases.add_metric([phase], number)
        what = "Sessions of each node of --ray."
        nodes = GaugeMetricFamily("rolltap_node_sessions", what, labels=["node", "phase"])
        for node, counts in of_nodes.items():
            for phase, number in counts.items():
                nodes.add_metric([node, phase], number)
        what = "Sessions of accepted groups to their ends."
        queue = GaugeMetricFamily("rolltap_queue", what, labels=["priority"])
        for priority, number in groups.book.waiting().items():
            queue.add_metric([str(priority)], number)
        what = "Policies that were published."
        policies = GaugeMetricFamily("rolltap_policies", what, len(groups.book.policies))
        return [phases, nodes, queue, policies]

    def _of_others(self) -> list[Metric]:
        gauges: list[Metric] = []
        try:
            load = self._groups.recorded.engines.load()
        except EngineError:
            load = None  # /health says so
        if load is not None:
            for name, value in load._asdict().items():
                what = "Load of the engines; `cache` is a share."
                gauges.append(GaugeMetricFamily(f"rolltap_engine_{name}", what, value))
        lag = self._lag()
        if lag is not None:
            what = "Seconds until the recorder answers."
            gauges.append(GaugeMetricFamily("rolltap_recorder_lag_seconds", what, lag))
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
