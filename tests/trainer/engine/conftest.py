import pytest

from tests.trainer.engine.answering import Answering, serving


@pytest.fixture
def answering():
    with serving(Answering()) as server:
        yield server
