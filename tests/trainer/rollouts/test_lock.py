import subprocess
import sys

import pytest

from rolltap.addons.errors import RunError
from rolltap.trainer.rollouts.mitmdump import rollout_lock


def test_a_second_rollout_into_a_folder_is_refused_until_the_first_has_ended_or_died(tmp_path):
    run = tmp_path / "run"
    script = (
        "import sys; from pathlib import Path; from rolltap.trainer.rollouts.mitmdump import rollout_lock\n"
        "with rollout_lock(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(RunError, match=f"another rollout or training runs sessions in {run}"), rollout_lock(run):
            pass
        other.kill()
        other.wait()
    for _ in range(2):
        with rollout_lock(run):
            pass
