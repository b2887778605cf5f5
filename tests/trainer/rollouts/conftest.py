"""One recorder, in front of an engine that answers everything, for the tests of a module."""

import pytest

from rolltap.trainer.rollouts.recorder import Recorder
from tests.scripted_engine import Say, ScriptedEngine


@pytest.fixture(scope="module")
def engine(tokenizer):
    with ScriptedEngine(tokenizer) as engine:
        engine.otherwise = lambda request: Say("Hi.")
        yield engine


@pytest.fixture(scope="module")
def recorder(engine, tmp_path_factory, tokenizer_folder):
    with Recorder(
        tmp_path_factory.mktemp("run"), engine=engine.url, model=tokenizer_folder
    ) as recorder:
        yield recorder
