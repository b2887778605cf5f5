"""A Ray cluster of nodes on this machine, and an engine that holds its replies until it is
released."""

import os
import select
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rolltap.trainer.nodes import fleet as fleet_module
from tests.boxes import wait_until_dead
from tests.scripted_engine import Say, ScriptedEngine
from tests.trainer.nodes.local import local_fleet

SLOTS = 8
"""Sessions that run at once on a node."""


class Nodes:
    """A cluster. The first node has no slots for sessions: it is the driver's."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        health = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 300,
            "health_check_timeout_ms": 120_000,
        }
        head = {
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": 80 << 20,
            "_system_config": health,
        }
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self.cluster.address
        self.added = []

    def add(self, slots=SLOTS):
        """Add a node that runs so many sessions at once."""
        node = self.cluster.add_node(
            num_cpus=1, resources={"rolltap": slots}, object_store_memory=80 << 20
        )
        self.added.append(node)
        return node

    def kill(self, node):
        """Kill a node with all that runs on it, as a machine that loses its power, and wait for the
        end of all."""
        own = [info.process.pid for infos in node.all_processes.values() for info in infos]
        killed = {}
        # stopped first, so that none starts a further one or notes the end of another
        while new := [pid for pid in processes_of(own) if pid not in killed]:
            for pid in new:
                with suppress(ProcessLookupError):
                    killed[pid] = os.pidfd_open(pid)
                    signal.pidfd_send_signal(killed[pid], signal.SIGSTOP)
        for process in killed.values():
            signal.pidfd_send_signal(process, signal.SIGKILL)
        for process in killed.values():
            select.select([process], [], [])
            os.close(process)
        self.cluster.remove_node(node, allow_graceful=False)
        self.added.remove(node)


@pytest.fixture(scope="module")
def temporary():
    """Let nodes have their folders where the tests see what they leave. Its path is short: sockets
    lie in it."""
    with (
        TemporaryDirectory(prefix="fleet-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        yield folder


@pytest.fixture(scope="module")
def head(temporary):
    import ray

    made = Nodes()
    yield made
    ray.shutdown()
    made.cluster.shutdown()


@pytest.fixture
def cluster(head):
    yield head
    for node in head.added:
        head.cluster.remove_node(node)
    head.added.clear()


@pytest.fixture
def engine(tokenizer):
    with ScriptedEngine(tokenizer) as engine:
        engine.otherwise = lambda request: Say("good.")
        yield engine


def processes_of(roots):
    """Return the ids of processes, and of all that they and their children started."""
    children = defaultdict(list)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(pid))
    found = list(roots)
    for pid in found:
        found += children[pid]
    return found


def processes_below(folder):
    """Return process id -> command line, of the processes that name a folder, Ray's own aside."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            line = command.replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line and "/ray/" not in line:
                found[int(pid)] = line
    return found


def left_below(folder):
    """Return the `processes_below` a folder that do not end: a recorder takes its time."""
    return {pid: line for pid, line in processes_below(folder).items() if not wait_until_dead(pid)}


@pytest.fixture
def at_once(monkeypatch):
    """Return a function of a module and a name of it: that time is 0 from now on, or as given."""

    def at_once(module, name, seconds=0.0):
        monkeypatch.setattr(module, name, seconds)

    return at_once


@pytest.fixture
def make_fleet(tmp_path, monkeypatch, at_once):
    """Return a function that makes a fleet of local nodes, which is not open."""

    def make_fleet(*names):
        at_once(fleet_module, "UNAVAILABLE_SECONDS")
        return local_fleet(tmp_path / "run", monkeypatch, names or ["a"])

    return make_fleet


@pytest.fixture
async def fleet(make_fleet):
    """Yield a fleet of the node `a`."""
    made = make_fleet()
    await made.open()
    yield made
    await made.close()
