"""The engine that leads the programs. Its context window fits the longest first prompt."""

import pytest

from rolltap.trainer.doctor.scripted_engine import ScriptedEngine


@pytest.fixture
def scripted_engine(tokenizer):
    with ScriptedEngine(tokenizer, max_model_len=200_000) as engine:
        yield engine
