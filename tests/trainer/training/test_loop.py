"""The online loop on real parts."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from rolltap import plan_training
from rolltap.addons.store.metadata import tokenizer_digests
from rolltap.trainer.cli import main
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.models.loading import load_tokenizer
from rolltap.trainer.names import Version
from rolltap.trainer.runs.views.training import EVALUATION, step_rows
from rolltap.trainer.traces.reader import RecordedCalls, load_sessions
from rolltap.trainer.traces.trained import read_trained
from rolltap.trainer.training.attempt import TRAINING_FILE
from rolltap.trainer.training.recipe import FINISHED
from rolltap.trainer.training.report import METRICS, read_metrics
from rolltap.trainer.training.steps import TrainedBatches
from tests import tiny_checkpoints
from tests.conftest import running_engine
from tests.deep import cases
from tests.trainer.training.step.tiny import largest_difference
from tests.trainer.training.trainings import apart

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "recipes" / "quickstart"
MODELS = ROOT / "tests" / "models"
LORA = '[lora]\nr = 4\ntarget_modules = "all-linear"\n'
pytestmark = pytest.mark.skipif(
    shutil.which("mini") is None, reason="mini-swe-agent is not installed: tests/run.sh installs it"
)


def write_recipe(folder: Path, text: str = "", **keys) -> Path:
    """Write a recipe like the quickstart's, followed by `text`."""
    settings = {
        "model": str(ROOT / "runs" / "quickstart" / "model"),
        "tasks": str(QUICKSTART / "tasks.jsonl"),
        "harness": "mini-swe-agent",
        "steps": 2,
        "sessions": 2,
        **keys,
    }
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
    path = folder / "recipe.toml"
    path.write_text("".join(lines) + text)
    return path


DRAW = "import os, random; open(os.environ['ROLLTAP_REWARD_FILE'], 'w').write(str(random.random()))"


def write_task(folder: Path) -> Path:
    """Write the quickstart's task with a judge by chance: the rewards of a group are never all
    equal."""
    task = json.loads((QUICKSTART / "tasks.jsonl").read_text())
    del task["evaluate"]
    task["workspace"] = str(QUICKSTART / "workspace")
    command = [sys.executable, "-c", DRAW]
    task["judge"] = {"kind": "command", "command": command, "result": "number"}
    path = folder / "tasks.jsonl"
    path.write_text(json.dumps(task))
    return path


def restore(engine) -> None:
    """Let an engine serve the weights that it loaded when it started, under their name, and no
    adapter."""
    admin = EngineAdmin(engine.url)
    for name in admin.models().adapters:
        admin.unload_adapter(name)
    admin.serve(engine.model_dir, "default")


def train(recipe: Path, run: Path, *engines) -> Result:
    """Train, and let the engines serve what they did before."""
    urls = ",".join(engine.url for engine in engines)
    arguments = ["train", str(recipe), "--engine", urls, "--out", str(run)]
    try:
        return CliRunner().invoke(main.rolltap, arguments)
    finally:
        for engine in engines:
            restore(engine)


def versions_of(calls) -> set[str]:
    return {span.version for call in calls for span in call.weight_versions}


