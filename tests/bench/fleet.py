"""Measure a fleet of Ray nodes: sessions an hour by their number, and the way of a session's rows.

    python -m tests.bench.fleet

The nodes are on this machine, so only sleep can run beside sleep: a session waits for most of its
time, as one does for a GPU elsewhere.
"""

import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
from transformers import AutoTokenizer

import rolltap
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.nodes.rows import Shard, Writer
from tests.bench.frame import Rows, command, model_option
from tests.scripted_engine import Say, ScriptedEngine

PROGRAM = """
import json, sys, time, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}]}).encode()
headers = {"content-type": "application/json"}
request = urllib.request.Request("https://api.openai.com/v1/chat/completions", body, headers)
urllib.request.urlopen(request).read()
time.sleep(float(sys.argv[1]))
"""


@contextmanager
def cluster(slots: int) -> Iterator[tuple[Any, Callable[[], Any]]]:
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
    headless = ["-I", "-c", PROGRAM, str(seconds)]
    harness = rolltap.Harness(name="timed", program=sys.executable, headless=headless)
    with cluster(slots) as (made, add), tempfile.TemporaryDirectory() as folder:
        for number in (1, 2, 4):
            while len(made.list_all_nodes()) < number + 1:
                add()
            tasks = []
            for name in range(4 * number):
                tasks.append(rolltap.Task(id=f"t{name}", instruction="go", evaluate=["true"]))
            with ScriptedEngine(AutoTokenizer.from_pretrained(model)) as engine:
                engine.otherwise = lambda request: Say("Done.")
                run = rolltap.rollout(
                    tasks,
                    harness=harness,
                    engine=engine.url,
                    model=model,
                    out=Path(folder, str(number)),
                    sessions=2 * slots,
                    progress=False,
                    ray=made.address,
                )
            sessions = run.sessions()
            last = max(session.finished_at for session in sessions)
            taken = last - min(session.started_at for session in sessions)
            row = {"nodes": number, "sessions": len(sessions)}
            row["sessions an hour"] = len(sessions) / taken.total_seconds() * 3600
            rows.append(row)
            row["of one node"] = row["sessions an hour"] / rows[0]["sessions an hour"]
            row["slots used"] = row["sessions an hour"] * seconds / 3600 / slots / number
        way = measure_way(Path(folder, "1"), Path(folder, "written"))
    title = f"{slots} slots a node, sessions of {seconds} s"
    return {title: rows, "the way of a session's rows": [way]}


def measure_way(run: Path, out: Path) -> dict[str, float]:
    """Put the rows of each session into the object store, and have them written by the actor of a
    fleet."""
    import ray

    rows = rolltap.open_run(run).sessions()
    packages = []
    for session in rows:
        with tempfile.TemporaryDirectory() as folder:
            own = {"session_ids": [session.session_id], "progress": False}
            one = rolltap.open_run(run).filter(Path(folder, "one"), **own)
            packages.append(Shard(one.path).package())
    out.mkdir()
    writer = ray.remote(num_cpus=0)(Writer).remote(str(out))
    ray.get(writer.end_interrupted.remote(""))
    began = time.monotonic()
    for number, package in enumerate(packages, 1):
        assert ray.get(writer.append.remote(ray.put([package]), "node", number, [])) is None
    through = time.monotonic() - began
    began = time.monotonic()
    with RunWriter(out.with_name("alone")) as alone:
        alone.run.mkdir()
        for row in rows:
            alone.add_session(row)
    synced = time.monotonic() - began
    return {
        "sessions": len(packages),
        "ms a session": 1000 * through / len(packages),
        "of which a synced row takes": 1000 * synced / len(packages),
        "bytes a session": median(len(pickle.dumps(package)) for package in packages),
    }


@command
@model_option
@click.option("--median", "seconds", default=0.5, help="Seconds of a session.")
@click.option("--slots", default=2, help="Sessions that run at a time on a node.")
def main(model: Path, seconds: float, slots: int) -> dict[str, Rows]:
    """Measure fleets of Ray nodes on this machine."""
    return measure_nodes(model, seconds, slots)


if __name__ == "__main__":
    main()
