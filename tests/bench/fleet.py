"""A fleet of Ray nodes: sessions an hour by their number, the way of a session's rows, and the
queue in virtual time.

The nodes are on this machine, so only sleep can run beside sleep: a session waits for most of its
time, as one does for a GPU elsewhere. The queue is the runner's own, with nodes and sessions that
are numbers.
"""

import heapq
import math
import pickle
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import rolltap
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.names import SessionName
from rolltap.trainer.nodes.rows import Shard, Writer
from rolltap.trainer.rollouts.queue import SessionQueue, Slots
from tests.bench.frame import Rows
from tests.scripted_engine import Say, ScriptedEngine

PROGRAM = """
import json, sys, time, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}]}).encode()
headers = {"content-type": "application/json"}
urllib.request.urlopen(urllib.request.Request("https://api.openai.com/v1/chat/completions", body, headers)).read()
time.sleep(float(sys.argv[1]))
"""


@contextmanager
def cluster(slots: int) -> Iterator[Any]:
    """Yield a cluster whose first node runs no sessions, and a function that adds a node with so
    many slots."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        yield made, lambda: made.add_node(num_cpus=2, resources={"rolltap": slots})
    finally:
        ray.shutdown()
        made.shutdown()


def measure_nodes(model: Path, seconds: float, slots: int) -> dict[str, Rows]:
    """Roll out on 1, 2 and 4 nodes, then write the sessions of such a run one by one."""
    rows: Rows = []
    program = {"program": sys.executable, "headless": ["-I", "-c", PROGRAM, str(seconds)]}
    with cluster(slots) as (made, add), tempfile.TemporaryDirectory() as folder:
        for number in (1, 2, 4):
            while len(made.list_all_nodes()) < number + 1:
                add()
            with ScriptedEngine(AutoTokenizer.from_pretrained(model)) as engine:
                engine.otherwise = lambda request: Say("Done.")
                run = rolltap.rollout(
                    [
                        rolltap.Task(id=f"t{n}", instruction="go", evaluate=["true"])
                        for n in range(4 * number)
                    ],
                    harness=rolltap.Harness(name="timed", **program),
                    engine=engine.url,
                    model=model,
                    out=Path(folder, str(number)),
                    sessions=2 * slots,
                    progress=False,
                    ray=made.address,
                )
            sessions = run.sessions()
            taken = max(each.finished_at for each in sessions) - min(
                each.started_at for each in sessions
            )
            hourly = len(sessions) / taken.total_seconds() * 3600
            rows.append(
                {
                    "nodes": number,
                    "sessions": len(sessions),
                    "sessions an hour": hourly,
                    "of one node": hourly / rows[0]["sessions an hour"] if rows else 1.0,
                    "slots used": hourly * seconds / 3600 / slots / number,
                }
            )
        way = measure_way(Path(folder, "1"), Path(folder, "written"))
    return {
        f"{slots} slots a node, sessions of {seconds} s": rows,
        "the way of a session's rows": way,
    }


def measure_way(run: Path, out: Path) -> Rows:
    """Put the rows of each session into the object store, and have them written by the actor of a
    fleet."""
    import ray

    packages = []
    for session in rolltap.open_run(run).sessions():
        with tempfile.TemporaryDirectory() as folder:
            one = rolltap.open_run(run).filter(
                Path(folder, "one"), session_ids=[session.session_id], progress=False
            )
            packages.append(Shard(one.path).package())
    out.mkdir()
    writer = ray.remote(num_cpus=0)(Writer).remote(str(out))
    ray.get(writer.end_interrupted.remote(""))
    began = time.monotonic()
    for number, package in enumerate(packages, 1):
        assert ray.get(writer.append.remote(ray.put([package]), "node", number, [])) is None
    through = (time.monotonic() - began) / len(packages)
    began = time.monotonic()
    with RunWriter(out.with_name("alone")) as alone:
        alone.run.mkdir()
        for row in rolltap.open_run(run).sessions():
            alone.add_session(row)
    sizes = sorted(len(pickle.dumps(package)) for package in packages)
    return [
        {
            "sessions": len(packages),
            "ms a session": through * 1000,
            "of which a synced row takes": (time.monotonic() - began) / len(packages) * 1000,
            "bytes a session": sizes[len(sizes) // 2],
        }
    ]


def simulate(
    nodes: int = 64, groups: int = 1250, size: int = 8, slots: int = 16, losses: int = 0
) -> Rows:
    """Run sessions in virtual time, on nodes of which one is five times slower, and some are lost
    on the way."""
    draw = random.Random(0)
    queue, clock = SessionQueue(retries=2), 0.0
    names = [f"node-{number:02}" for number in range(nodes)]
    for name in names:
        queue.add_node(name, Slots(slots, 0, slots, slots))
    for number in range(groups):
        queue.submit(f"g{number}", [f"g{number}-{index}" for index in range(size)])
    running: dict[str, str] = {}
    events: list[tuple[float, str]] = []
    over: dict[str, str] = {}
    busy, queued, spent, decisions = 0.0, 0.0, 0.0, 0
    lose = [groups * size * (n + 1) // (losses + 1) for n in range(losses)]
    while True:
        began = time.perf_counter()
        actions = queue.advance(clock)
        for action in actions:
            if action.kind == "prepare":
                queue.prepared(action.session_id)
        actions += queue.advance(clock)
        spent += time.perf_counter() - began
        for _, _, session_id, name in (action for action in actions if action.kind == "run"):
            decisions += 1
            running[session_id] = name
            seconds = draw.lognormvariate(math.log(600), 1) * (5 if name == names[0] else 1)
            heapq.heappush(events, (clock + seconds, session_id))
        due = queue.due()
        if due is None and not events:
            break
        at = min([math.inf if due is None else due, *(event[0] for event in events[:1])])
        if queue.counts["waiting"]:
            busy, queued = (
                busy + len(running) * (at - clock),
                queued + slots * len(set(names)) * (at - clock),
            )
        clock = at
        if events and events[0][0] == at:
            _, session_id = heapq.heappop(events)
            if session_id in running:
                over[SessionName.parse(session_id).place] = running.pop(session_id)
                queue.ended(session_id, clock)
        if lose and len(over) >= lose[0]:
            lose.pop(0)
            gone = draw.choice(names[1:])
            names.remove(gone)
            queue.remove_node(gone)
            for session_id in [each for each, name in running.items() if name == gone]:
                del running[session_id]
                queue.ended(session_id, clock, again=True)
    shares = Counter(over.values())
    alike = sorted(shares[name] for name in names[1:])
    homes: dict[str, set[str]] = {}
    for place, name in over.items():
        homes.setdefault(place.rpartition("-")[0], set()).add(name)
    return [
        {
            "nodes": nodes,
            "lost": losses,
            "sessions": len(over),
            "least of a node": alike[0],
            "most of a node": alike[-1],
            "of the slow one": shares[names[0]],
            "groups on one node": sum(len(each) == 1 for each in homes.values()) / len(homes),
            "slots used while sessions wait": busy / queued,
            "us a decision": spent / decisions * 1e6,
        }
    ]
