import pytest

from tests.addons.prompts.talks import Session


@pytest.fixture
def session(rendering, encode):
    return Session(rendering, encode)
