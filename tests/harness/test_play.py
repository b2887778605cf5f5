"""A program that is not installed."""

import pytest

from tests.harness.play import REQUIRED, installed


@pytest.fixture(autouse=True)
def _nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))


@pytest.mark.parametrize(
    ("required", "end"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_a_program_that_is_missing_skips_its_test_or_fails_it_where_all_are_required(
    monkeypatch, required, end
):
    monkeypatch.setenv(REQUIRED, required)
    with pytest.raises(end, match="aider is not installed"):
        installed("aider")


def test_openhands_is_required_only_with_a_python_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.skip.Exception):
        installed("openhands")
    (tmp_path / "versions" / "3.12.4").mkdir(parents=True)
    with pytest.raises(pytest.fail.Exception, match="openhands is not installed"):
        installed("openhands")
