from functools import partial

import pytest

from tests.addons.harness import recording
from tests.scripted_engine import Say, ScriptedEngine


@pytest.fixture
def one(scripted_engine):
    """Return an engine that says "Hi."."""
    scripted_engine.otherwise = lambda request: Say("Hi.")
    return scripted_engine


@pytest.fixture
def two(tokenizer):
    with ScriptedEngine(tokenizer) as engine:
        engine.otherwise = lambda request: Say("Hi.")
        yield engine


@pytest.fixture
def recorded(rendering, tmp_path):
    return partial(recording, rendering, tmp_path)
