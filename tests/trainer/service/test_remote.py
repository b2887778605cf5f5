"""Groups of a training that a service runs."""

import json
import re

import pytest

from rolltap.errors import InputError
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.names import Version
from rolltap.trainer.service.remote import RemoteWorker
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.training.steps import placed, step_group

OPTIONS = {"rolltap_sampling": json.dumps({"temperature": 0.5})}


def worker_of(service, scripted, **other):
    how = {"harness": str(service.run.parent / "harness.toml"), "engine": scripted.url, "out": service.run}
    return RemoteWorker(service.url, **{**how, "options": OPTIONS, **other})


async def run(worker, group, told):
    async with worker.runner(lambda *what: told.append(what[1:])) as runner:
        return await (await runner.submit(group))


@pytest.fixture
def tasks(service):
    return load_tasks(service.run.parent / "tasks.jsonl")


def test_a_step_gets_its_sessions_and_the_next_start_finds_them(service, scripted, tasks):
    worker = worker_of(service, scripted)
    assert worker.fit(tasks) == tasks
    told = []
    group = step_group(Version("0a1b2c3d", 2, 0), 0, tasks[0], 2)
    with worker:
        sessions = run_blocking(run(worker, group, told))
    assert {session.session_id: session.reward for session in sessions} == dict.fromkeys(group.session_ids, 1.0)
    assert told[-1] == (1, 1)
    assert {call["sampling_params"]["temperature"] for call in scripted.requests[-2:]} == {0.5}
    asked = len(scripted.requests)
    later = step_group(Version("0a1b2c3d", 2, 5), 0, tasks[0], 2)
    again = run_blocking(run(worker, later, []))
    assert {name: session.session_id for name, session in placed(later, again).items()} == dict(
        zip(later.session_ids, group.session_ids, strict=True)
    )
    assert len(scripted.requests) == asked


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"out": "elsewhere"}, "has the run folder"),
        ({"engine": "http://127.0.0.1:1"}, "has the engines"),
        ({"harness": "pi"}, "has the harness small, and the training pi"),
        ({"options": {**OPTIONS, "rolltap_routing": "true"}}, "has the options {'rolltap_routing': None}"),
    ],
)
def test_a_service_that_does_something_else_is_refused(service, scripted, tasks, tmp_path, what, message):
    if "out" in what:
        (tmp_path / "service.token").write_text(service.token)
        what = {"out": tmp_path}
    with pytest.raises(InputError, match=re.escape(message)):
        worker_of(service, scripted, **what).fit(tasks)


def test_a_task_that_the_service_does_not_have_as_it_is_is_refused(service, scripted, tasks):
    with pytest.raises(InputError, match="has not the task 'words' as it is: restart it"):
        worker_of(service, scripted).fit([tasks[0].model_copy(update={"instruction": "other"})])


def test_a_seed_of_the_service_would_bias_the_loss(service, scripted, tasks, monkeypatch):
    worker = worker_of(service, scripted)
    said = worker._client.service()
    options = {**said["options"], "rolltap_sampling": '{"seed": 3, "top_p": 0.5}'}
    monkeypatch.setattr(worker._client, "service", lambda: {**said, "options": options})
    with pytest.raises(InputError, match="has the seed 3, and the training None"):
        worker.fit(tasks)
