import pytest

from tests.boxes import require_podman


@pytest.fixture
def podman():
    require_podman()
