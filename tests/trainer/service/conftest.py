"""A service of a module, with a scripted engine that answers everything."""

import pytest

from tests.scripted_engine import Say, ScriptedEngine
from tests.trainer.service.served import program, serving


@pytest.fixture(scope="module")
def scripted(tokenizer):
    with ScriptedEngine(tokenizer) as engine:
        engine.otherwise = lambda request: Say("good.")
        yield engine


@pytest.fixture(scope="module")
def service(scripted, tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    with serving(
        folder / "run", scripted.url, tokenizer_folder, program(folder), "--queue", "1000"
    ) as service:
        yield service
