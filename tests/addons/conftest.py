import warnings
from functools import partial
from pathlib import Path

import pytest

from rolltap.addons.engine import pool
from rolltap.addons.engine.client import Engine
from rolltap.addons.prompts.rendering import Rendering
from tests.addons.harness import recording
from tests.scripted_engine import Say

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
    import mitmproxy.addons  # noqa: F401 - its dependencies use deprecated names, and tests turn warnings into errors

TEMPLATE = Path(__file__).resolve().parents[2] / "recipes/quickstart/chat_template.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


@pytest.fixture(scope="session")
def rendering(tokenizer_folder):
    return Rendering(str(tokenizer_folder))


@pytest.fixture(scope="session")
def encode(tokenizer):
    """Return a function from text to token ids."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def events():
    """Return the list to which an addon under test records its events."""
    return []


@pytest.fixture
async def harness(rendering, scripted_engine, tmp_path):
    """Yield a client of an endpoint behind the scripted engine, which says "Hi.". It waits for no
    engine that fails."""
    scripted_engine.otherwise = lambda request: Say("Hi.")
    async with recording(rendering, tmp_path, scripted_engine.url) as client:
        yield client


@pytest.fixture
def restart(rendering, scripted_engine, tmp_path):
    """Return a function that starts a recorder of the same run with these options. It is killed at
    the end."""
    return partial(recording, rendering, tmp_path, scripted_engine.url, killed=True)


@pytest.fixture
def patient(harness, monkeypatch):
    """Return a harness whose calls retry a failed engine without a pause."""
    monkeypatch.setattr(pool, "FIRST_PAUSE_SECONDS", 0)
    harness.endpoint.engines.patience = 60.0
    return harness


@pytest.fixture
async def connect():
    """Yield a function that returns a client of an engine. It is closed after the test."""
    clients = []

    def connect(*arguments, **fields):
        clients.append(Engine(*arguments, **fields))
        return clients[-1]

    yield connect
    for client in clients:
        await client.close()
