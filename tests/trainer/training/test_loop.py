"""The online loop on real parts."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from rolltap.trainer import cli
from rolltap.trainer.engine.publish import CheckpointPublisher
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from rolltap.trainer.training.attempts import TRAINING_FILE
from rolltap.trainer.training.recipe import FINISHED

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart"


def write_recipe(folder: Path, text: str = "", **values) -> Path:
    """Write a recipe like the quickstart's, followed by `text`."""
    settings = {
        "model": str(QUICKSTART.parents[1] / "runs" / "quickstart" / "model"),
        "tasks": str(QUICKSTART / "tasks.jsonl"),
        "harness": "mini-swe-agent",
        "steps": 2,
        "sessions_per_group": 2,
        **values,
    }
    path = folder / "recipe.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()) + text)
    return path


@pytest.mark.engine
@pytest.mark.harness
def test_two_steps_of_recording_training_and_publishing_and_a_resumed_third(engine, tmp_path):
    if shutil.which("mini") is None:
        pytest.skip("mini-swe-agent is not installed: tests/run.sh installs it")
    run = tmp_path / "run"
    grpo = "[grpo]\nlearning_rate = 1e-3\nactivation_checkpointing = false\n"

    def train(steps):
        recipe = write_recipe(tmp_path, grpo, steps=steps, recorders=2, model=str(engine.model_dir))
        arguments = ["train", str(recipe), "--engine", engine.url, "--out", str(run)]
        return CliRunner().invoke(cli.rolltap, arguments, catch_exceptions=False)

    try:
        assert train(2).exit_code == 0
        run_name = json.loads((run / TRAINING_FILE).read_text())["run"]
        assert engine.http.get("/weight_info").json() == {"weight_version": f"{run_name}.2.0"}
        shutil.rmtree(run / FINISHED)  # as if the run had been stopped after its second checkpoint
        assert train(3).exit_code == 0
    finally:
        base = AutoModelForCausalLM.from_pretrained(engine.model_dir)
        CheckpointPublisher(engine.url, tmp_path / "restored", tmp_path).publish(base, "default")

    sessions = load_sessions(run)
    versions = sorted(session.policy_version for session in sessions.values())
    assert versions == [f"{run_name}.{version}" for version in ("0.0", "0.0", "1.0", "1.0", "2.1", "2.1")]
    for session_id, calls in RecordedCalls(run).items():
        for call in calls:
            versions = {span.version for span in call.weight_versions}
            assert versions == {sessions[session_id].policy_version}
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (run / FINISHED / "model.safetensors").exists()
