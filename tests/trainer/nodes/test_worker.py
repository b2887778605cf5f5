"""A fleet of Ray nodes on one machine, with real recorders: nodes and drivers die, and the run is
whole."""

import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import rolltap
import rolltap.types
from rolltap.addons.errors import EngineError, InputError
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.names import SessionName
from rolltap.trainer.nodes.worker import make_worker
from tests.scripted_engine import Say
from tests.trainer.cli.program import ROLLTAP
from tests.trainer.nodes.conftest import SLOTS, left_below, processes_below
from tests.trainer.service.served import GOOD, program, serving

pytest.importorskip("ray", reason="the extra `ray` is not installed")

SESSIONS = 8
TASKS = [rolltap.Task(id=f"task-{number}", instruction="go", evaluate=GOOD) for number in range(10)]


class Gate:
    """Replies that wait from a number of requests on, until the block ends or the gate is
    opened."""

    def __init__(self, engine, first):
        self._asked = 0
        self._changed = threading.Condition()
        self._engine = engine
        self._first = first
        self._open = False
        self._running = None
        engine.otherwise = self.reply

    def reply(self, request):
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            is_held = self._asked > self._first and not self._open
        return Say("good.", hold_after=1 if is_held else None)

    def watch(self, running):
        """Let the end of a rollout end every wait."""
        self._running = running
        running.add_done_callback(self._notice)

    def _notice(self, _):
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, number):
        """Wait until the engine was asked so many times. Raises the error of a rollout that
        failed."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._asked >= number or self._is_over(), 1800)
        if self._is_over():
            self._running.result()

    def _is_over(self):
        return self._running is not None and self._running.done()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.open()

    def open(self):
        self._open = True
        self._engine.release()


def roll_out(cluster, engine, tokenizer_folder, folder, tasks=TASKS, harness=None):
    return rolltap.rollout(
        tasks,
        harness=harness or program(folder),
        engine=engine.url,
        model=tokenizer_folder,
        out=folder / "run",
        ray=cluster.address,
        sessions=SESSIONS,
        concurrency=SLOTS,
        progress=False,
    )


def assert_whole(run, groups, sessions=SESSIONS):
    """Every place of every group has a session with a reward, no row is damaged or twice, and the
    ledger is exact."""
    rows = run.sessions()
    assert len({row.session_id for row in rows}) == len(rows)
    rewarded = Counter(row.group_id for row in rows if row.reward is not None)
    told = [log.read_text() for log in sorted((run.path / "logs").glob("*.log"))]
    assert list(rewarded.values()) == [sessions] * groups, told
    assert len({SessionName.parse(row.session_id).place for row in rows}) == groups * sessions
    kept = {row.session_id for row in rows if row.reward is not None}
    for finding in rolltap.verify_run(run.path).findings:  # a call that ran when its node died
        assert finding.grade == "notice", finding
        assert finding.where.removeprefix("session ").partition(",")[0] not in kept, finding
    calls = [call for calls in run.calls.values() for call in calls]
    assert len({call.call_id for call in calls}) == len(calls)
    ledger = run.summary().ledger
    assert ledger.sampled == sum(len(call.completion_ids or []) for call in calls)
    assert ledger.sampled == ledger.trained + sum(ledger.left_out.values())


def wait_for_begun(run, number):
    """Wait until a run has so many sessions that began."""
    started = 0
    while started < number:
        if (run / "run.json").exists():
            started = sum(row["kind"] == "session_started" for row in read_rows(run, "events"))
        time.sleep(0.05)  # the nodes need the cores


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_a_node_dies_and_another_comes_and_every_group_is_complete(
    cluster, engine, tokenizer_folder, tmp_path, temporary, number, capsys
):
    first, *_ = [cluster.add() for _ in range(number)]
    tasks = TASKS[: 2 * number + 2]
    with ThreadPoolExecutor(1) as pool, Gate(engine, first=SLOTS * number) as gate:
        running = pool.submit(roll_out, cluster, engine, tokenizer_folder, tmp_path, tasks)
        gate.watch(running)
        all_held = 2 * SLOTS * number
        gate.wait_for(all_held)
        wait_for_begun(tmp_path / "run", all_held)  # the driver knows of all that its nodes run
        cluster.kill(first)
        cluster.add()
        # the new node has as many sessions as it may: the others wait for theirs
        gate.wait_for(all_held + SLOTS)
        gate.open()
        run = running.result(timeout=900)
    assert_whole(run, len(tasks))
    lost = [row for row in run.sessions() if row.status == "infrastructure"]
    assert len(lost) >= SLOTS  # and those of the node that had run, and were not judged yet
    assert all("is gone" in row.error for row in lost)
    assert capsys.readouterr().out == ""  # where --json prints
    assert left_below(temporary) == {}


@pytest.mark.deep  # short, a node is killed
def test_nodes_end_with_their_driver_and_the_next_one_completes_the_rollout(
    cluster, engine, tokenizer_folder, tmp_path, temporary
):
    cluster.add()
    tasks = tmp_path / "tasks.jsonl"
    lines = [task.model_dump_json(exclude_defaults=True) for task in TASKS[:2]]
    tasks.write_text("\n".join(lines))
    gate = Gate(engine, first=3)
    options = {
        "--harness": program(tmp_path),
        "--engine": engine.url,
        "--model": tokenizer_folder,
        "--out": tmp_path / "run",
        "--ray": cluster.address,
        "-n": "4",
    }
    command = [ROLLTAP, "rollout", tasks, "--json", *itertools.chain(*options.items())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    killed = subprocess.Popen(command, **pipes, start_new_session=True)
    gate.wait_for(8)  # three may have ended
    (node,) = [each for each in status(cluster) if each["node"] != "driver"]
    assert (node["slots"], node["error"]) == (SLOTS, "")
    assert 5 <= node["phases"]["running"] <= 8
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    gate.open()
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    run = rolltap.open_run(tmp_path / "run")
    assert_whole(run, groups=2, sessions=4)
    assert {row.status for row in run.sessions()} <= {"completed", "cancelled"}
    assert left_below(temporary) == {}
    assert status(cluster) == []


@pytest.mark.deep  # the short suite has a rollout that is killed, above
def test_a_service_that_is_killed_completes_its_groups_on_new_nodes(
    cluster, engine, tokenizer_folder, tmp_path, temporary
):
    cluster.add()
    with Gate(engine, first=0) as gate:
        run = tmp_path / "run"
        how = (run, engine.url, tokenizer_folder, program(tmp_path))
        with serving(*how, "--ray", cluster.address) as service:
            assert service.submit(id="a", sessions=6).status_code == 201
            gate.wait_for(6)
            told = service.client.get("/metrics").text
            running = r'rolltap_node_sessions\{node="\S+/\w{8}",phase="running"\} 6.0'
            assert re.search(running, told), told
            service.kill()
            service.start()
            gate.open()
            events = [(kind, data.get("session_id")) for _, kind, data in service.events_of("a")]
            assert service.stop() == 130
    kinds = Counter(kind for kind, _ in events)
    assert (kinds["accepted"], kinds["ended"]) == (1, 1)
    assert len({SessionName.parse(name).place for kind, name in events if kind == "session"}) == 6
    assert_whole(rolltap.open_run(tmp_path / "run"), groups=1, sessions=6)
    assert left_below(temporary) == {}


def status(cluster):
    """Return what `rolltap fleet status` prints."""
    command = [ROLLTAP, "fleet", "status", "--ray", cluster.address, "--json"]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


@pytest.mark.deep  # the short suite has a node that dies, above
def test_a_recorder_that_dies_costs_its_node_and_the_others_run_its_sessions(
    cluster, engine, tokenizer_folder, tmp_path, temporary
):
    cluster.add()
    cluster.add()
    with ThreadPoolExecutor(1) as pool, Gate(engine, first=4) as gate:
        running = pool.submit(roll_out, cluster, engine, tokenizer_folder, tmp_path, TASKS[:2])
        gate.watch(running)
        gate.wait_for(5)
        wait_for_begun(tmp_path / "run", 2 * SESSIONS)  # each node has some that cannot end
        os.kill(recorders(temporary)[0], signal.SIGKILL)
        gate.open()
        run = running.result(timeout=900)
    assert_whole(run, groups=2)
    rows = run.sessions()
    assert any("died with" in (row.error or "") or row.status != "completed" for row in rows)


def recorders(folder):
    """Return the process ids of the recorders that record below a folder."""
    found = []
    for pid, line in processes_below(folder).items():
        if re.match(r"\S*python\S* \S*mitmdump ", line):
            found.append(pid)
    return found


def test_a_node_without_the_program_is_named_before_a_session_runs(
    cluster, engine, tokenizer_folder, tmp_path
):
    cluster.add()
    harness = tmp_path / "own.toml"
    harness.write_text('name = "own"\nprogram = "only-on-the-driver"\nheadless = []\n')
    missing = r"node \S+/\w{8}: 'only-on-the-driver' is not on the PATH"
    with pytest.raises(InputError, match=missing):
        roll_out(cluster, engine, tokenizer_folder, tmp_path, harness=harness)
    assert engine.requests == []


def test_a_cluster_that_does_not_answer_is_refused(engine, tokenizer_folder, tmp_path):
    nobody = SimpleNamespace(address="127.0.0.1:9")
    with pytest.raises(InputError, match=r"--ray 127.0.0.1:9: .* give the address of a cluster"):
        roll_out(nobody, engine, tokenizer_folder, tmp_path)


def test_a_training_is_refused_when_each_node_would_have_an_engine_of_its_own(
    cluster, engine, tokenizer_folder, tmp_path
):
    cluster.add()
    cluster.add()
    config = rolltap.types.RolloutConfig.of({"ray": cluster.address})
    how = {"engine": engine.url, "model": tokenizer_folder, "out": tmp_path / "run"}
    worker = make_worker(config, publishes=True, harness=program(tmp_path), **how)
    with pytest.raises(InputError, match="give an address that is the same on all nodes"):
        worker.fit(TASKS)


class SlowCluster:
    """A cluster of one node, which answers a minute after it was asked. `now` is every clock."""

    def __init__(self):
        self.now = 1000.0

    def connect(self): ...

    def nodes(self):
        return {"a": None}

    def call_on_all(self, function, arguments):
        self.now += 60.0
        return {"a": function(*arguments("a"))}


def test_a_node_that_answers_late_has_no_other_clock(tmp_path, tokenizer_folder, monkeypatch):
    config = rolltap.types.RolloutConfig.of({"ray": "127.0.0.1:9"})
    how = {"engine": "http://127.0.0.1:9", "model": tokenizer_folder, "out": tmp_path / "run"}
    worker = make_worker(config, harness=program(tmp_path), **how)
    cluster = SlowCluster()
    worker._fleet.cluster = cluster
    monkeypatch.setattr("time.time", lambda: cluster.now)
    with pytest.raises(EngineError, match="no engine answers"):  # the next thing that is asked
        worker.fit(TASKS)
