import json

import pytest

from rolltap.trainer.engine.engines import Engines
from tests.trainer.engine.acting import acting
from tests.trainer.engine.answering import Answering, serving


@pytest.fixture
def answering():
    with serving(Answering()) as server:
        yield server


@pytest.fixture
def folder(tmp_path):
    """Return a function that makes a folder with a configuration, which can be loaded."""

    def folder(name, **config):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"hidden_size": 8} | config))
        return path

    return folder


@pytest.fixture
def root(folder):
    """Return the folder of the model that engines are started with."""
    return folder("model")


@pytest.fixture
def pair(root):
    with acting(root) as one, acting(root) as two:
        yield one, two


@pytest.fixture
def engines(pair):
    return Engines([each.url for each in pair])
