import pytest

from rolltap.addons.store.metadata import write_metadata


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run without rows."""
    write_metadata(tmp_path, {"model": "tiny"})
    return tmp_path
