"""A service of a module, with a scripted engine that answers everything, and one without
programs."""

from types import SimpleNamespace

import pytest

from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.service.groups import Groups
from rolltap.trainer.service.requests import GroupRequest
from rolltap.trainer.tasks.task import Task
from tests.scripted_engine import ScriptedEngine
from tests.trainer.service.served import program, say_good, serving


@pytest.fixture(scope="module")
def scripted(tokenizer):
    with ScriptedEngine(tokenizer) as engine:
        engine.otherwise = say_good
        yield engine


@pytest.fixture(scope="module")
def service(scripted, tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    with serving(
        folder / "run", scripted.url, tokenizer_folder, program(folder), "--queue", "1000"
    ) as service:
        yield service


@pytest.fixture
async def open_groups(tmp_path):
    """Return a function that opens the groups of a service which runs nothing. It has the group
    `a`."""
    opened = []

    def close():
        while opened:
            opened.pop().journal.close()

    async def open_groups(*, sessions=1, instruction="go", most=9, retries=2):
        close()
        recorder = SimpleNamespace(path=tmp_path, engine="http://127.0.0.1:9")
        worker = SimpleNamespace(recorder=recorder, config=RolloutConfig(retries=retries))
        task = Task(id="words", instruction=instruction, evaluate=["true"])
        groups = Groups(worker, [task], most=most, share=0.5)
        opened.append(groups)
        await groups.load()
        if sessions:
            await groups.submit(GroupRequest(id="a", task="words", sessions=sessions))
        return groups

    yield open_groups
    close()
