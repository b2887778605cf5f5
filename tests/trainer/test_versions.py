import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.versions import Version


@given(st.from_regex(r"[0-9a-f]{8}", fullmatch=True), st.integers(0), st.integers(0))
def test_a_version_is_read_back_from_its_name(run, step, attempt):
    version = Version(run, step, attempt)
    assert Version.parse(str(version)) == version


@pytest.mark.parametrize(
    "name", ["default", "", "7", "1a2b3c4d.7", "1A2B3C4D.7.0", "1a2b3c4d.7.0.0", "1a2b3c4d.07.0", "1a2b3c4d.7.0\n"]
)
def test_names_of_other_weights_are_no_version(name):
    assert Version.parse(name) is None
