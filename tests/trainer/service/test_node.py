"""Groups of a training that a service runs."""

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import pytest

import rolltap
from rolltap.addons.options import RecordedFrom
from rolltap.errors import InputError, ServiceError
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.names import Version
from rolltap.trainer.rollouts.node import SessionAttempt
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.service.node import ServiceNode, ServiceWorker
from rolltap.trainer.service.requests import GroupView, SessionView
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.training.steps import fork_group, placed, step_group
from tests.factories import write_run
from tests.scripted_engine import Say
from tests.trainer.service.served import TWO_CALLS, hold, program, serving

OPTIONS = {"rolltap_sampling": json.dumps({"temperature": 0.5})}


START = "0a1b2c3d"


@pytest.fixture
def worker_of(service, scripted):
    """Return a function that makes a training's worker at the service."""

    def worker_of(**other):
        harness = str(service.run.parent / "harness.toml")
        how = {"harness": harness, "engine": scripted.url, "out": service.run, "options": OPTIONS}
        return ServiceWorker(service.url, **{**how, **other})

    return worker_of


@pytest.fixture
def worker(worker_of):
    return worker_of()


@pytest.fixture(scope="module")
def service(scripted, tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    harness = program(folder, TWO_CALLS)
    with serving(folder / "run", scripted.url, tokenizer_folder, harness) as service:
        yield service


async def run(worker, group, advance=lambda *_: None):
    async with worker.runner(advance) as runner:
        return await (await runner.submit(group))


@pytest.fixture
def tasks(service):
    return load_tasks(service.run.parent / "tasks.jsonl")


def test_a_step_gets_its_sessions_and_the_next_start_finds_them(worker, scripted, tasks):
    assert worker.fit(tasks) == tasks
    steps = []

    def advance(line, done, total):
        steps.append((done, total))

    group = step_group(Version(START, 2, 0), 0, tasks[0], 2)
    with worker:
        sessions = run_blocking(run(worker, group, advance))
    rewards = {session.session_id: session.reward for session in sessions}
    assert rewards == dict.fromkeys(group.session_ids, 1.0)
    assert steps[-1] == (2, 2)
    assert {call["sampling_params"]["temperature"] for call in scripted.requests[-2:]} == {0.5}
    asked = len(scripted.requests)
    later = step_group(Version(START, 2, 5), 0, tasks[0], 2)
    found = placed(later, run_blocking(run(worker, later)))
    assert [found[name].session_id for name in later.session_ids] == [*group.session_ids]
    assert len(scripted.requests) == asked


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"out": "elsewhere"}, "has the run folder"),
        ({"engine": "http://127.0.0.1:1"}, "has the engines"),
        ({"harness": "pi"}, "has the harness small, and the training pi"),
        (
            {"options": {**OPTIONS, "rolltap_routing": "true"}},
            "has the options {'rolltap_routing': None}",
        ),
    ],
)
def test_a_service_that_does_something_else_is_refused(
    service, worker_of, tasks, tmp_path, what, message
):
    if "out" in what:
        (tmp_path / "service.token").write_text(service.token)
        what = {"out": tmp_path}
    with pytest.raises(InputError, match=re.escape(message)):
        worker_of(**what).fit(tasks)


def test_a_task_that_the_service_does_not_have_as_it_is_is_refused(worker, tasks):
    with pytest.raises(InputError, match="has not the task 'words' as it is: restart it"):
        worker.fit([tasks[0].model_copy(update={"instruction": "other"})])


def test_a_seed_of_the_service_would_bias_the_loss(worker, tasks):
    said = worker._client.service()
    options = {**said["options"], "rolltap_sampling": '{"seed": 3, "top_p": 0.5}'}
    worker._client.service = lambda: {**said, "options": options}
    with pytest.raises(InputError, match="has the seed 3, and the training None"):
        worker.fit(tasks)


def test_an_evaluation_is_recorded_apart_with_its_own_sampling(service, worker, scripted, tasks):
    group = step_group(Version(START, 3, 0), 0, tasks[0], 1, EVALUATION)
    group = replace(group, evaluates=True, sampling={"top_p": 0.25})
    with worker:
        (session,) = run_blocking(run(worker, group))
    assert (session.session_id, session.reward) == (*group.session_ids, 1.0)
    sampling = scripted.requests[-1]["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"]) == (0.5, 0.25)
    evaluation = rolltap.open_run(service.run / EVALUATION)
    assert [each.session_id for each in evaluation.sessions()] == [*group.session_ids]


