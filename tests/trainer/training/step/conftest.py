import os
import random
from importlib.util import find_spec
from pathlib import Path

import pytest

# Before transformers, which takes no package whose import fails: fla warns that there is no GPU.
if find_spec("fla"):
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")

from rolltap.trainer.training.step import linear
from tests.trainer.training.step.tiny import make_trainer, record, tiny_model


def pytest_collection_modifyitems(items):
    """Ignore that peft 0.21 uses a name that transformers 5.23 deprecates."""
    old_name = pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    )
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(old_name)


@pytest.fixture(scope="package")
def model():
    return tiny_model()


@pytest.fixture
def traces(model):
    return record(model, random.Random(0))


@pytest.fixture
def make(model, traces, tmp_path):
    """Return a function that returns a trainer: of `model` on `traces`, unless others are given."""

    def make(source=None, *, of=None, **config):
        if source is None:
            source = traces
        return make_trainer(of or model, tmp_path, source, **config)

    return make


@pytest.fixture
def train(make):
    """Return a function that returns such a trainer after its training."""

    def train(*args, **config):
        trainer = make(*args, **config)
        trainer.train()
        return trainer

    return train


@pytest.fixture
def chunks_of(monkeypatch):
    """Return a function that lets layers compute chunks of so many tokens."""

    def chunks_of(size):
        monkeypatch.setattr(linear, "CHUNK", size)

    return chunks_of
