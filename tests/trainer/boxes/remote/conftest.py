import secrets
from pathlib import Path

import pytest

from rolltap.trainer.boxes.remote.harbor import HarborRuntime
from tests.boxes import NO_SANDBOX, spec_in
from tests.harbor import PYTHON, folder_environment, require_harbor
from tests.machines import SshMachine

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def machine(tmp_path):
    if NO_SANDBOX:
        pytest.skip(NO_SANDBOX)
    return SshMachine(tmp_path / "machine")


@pytest.fixture
def harbor(tmp_path, monkeypatch):
    """Return a function that makes a runtime of Harbor with the tests' own environments, which are
    below the folder `boxes`."""
    require_harbor()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def harbor(**settings):
        environment = folder_environment(tmp_path / "boxes", **settings)
        return HarborRuntime(PYTHON, environment, "recorder.example:8443")

    return harbor


@pytest.fixture
def harbor_spec(tmp_path):
    """Return a function that makes a box of an image for Harbor, with a name of its own."""

    def harbor_spec(image="image", **fields):
        name = f"rolltap-{secrets.token_hex(4)}"
        return spec_in(tmp_path, image=image, name=name, **fields)

    return harbor_spec