@pytest.mark.engine
@pytest.mark.harness
def test_a_step_of_recording_training_and_publishing_and_a_resumed_second(engine, tmp_path):
    run = tmp_path / "run"
    tables = f"""
[grpo]
learning_rate = 1e-3
activation_checkpointing = false
lr_scheduler_type = "constant"
[evaluation]
tasks = {json.dumps(str(QUICKSTART / "tasks.jsonl"))}
every = 2
sessions = 1
"""
    one = write_recipe(tmp_path, tables, steps=1, model=str(engine.model_dir))
    ended = train(one, run, engine)
    assert ended.exit_code == 0, ended.output
    name = json.loads((run / TRAINING_FILE).read_text())["run"]
    # a finished training takes no step again, but more of them
    assert "steps = 1 is no more than its 1" in str(train(one, run, engine).exception)
    two = write_recipe(tmp_path, tables, steps=2, model=str(engine.model_dir))
    ended = train(two, run, engine)
    assert ended.exit_code == 0, ended.output

    sessions = load_sessions(run)
    versions = sorted(session.policy_version for session in sessions.values())
    assert versions == [f"{name}.0.0", f"{name}.0.0", f"{name}.1.1", f"{name}.1.1"]
    for session_id, calls in RecordedCalls(run).items():
        assert versions_of(calls) == {sessions[session_id].policy_version}
    lines = read_metrics(run / METRICS)
    differences = [line.get("engine_difference", 0) for line in lines]
    assert max(differences) < 1e-3
    evaluated = [(line["step"], line.get("eval/step")) for line in lines]
    assert evaluated == [(1, 0), (1, 1), (2, 1), (2, 2)]
    held_out = load_sessions(run / EVALUATION)
    versions = sorted(session.policy_version for session in held_out.values())
    assert versions == [f"{name}.0.0", f"{name}.1.0", f"{name}.2.1"]
    for session_id, calls in RecordedCalls(run / EVALUATION).items():
        assert versions_of(calls) == {held_out[session_id].policy_version}
        assert {json.loads(call.sampling)["temperature"] for call in calls} == {0.0}
    assert [(step.step, step.sessions) for step in step_rows(read_trained(run))] == [(1, 2), (2, 2)]
    assert {each.session_id for each in read_trained(run)} == sessions.keys()
    for line in lines:
        if "loss" in line:
            assert {"seconds_rollout", "seconds_publication", "seconds_training"} <= line.keys()
    assert (run / FINISHED / "model.safetensors").exists()
    recorded = json.loads((run / "run.json").read_text())
    tokenizer = load_tokenizer(engine.model_dir)
    digests = tokenizer_digests(tokenizer.get_vocab(), tokenizer.chat_template)
    assert recorded.items() >= digests.items(), "as a training on the run names them"


@pytest.mark.engine
@pytest.mark.harness
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("publish", cases(["lora", "checkpoint"]))
def test_rollouts_one_step_ahead_train_what_they_sampled_and_say_how_old_it_is(
    engine, tmp_path, publish
):
    run = tmp_path / "run"
    lora = LORA if publish == "lora" else ""

    def train_ahead(max_staleness):
        recipe = write_recipe(
            tmp_path,
            f"[grpo]\nlearning_rate = 1e-3\n{lora}",
            steps=3,
            publish=publish,
            model=str(engine.model_dir),
            tasks=str(write_task(tmp_path)),
            max_staleness=max_staleness,
        )
        return train(recipe, run, engine)

    if publish == "lora":
        places = r"places for 3 adapters in a batch .* max_staleness = 2 .* need 4 and 5;"
        assert re.search(rf"{places} .*--max-staleness 2`", str(train_ahead(2).exception))
    trained = train_ahead(1)
    assert trained.exit_code == 0, trained.output
    output = " ".join(trained.output.split())
    base = re.findall(r"an engine samples differs from the trainer's by (\S+) nats", output)
    assert len(base) == 1
    sampled = r"step 1: a sampled token after a \S+ prompt differs from the trainer's by (\S+) nats"
    first = re.findall(sampled, output)
    assert first, output
    assert max(map(float, base + first)) < 1e-3
    batches = TrainedBatches(run)
    recorded = dict(RecordedCalls(run).items())
    lines = read_metrics(run / METRICS)
    for step, line in enumerate(lines):
        ages = []
        for name, _ in batches.get(step).sessions:
            for call in recorded[name]:
                for span in call.weight_versions:
                    age = step - Version.parse(span.version).step
                    ages += [age] * (span.end - span.start)
        kept = [age for age in ages if age <= 1]
        assert line["age/mean"] == pytest.approx(fmean(kept))
        assert line["left_out/stale"] >= len(ages) - len(kept)
    assert [line["age/max"] for line in lines][:2] == [0, 1]
    assert {name.split("-")[-1] for name in recorded} == {"0.0", "1.0"}, "no session was run twice"
    assert len(recorded) >= 6


@pytest.fixture(scope="module")
def counting_engine(engine_key, tmp_path_factory):
    """Yield a vLLM server, by its defaults, with a tiny Qwen3.5 in its vision-language layout and
    its own template."""
    folder = tmp_path_factory.mktemp("counting")
    model = tiny_checkpoints.counting_qwen35(folder / "model", MODELS / "qwen3.5-4b")
    with running_engine(model, folder / "vllm.log", 8192) as engine:
        yield engine


