"""The check of a machine with a GPU, in its small form without one."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT

CHECK = ROOT / "recipes" / "gpu" / "trainer_half.py"


def check(*arguments, **environment):
    return subprocess.run(
        [sys.executable, CHECK, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": "", **environment},
    )


def test_the_small_form_compares_segments_with_whole_rows_and_writes_what_it_found(tmp_path):
    out = tmp_path / "check.json"
    ended = check("--cpu", "--out", out)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text())
    assert [row["model"] for row in found["checks"]] == ["qwen3-tiny", "qwen3.5-tiny"]
    assert all(row["ok"] and row["value"] < 1e-5 for row in found["checks"])
    assert "qwen3.5-tiny" in ended.stdout


def test_without_a_gpu_the_whole_check_says_that_there_is_none(tmp_path):
    ended = check("--out", tmp_path / "check.json")
    assert ended.returncode == 1
    assert "--cpu" in ended.stderr
    assert not list(tmp_path.iterdir())
