"""A service whose recorder, engine and own process are killed, and tasks that come with
requests."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import ExitStack

import httpx
import pytest

import rolltap
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.resume import Recorded
from rolltap.trainer.service.requests import GroupRequest
from tests.addons.harness import until
from tests.conftest import free_port
from tests.scripted_engine import Say, ScriptedEngine
from tests.trainer.rollouts.soak import left
from tests.trainer.service.served import (
    GOOD,
    hold,
    program,
    require_refused,
    say_good,
    serving,
)


def answering(tokenizer, **how):
    """Return an engine that answers everything with the word `good`."""
    engine = ScriptedEngine(tokenizer, **how)
    engine.otherwise = say_good
    return engine


@pytest.fixture
def engine(tokenizer):
    with answering(tokenizer) as engine:
        yield engine


@pytest.fixture
def serve(tokenizer_folder, tmp_path):
    """Return a function that serves with engines, to the end of the test."""
    with ExitStack() as stack:

        def serve(urls, *arguments, harness=None):
            harness = harness or program(tmp_path)
            how = (tmp_path / "run", urls, tokenizer_folder, harness, *arguments)
            return stack.enter_context(serving(*how))

        yield serve


@pytest.fixture
def own_service(engine, serve):
    return serve(engine.url)


def test_a_service_that_was_killed_goes_on_and_ends_each_group_once(own_service, engine, tmp_path):
    engine.replies.append(Say("good.", hold_after=1))
    own_service.submit(id="held", sessions=2)
    cursor = own_service.events(until=lambda kind, data: kind == "session")[-1][0]
    engine.holding.wait()
    own_service.kill()
    own_service.start()
    engine.release()
    events = own_service.events(cursor, until=lambda kind, data: kind == "ended")
    assert [kind for _, kind, _ in events] == ["session", "session", "ended"]
    statuses = Counter(data.get("status") for _, _, data in events)
    assert statuses == {"cancelled": 1, "completed": 1, None: 1}
    assert own_service.submit(id="held", sessions=2).status_code == 200
    every = own_service.events()
    assert Counter(kind for _, kind, _ in every) == {"accepted": 1, "session": 3, "ended": 1}
    assert list(every[-1][2]["rewards"].values()) == [1.0, 1.0]
    assert own_service.stop() == 130
    assert "group held: ended, 3 sessions\n" in own_service.said
    rewarded = own_service.said.count(": completed, reward 1\n")
    assert rewarded + own_service.said.count(": cancelled, no reward\n") == 2
    assert left(str(tmp_path)) == {}
    assert rolltap.open_run(own_service.run).verify(progress=False).sound


@pytest.mark.deep
def test_a_group_that_was_accepted_before_the_folder_was_a_run_is_found_again(own_service):
    own_service.submit(id="early", sessions=1)
    own_service.kill()
    assert not (own_service.run / "run.json").exists()
    own_service.start()
    assert list(own_service.events_of("early")[-1][2]["rewards"].values()) == [1.0]


def test_its_health_names_an_engine_that_is_gone_and_groups_wait_for_it(tokenizer, serve):
    with answering(tokenizer) as engine:
        service = serve(engine.url)
        service.complete("before")
    health = httpx.get(f"{service.url}/health", trust_env=False)
    gone = f"the engine at {engine.url} does not answer"
    assert (health.status_code, health.json()["problems"]) == (503, [gone])
    assert service.submit(id="after").status_code == 201
    with answering(tokenizer, port=int(engine.url.rpartition(":")[2])):
        assert service.events_of("after")[-1][2]["state"] == "ended"


def test_deadlines_and_cancels_act_while_no_engine_answers(tokenizer, serve):
    with ScriptedEngine(tokenizer) as engine:
        service = serve(engine.url)
        while service.client.get("/health").json()["problems"]:
            pass
    os.kill(service.recorders()[0], signal.SIGKILL)
    service.submit(id="notices", sessions=1)
    while "does not answer" not in str(service.client.get("/health").json()["problems"]):
        time.sleep(0.01)
    late = next(f"late-{seconds}" for seconds in (1, 10, 100) if submitted(service, seconds))
    assert service.events_of(late)[-1][2]["state"] == "expired"
    service.submit(id="cancelled")
    service.client.delete("/groups/cancelled")
    assert service.events_of("cancelled")[-1][2]["state"] == "cancelled"


def submitted(service, seconds):
    return service.submit_before(f"late-{seconds}", seconds, sessions=1)


FAILS_ONCE = """import pathlib, signal
failed = pathlib.Path({!r})
if failed.exists():
    signal.pause()