def test_forks_repeat_the_session_up_to_their_call(service, worker, scripted, tasks):
    version = Version(START, 4, 0)
    source = step_group(version, 0, tasks[0], 1)
    with worker:
        run_blocking(run(worker, source))
        calls = rolltap.open_run(service.run).calls[source.session_ids[0]]
        last = max(call.started_at for call in calls)
        recorded = RecordedFrom(service.run, source.session_ids[0], last)
        forks = fork_group(version, tasks[0], 2, recorded)
        asked = len(scripted.requests)
        sessions = run_blocking(run(worker, forks))
    assert {session.session_id for session in sessions} == {*forks.session_ids}
    assert len(scripted.requests) == asked + 2


def test_a_session_whose_weights_are_too_old_is_stopped_there(worker, scripted, tasks):
    group = step_group(Version(START, 5, 0), 0, tasks[0], 1)

    async def stop():
        told = asyncio.Event()
        async with worker.runner(lambda *_: told.set()) as runner:
            result = await runner.submit(group)
            await asyncio.to_thread(scripted.holding.wait)
            while not runner.running_versions():
                told.clear()
                await told.wait()
            runner.cancel_running(lambda version: version == "default", "too old")
            return await result

    hold(scripted, Say("good."))
    with worker:
        (session,) = run_blocking(stop())
    scripted.release()
    assert (session.session_id, session.status) == (*group.session_ids, "cancelled")


def test_sessions_go_on_when_the_training_ends_and_the_next_start_gets_them(
    service, worker, scripted, tasks
):
    group = step_group(Version(START, 6, 0), 0, tasks[0], 1)

    async def leave():
        async with worker.runner(lambda *_: None) as runner:
            await runner.submit(group)
            await asyncio.to_thread(scripted.holding.wait)
            raise asyncio.CancelledError

    hold(scripted, Say("good."))
    with worker, suppress(asyncio.CancelledError):
        run_blocking(leave())
    view = service.view(group.group_id)
    assert (view["state"], view["sessions"]) == ("open", [])
    scripted.release()
    with worker:
        (session,) = run_blocking(run(worker, group))
    assert (session.session_id, session.status) == (*group.session_ids, "completed")


def test_a_group_that_the_service_refuses_ends_the_runner_with_its_message(worker, tasks):
    unknown = tasks[0].model_copy(update={"id": "nowhere"})
    group = step_group(Version(START, 7, 0), 0, unknown, 2)
    with worker, pytest.raises(ServiceError, match="'nowhere', which is not loaded"):
        run_blocking(run(worker, group))


class Ended:
    """A client of a service at which each group has ended, with so many sessions."""

    url = "http://service"

    def __init__(self, told):
        self.told = told

    async def submit(self, task, *, id, sessions, **_):
        names = [f"{id}-{name}" for name in sessions]
        ended = [SessionView(session_id=name, status="cancelled") for name in names]
        self.view = GroupView(
            id=id,
            task_id=task,
            state="ended",
            accepted_at=datetime.now(UTC),
            session_ids=names,
            sessions=ended[: self.told],
            run="run",
        )
        return self.view

    async def wait(self, name):
        return self.view


@pytest.mark.parametrize(
    ("told", "evaluates", "recorded"),
    [(1, False, True), (0, False, False), (0, True, False)],
    ids=["a row is not written yet", "no session began", "no evaluation began"],
)
async def test_a_session_without_a_recorded_row_has_none(tmp_path, told, evaluates, recorded):
    if recorded:  # after a kill the recorder has not written the row of what it interrupted
        write_run(tmp_path)
    task = Task(id="words", instruction="go", evaluate=["true"])
    group = replace(step_group(Version(START, 8, 0), 0, task, 1), evaluates=evaluates)
    attempt = SessionAttempt(group.session_ids[0], group)

    async def enter(phase): ...

    await ServiceNode(Ended(told), tmp_path, {}).run(attempt, enter)
    assert attempt.row is None
