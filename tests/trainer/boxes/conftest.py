import pytest

from tests.boxes import require_podman


@pytest.fixture(scope="session")
def podman():
    require_podman()