@pytest.mark.engine
@pytest.mark.harness
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("publish", cases(["checkpoint", "lora"]))
def test_a_qwen35_is_recorded_and_trained_by_its_defaults(counting_engine, tmp_path, publish):
    engine = counting_engine
    run = tmp_path / "run"
    text = "[grpo]\nlearning_rate = 1e-2\n"
    rank = []
    if publish == "lora":
        text += LORA
        rank = ["--lora-rank", "8"]
    recipe = write_recipe(
        tmp_path, text, steps=1, sessions=4, publish=publish, model=str(engine.model_dir)
    )
    plan = plan_training(recipe, engine=engine.url)
    served = ["rolltap", "serve", str(engine.model_dir), "--port", engine.url.rpartition(":")[2]]
    assert shlex.split(plan.lines[1]) == [*served, *rank, "--", "--max-num-seqs", "16"]
    assert plan.can_start
    ended = train(recipe, run, engine)
    assert ended.exit_code == 0, ended.output

    described = json.loads((run / "run.json").read_text())
    assert described["renderer"] == "qwen3.5"
    assert described["tool_parser"] == "qwen-xml"
    assert described["bridge_refusal"] is None
    (known,) = described["engines"].values()
    assert "enable_prefix_caching=True" in known["configuration"]
    assert json.loads((run / TRAINING_FILE).read_text())["begun"]["dtype"] == "bfloat16"
    assert {session.status for session in load_sessions(run).values()} == {"completed"}
    tokens = 0
    for calls in RecordedCalls(run).values():
        for call in calls:
            assert call.kind in ("root", "bridged")
            assert call.parsed_reply["tool_calls"]
            tokens += len(call.completion_ids)
    (line,) = read_metrics(run / METRICS)
    assert line["tokens_trained"] + line["left_out/no_signal"] == tokens
    assert 0.9 < line.get("ratio/min", 1) <= line.get("ratio/max", 1) < 1.1
    finished = load_file(run / FINISHED / "model.safetensors")
    assert finished.keys() == load_file(engine.model_dir / "model.safetensors").keys()
    assert any(name.startswith("model.visual.") for name in finished)


# short, step/test_checkpoint has two processes, and engine/test_engines two engines
@pytest.mark.deep
@pytest.mark.engine
@pytest.mark.harness
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_two_processes_with_two_engines_train_what_one_process_does(
    engine, second_engine, tmp_path
):
    recipe = write_recipe(
        tmp_path,
        f"[grpo]\nlearning_rate = 1e-3\ngradient_accumulation_steps = 2\n{LORA}",
        tasks=str(write_task(tmp_path)),
        sessions=4,
        publish="lora",
        model=str(engine.model_dir),
    )
    engines = (engine, second_engine)
    urls = ",".join(each.url for each in engines)
    one = tmp_path / "one"
    two = tmp_path / "two"
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 -m rolltap train"
    arguments = [str(recipe), "--engine", urls, "--out", str(two)]
    try:
        started = subprocess.run(
            [sys.executable, *launcher.split(), *arguments], capture_output=True, text=True
        )
        assert started.returncode == 0, started.stderr
        name = json.loads((two / TRAINING_FILE).read_text())["run"]
        for each in engines:
            assert f"policy-{name}.2.0" in EngineAdmin(each.url).models().adapters
    finally:
        for each in engines:
            restore(each)
    # batches.jsonl names the same sessions
    shutil.copytree(two, one, ignore=shutil.ignore_patterns("checkpoints", FINISHED, METRICS))
    ended = train(recipe, one, *engines)
    assert ended.exit_code == 0, ended.output
    assert "the base weights: a token that an engine samples differs" in started.stderr
    for line in read_metrics(two / METRICS):
        assert line["engine_difference"] < 1e-3
    folders = (one / FINISHED, two / FINISHED, engine.model_dir)
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    assert largest_difference(weights[0], weights[2]) > 1e-5
    assert apart(*weights) < 0.01
    for calls in RecordedCalls(two).values():
        assert all(call.weight_versions for call in calls)