failed.touch()
"""


def test_a_group_whose_deadline_stops_a_retry_is_expired(engine, serve, tmp_path):
    failed = tmp_path / "failed"
    service = serve(engine.url, harness=program(tmp_path, FAILS_ONCE.format(str(failed))))
    statuses = []
    for seconds in (2, 8, 32, 128):  # the first deadline before which the first attempt ends
        failed.unlink(missing_ok=True)
        if submitted(service, seconds):
            events = service.events_of(f"late-{seconds}")
            assert events[-1][2]["state"] == "expired"
            statuses += [data.get("status") for _, _, data in events]
        if "infrastructure" in statuses:
            break
    assert "infrastructure" in statuses


def test_it_starts_without_one_engine_of_several_names_it_and_takes_it_up(engine, tokenizer, serve):
    late = answering(tokenizer, port=free_port())
    silent = f"http://127.0.0.1:{late.port}"
    urls = [engine.url, silent]
    places = asyncio.run(names_of(urls))
    service = serve(",".join(urls))
    service.complete("g", sessions=places[engine.url])
    health = service.client.get("/health")
    warning = f"the engine at {silent} does not answer"
    assert health.status_code == 200
    assert health.json() == {"ok": True, "problems": [], "warnings": [warning]}
    with late:
        service.complete("h", sessions=places[silent])
        assert len(late.requests) == len(places[silent])
        assert service.client.get("/health").json()["warnings"] == []


async def names_of(urls):
    """Return engine -> names with which sessions are its own: of the group g the first one's, of h
    the second one's."""
    pool = EnginePool(urls)
    found = {}
    for group, url in zip("gh", urls, strict=True):
        names = [f"s{number}" for number in range(64)]
        found[url] = [name for name in names if pool.of(f"{group}-{name}").url == url][:2]
    await pool.close()
    return found


def test_the_recorder_is_started_again_and_the_group_goes_on(service, scripted):
    hold(scripted)
    service.submit(id="left", sessions=1)
    scripted.holding.wait()
    (recorder,) = service.recorders()
    os.kill(recorder, signal.SIGKILL)
    events = service.events_of("left")
    assert (events[-1][1], list(events[-1][2]["rewards"].values())) == ("ended", [1.0])
    scripted.release()


def test_a_second_service_of_the_folder_is_refused(service):
    first = service.process
    with pytest.raises(RuntimeError, match="another service runs in"):
        service.start()
    service.process = first


POLICY = '{{"kind":"policy","at":"2026-01-01T00:00:00+00:00","version":"{}","adapter":null}}\n'


def test_a_disk_that_was_full_for_an_event_costs_nothing_but_time(service, scripted):
    pad = POLICY.format("v" * 99)
    service.stop()
    with (service.run / "service.jsonl").open("a") as journal:
        journal.write(pad * 4_000)  # no other file gets so large
    service.start()
    hold(scripted)
    service.submit(id="held", sessions=1)
    scripted.holding.wait()
    full = (service.run / "service.jsonl").stat().st_size
    pid = service.process.pid
    _, unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
    scripted.release()
    while "File too large" not in "".join(service.client.get("/health").json()["problems"]):
        time.sleep(0.01)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
    kinds = [kind for _, kind, _ in service.events_of("held")]
    assert kinds == ["accepted", "session", "ended"]


def test_a_client_that_never_reads_costs_bounded_memory(service):
    head = (service.run / "service.jsonl").read_text()
    service.stop()
    line = POLICY.format("v" * 900)
    (service.run / "service.jsonl").write_text(head + line * 40_000)
    service.start()

    def resident() -> int:
        status = subprocess.check_output(["ps", "-o", "rss=", "-p", str(service.process.pid)])
        return int(status) // 1024

    before = resident()
    with ExitStack() as stack:
        for _ in range(16):
            stream = stack.enter_context(service.client.stream("GET", "/events"))
            assert stream.headers["content-type"].startswith("text/event-stream")
        service.submit(id="beside", sessions=1)
        assert service.client.get("/service").status_code == 200
        assert resident() - before < 100  # MiB; what they have not read are 16 x 38
    assert service.client.get("/service").status_code == 200


