"""The stage of sessions of a shell script, for tests of one session and of the scheduler."""

import shlex
import sys
from pathlib import Path

from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.rollouts.config import RolloutConfig
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.session import Stage
from tests.trainer.cli.program import ASK

ONE_CALL_TEXT = ASK.replace("sys.exit(3)", "")
ONE_CALL = shlex.join([sys.executable, "-c", ONE_CALL_TEXT])
"""A command that makes one model call and exits with 0."""


def stage_of(
    recorder: Recorder, work: Path, harness: str | Harness, runtime: Runtime | None = None, **settings
) -> Stage:
    """Return a stage of two sessions at a time without retries. `harness` is one, or the script of one that is `sh`."""
    if isinstance(harness, str):
        harness = Harness(name="sh", version="1", program="sh", headless=["-c", harness])
    config = RolloutConfig.of({"concurrency": 2, "timeout": 60, "retries": 0, **settings})
    return Stage.of(config, harness, runtime or ProcessRuntime(), recorder, work)
