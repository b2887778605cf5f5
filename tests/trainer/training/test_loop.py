"""The online loop on real parts, and its pure functions."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from rolltap.addons.errors import InputError
from rolltap.trainer import cli
from rolltap.trainer.engine.publish import CheckpointPublisher
from rolltap.trainer.rollouts.task import load_tasks
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from rolltap.trainer.training import loop
from rolltap.trainer.training.attempts import TRAINING_FILE
from rolltap.trainer.training.recipe import FINISHED, load_recipe

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


class TestArguments:
    @pytest.fixture
    def arguments(self, tmp_path):
        def arguments(text, **values):
            recipe = load_recipe(write_recipe(tmp_path, text, **values))
            return loop.training_arguments(recipe, tmp_path, 3, load_tasks(recipe.tasks))

        return arguments

    def test_the_recipes_table_has_trls_names_and_the_rest_is_derived(self, arguments, tmp_path):
        args = arguments("[grpo]\nlearning_rate = 0.5\nnum_iterations = 2\n", steps=3, sessions_per_group=4)
        assert (args.learning_rate, args.max_steps, args.seed) == (0.5, 6, 3)
        assert args.output_dir == str(tmp_path / loop.CHECKPOINTS)

    @pytest.mark.parametrize(
        ("text", "values", "message"),
        [
            ("[grpo]\nlearning_rat = 1\n", {}, "learning_rat"),
            ("[grpo]\nmax_steps = 1\n", {}, "grpo.max_steps is set by rolltap"),
            ("", {"groups_per_step": 2}, "groups_per_step is 2, but .* has 1 tasks"),
        ],
    )
    def test_invalid_arguments_are_refused(self, arguments, text, values, message):
        with pytest.raises(InputError, match=message):
            arguments(text, **values)


class TestSampling:
    @pytest.mark.parametrize(
        ("text", "sampling"),
        [
            ("", {"temperature": 1.0}),
            ("[grpo]\ntemperature = 0.7\n", {"temperature": 0.7}),
            ("[recorder]\nrolltap_sampling = '{\"top_k\": 5}'\n", {"top_k": 5, "temperature": 1.0}),
        ],
    )
    def test_the_engine_samples_at_the_trainers_temperature(self, tmp_path, text, sampling):
        assert loop.sampling(load_recipe(write_recipe(tmp_path, text))) == sampling

    def test_two_temperatures_are_refused(self, tmp_path):
        text = "[grpo]\ntemperature = 0.7\n[recorder]\nrolltap_sampling = '{\"temperature\": 0.6}'\n"
        with pytest.raises(InputError, match=r"samples at temperature 0\.6, but grpo\.temperature is 0\.7"):
            loop.sampling(load_recipe(write_recipe(tmp_path, text)))