REACHING = {
    "workspace": {"workspace": "/etc"},
    "files": {"files": {"x": "/etc/passwd"}},
    "image": {"image": "/"},
    "judge": {"judge": {"kind": "command", "command": GOOD, "mounts": {"/x": "/etc"}}},
    "judge.kind": {"judge": {"kind": "python", "function": "os:system"}},
    "judge.key_env": {
        "judge": {"kind": "llm", "rubric": "r", "url": "http://x/v1", "model": "m", "key_env": "K"}
    },
}


@pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: tests/run.sh installs it"
)
def test_a_task_of_a_client_runs_in_a_box_and_reaches_no_file_of_the_machine(engine, serve):
    own = {"id": "own", "instruction": "go", "evaluate": GOOD}
    service = serve(engine.url, "--runtime", "sandbox")
    assert service.complete("a", sessions=1, task=own)[-1][2]["rewards"] == {"a-0": 1.0}
    other = service.submit(id="b", sessions=1, task={**own, "instruction": "other"})
    require_refused(other, 409, "was another task before")
    for name, reaching in REACHING.items():
        task = {**own, "id": name, **reaching}
        if "judge" in reaching:
            del task["evaluate"]
        require_refused(service.submit(task=task), 422, f"'{name}'")
    service.kill()
    service.start()
    assert service.complete("c", sessions=1, task=own)[-1][2]["rewards"] == {"c-0": 1.0}


def hold_disk(groups):
    """Let the events of the journal wait. Return what lets them go on."""
    slow_disk = threading.Event()
    groups.journal._thread.submit(slow_disk.wait)
    return slow_disk


async def test_nothing_is_told_of_a_group_after_its_end(open_groups):
    groups = await open_groups()
    result = asyncio.get_running_loop().create_future()
    result.set_result([])
    slow_disk = hold_disk(groups)
    ending = asyncio.create_task(groups.recorded._end("a", result))
    for _ in range(9):  # turns of the loop: its event waits for the disk
        await asyncio.sleep(0)
    cancelling = asyncio.create_task(groups.cancel("a"))
    await asyncio.sleep(0)
    slow_disk.set()
    await asyncio.gather(ending, cancelling)
    assert [event["kind"] for _, event in groups.journal.read()] == ["accepted", "ended"]
    assert groups.view("a").state == "ended"


async def test_failures_before_a_kill_are_retries_after_it(open_groups):
    groups = await open_groups(sessions=3)
    failed = ["a-0", "a-0~1", "a-1", "a-1~1", "a-1~2"]
    rows = [Session(session_id=name, group_id="a", status="infrastructure") for name in failed]
    groups.book.open["a"].known = dict.fromkeys(failed, "infrastructure")
    submitted = []

    class Runner:
        async def submit(self, group, *, retries_used, **_):
            submitted.append((group.session_ids, retries_used))
            ended = asyncio.get_running_loop().create_future()
            ended.cancel()
            return ended

    groups.recorded.runner = Runner()
    await groups.recorded.start("a", Recorded(rows))
    await asyncio.gather(*groups.recorded._work)
    assert submitted == [(["a-0~2", "a-2"], {"a-0~2": 2, "a-2": 0})]


async def test_a_group_that_comes_while_the_runner_starts_is_run_once(open_groups):
    groups = await open_groups(sessions=0)
    slow_disk = hold_disk(groups)
    submitting = asyncio.create_task(groups.submit(GroupRequest(id="a", task="words", sessions=1)))
    await until(groups.book.changes.locked)
    running = asyncio.create_task(groups.recorded.run())
    await until(lambda: groups.book.changes._waiters)
    slow_disk.set()
    await submitting
    await until(lambda: running.done() or groups.recorded.runner is not None)
    await until(lambda: running.done() or groups.recorded.runner.counts["waiting"])
    assert not running.done()
    over = groups.book.open["a"].over
    await groups.cancel("a")
    await over.wait()
    assert groups.view("a").state == "cancelled"
    running.cancel()
    await asyncio.wait([running])
