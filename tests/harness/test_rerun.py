"""Two versions of a real program, one against the record of the other."""

import os
import subprocess

import pytest

from tests.harness.play import installed
from tests.harness.test_harnesses import greeting

pytestmark = [pytest.mark.harness, pytest.mark.deep]

ASKED = "Write a greeting into greeting.txt, then read it."
OLDER = "@earendil-works/pi-coding-agent@0.86.1"


def test_an_older_version_of_a_program_diverges_where_it_asks_something_else(
    lead, record, run_rerun, workspace, home, tmp_path, monkeypatch
):
    program = installed("pi")
    lead(greeting("pi"))
    record(ASKED, harness=program, keys={})
    subprocess.run(["npm", "install", "--prefix", tmp_path / "older", "--no-audit", "--no-fund", OLDER], check=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'older' / 'node_modules' / '.bin'}:{os.environ['PATH']}")
    ended = run_rerun(program, ASKED, {}, keys={})
    assert ended.returncode == 3
    assert "0 of 3 recorded calls answered" in ended.stderr
    assert "diverged at call 1: the system prompt is another one" in ended.stderr
