"""A training that is killed at any point of a step goes on as if it had not been."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.deep import DEEP
from tests.trainer.training.killed import POINTS, SHORT

ROOT = Path(__file__).resolve().parents[3]


AS_IT_SHOULD = dict.fromkeys(
    [
        "killed",
        "unfinished",
        "ended",
        "batches",
        "weights",
        "sessions",
        "trained",
        "metrics",
        "tidy",
    ],
    True,
)
RESUMED = {
    "0: after writing training.json 1": [0, 1, 2, 3, 4],
    "3: half of scheduler.pt 1": [2, 3, 4],
    "4: before save_finished 1": [],
}
"""Last point of a training -> the steps of the last start."""


def test_a_training_that_was_killed_ends_with_the_batches_and_weights_of_one_that_was_not(tmp_path):
    command = [sys.executable, "-m", "tests.trainer.training.killed", str(tmp_path)]
    points = POINTS
    if not DEEP:
        command.append("short")
        points = SHORT
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    reports = json.loads(process.stdout)
    assert len(reports) == sum(map(len, points.values()))
    wrong = [report for report in reports if report != report | AS_IT_SHOULD]
    assert not wrong, process.stderr
    resumed = {report["points"][-1]: report["resumed"] for report in reports}
    for point, steps in RESUMED.items():
        assert resumed.get(point, steps) == steps
    assert "3: half of scheduler.pt 1" in resumed
