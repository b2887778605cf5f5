import json
import subprocess
import sys

from tests.bench.recorder import ROOT


def test_it_measures_every_case_of_every_target(tiny_model):
    few = ["--connections", "1", "--connections", "2", "--requests", "2", "--chunks", "3", "--pace", "0.001"]
    command = [sys.executable, "-m", "tests.bench.recorder", "--json", "--model", tiny_model, *few]
    rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)
    assert [(row["reply"], row["connections"], row["target"]) for row in rows] == [
        (reply, connections, target)
        for reply in ("at once", "streamed")
        for connections in (1, 2)
        for target in ("direct", "bare redirect", "recorder")
    ]
    for row in rows:
        assert all(value > 0 for value in row.values() if not isinstance(value, str | None)), row
