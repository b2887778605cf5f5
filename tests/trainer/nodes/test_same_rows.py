"""Sessions on a Ray node have the rows of sessions here, but for names and times."""

import pytest

from tests.boxes import sandboxed
from tests.trainer.cli.program import run_rolltap
from tests.trainer.cli.test_same_rows import arguments, rows

pytest.importorskip("ray", reason="the extra `ray` is not installed")

__all__ = ["arguments"]


@sandboxed
@pytest.mark.deep  # the short suite has a node that dies, with whole groups
def test_sessions_on_a_node_have_the_rows_of_sessions_here(arguments, cluster, tmp_path):
    cluster.add()
    for name, options in {"here": [], "there": ["--ray", cluster.address]}.items():
        ended = run_rolltap(*arguments, "--out", tmp_path / name, "--runtime", "sandbox", *options)
        assert ended.returncode == 0, ended.stderr
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
