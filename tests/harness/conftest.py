"""The engine that leads the programs, with a window in which the longest first prompt fits."""

import pytest

from tests.scripted_engine import ScriptedEngine


@pytest.fixture
def scripted_engine(tokenizer):
    with ScriptedEngine(tokenizer, max_model_len=200_000) as engine:
        yield engine
