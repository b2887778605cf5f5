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
from click.testing import CliRunner
from safetensors.torch import load_file

from rolltap import plan_training
from rolltap.addons.store.metadata import tokenizer_digests
from rolltap.errors import InputError
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
from tests.trainer.service.served import serving
from tests.trainer.training.step.tiny import largest_difference
from tests.trainer.training.trainings import apart

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "recipes" / "quickstart"
MODELS = ROOT / "tests" / "models"
pytestmark = pytest.mark.skipif(
    shutil.which("mini") is None, reason="mini-swe-agent is not installed: tests/run.sh installs it"
)


def write_recipe(folder: Path, text: str = "", **values) -> Path:
    """Write a recipe like the quickstart's, followed by `text`."""
    settings = {
        "model": str(QUICKSTART.parents[1] / "runs" / "quickstart" / "model"),
        "tasks": str(QUICKSTART / "tasks.jsonl"),
        "harness": "mini-swe-agent",
        "steps": 2,
        "sessions": 2,
        **values,
    }
    path = folder / "recipe.toml"
    path.write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()) + text
    )
    return path


def write_task(folder: Path) -> Path:
    """Write the quickstart's task with a judge by chance: the rewards of a group are never all
    equal."""
    draw = [
        sys.executable,
        "-c",
        (
            "import os, random; open(os.environ['ROLLTAP_REWARD_FILE'],"
            " 'w').write(str(random.random()))"
        ),
    ]
    task = json.loads((QUICKSTART / "tasks.jsonl").read_text())
    del task["evaluate"]
    task["workspace"] = str(QUICKSTART / "workspace")
    task["judge"] = {"kind": "command", "command": draw, "result": "number"}
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


def version_served(engine) -> str:
    return engine.http.get("/weight_info").json()["weight_version"]


@pytest.mark.engine
@pytest.mark.harness
def test_a_step_of_recording_training_and_publishing_and_a_resumed_second(engine, tmp_path):
    run = tmp_path / "run"
    tables = (
        "[grpo]\nlearning_rate = 1e-3\nactivation_checkpointing = false\nlr_scheduler_type ="
        " 'constant'\n"
    )
    tables += (
        f"[evaluation]\ntasks = {json.dumps(str(QUICKSTART / 'tasks.jsonl'))}\nevery = 2\nsessions"
        " = 1\n"
    )

    def train(steps):
        recipe = write_recipe(tmp_path, tables, steps=steps, model=str(engine.model_dir))
        arguments = ["train", str(recipe), "--engine", engine.url, "--out", str(run)]
        return CliRunner().invoke(main.rolltap, arguments, catch_exceptions=False)

    try:
        assert train(1).exit_code == 0
        run_name = json.loads((run / TRAINING_FILE).read_text())["run"]
        assert version_served(engine) == f"{run_name}.1.0"
        with pytest.raises(InputError, match="steps = 1 is no more than its 1"):
            train(1)  # a finished training takes no step again, but more of them
        assert train(2).exit_code == 0
    finally:
        restore(engine)

    sessions = load_sessions(run)
    versions = sorted(session.policy_version for session in sessions.values())
    assert versions == [f"{run_name}.{version}" for version in ("0.0", "0.0", "1.1", "1.1")]
    for session_id, calls in RecordedCalls(run).items():
        for call in calls:
            versions = {span.version for span in call.weight_versions}
            assert versions == {sessions[session_id].policy_version}
    lines = read_metrics(run / METRICS)
    assert all(line["engine_difference"] < 1e-3 for line in lines if "engine_difference" in line)
    evaluated = [(line["step"], line.get("eval/step")) for line in lines]
    assert evaluated == [(1, 0), (1, 1), (2, 1), (2, 2)]
    held_out = load_sessions(run / EVALUATION)
    assert sorted(session.policy_version for session in held_out.values()) == [
        f"{run_name}.{version}" for version in ("0.0", "1.0", "2.1")
    ]
    for session_id, calls in RecordedCalls(run / EVALUATION).items():
        for call in calls:
            assert json.loads(call.sampling)["temperature"] == 0.0
            assert {span.version for span in call.weight_versions} == {
                held_out[session_id].policy_version
            }
    assert [(step.step, step.sessions) for step in step_rows(read_trained(run))] == [(1, 2), (2, 2)]
    assert {each.session_id for each in read_trained(run)} == sessions.keys()
    steps = [line for line in lines if "loss" in line]
    assert all(
        {"seconds_rollout", "seconds_publication", "seconds_training"} <= line.keys()
        for line in steps
    )
    assert (run / FINISHED / "model.safetensors").exists()
    recorded = json.loads((run / "run.json").read_text())
    tokenizer = load_tokenizer(engine.model_dir)
    digests = tokenizer_digests(tokenizer.get_vocab(), tokenizer.chat_template)
    assert digests == {name: recorded[name] for name in digests}, (
        "as a training on the run names them"
    )


@pytest.mark.deep
@pytest.mark.engine
@pytest.mark.harness
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_service_runs_the_sessions_of_a_training(engine, tmp_path, max_staleness):
    run, tasks = tmp_path / "run", write_task(tmp_path)
    with serving(
        run,
        engine.url,
        engine.model_dir,
        Path("mini-swe-agent"),
        tasks=[json.loads(tasks.read_text())],
    ) as at:
        settings = {
            "service": at.url,
            "max_staleness": max_staleness,
            "tasks": str(tasks),
            "model": str(engine.model_dir),
        }
        tables = "[grpo]\nlearning_rate = 1e-3\nactivation_checkpointing = false\n"
        arguments = [
            "train",
            str(write_recipe(tmp_path, tables, **settings)),
            "--engine",
            engine.url,
            "--out",
            str(run),
        ]
        try:
            result = CliRunner().invoke(main.rolltap, arguments, catch_exceptions=False)
        finally:
            restore(engine)
        assert result.exit_code == 0, result.output
        ended = {
            data["id"]
            for _, kind, data in at.events(until=lambda kind, _: kind == "ended")
            if kind == "ended"
        }
    sessions = load_sessions(run).values()
    name = json.loads((run / TRAINING_FILE).read_text())["run"]
    assert {session.policy_version for session in sessions} <= {f"{name}.0.0", f"{name}.1.0"}
    assert (len(sessions), {session.group_id for session in sessions} >= ended) == (4, True)
    assert [bool(line["tokens_trained"]) for line in read_metrics(run / METRICS)] == [True, True]


@pytest.mark.engine
@pytest.mark.harness
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("publish", cases(["lora", "checkpoint"]))
def test_rollouts_one_step_ahead_train_what_they_sampled_and_say_how_old_it_is(
    engine, tmp_path, publish
):
    run, lora = (
        tmp_path / "run",
        '[lora]\nr = 4\ntarget_modules = "all-linear"\n' if publish == "lora" else "",
    )
    settings = {
        "steps": 3,
        "publish": publish,
        "model": str(engine.model_dir),
        "tasks": str(write_task(tmp_path)),
    }

    def train(max_staleness):
        recipe = write_recipe(
            tmp_path,
            f"[grpo]\nlearning_rate = 1e-3\n{lora}",
            max_staleness=max_staleness,
            **settings,
        )
        arguments = ["train", str(recipe), "--engine", engine.url, "--out", str(run)]
        return CliRunner().invoke(main.rolltap, arguments)

    try:
        if publish == "lora":
            refused = str(train(2).exception)
            assert re.search(
                r"places for 3 adapters in a batch .* max_staleness = 2 .* need 4 and 5;"
                r" .*--max-staleness 2`",
                refused,
            )
        trained = train(1)
        assert trained.exit_code == 0, trained.output
    finally:
        restore(engine)
    output = " ".join(trained.output.split())
    (base,) = re.findall(r"an engine samples differs from the trainer's by (\S+) nats", output)
    first = re.findall(
        r"step 1: a sampled token after a \S+ prompt differs from the trainer's by (\S+) nats",
        output,
    )
    assert first, output
    assert max(map(float, [base, *first])) < 1e-3
    batches, recorded = TrainedBatches(run), dict(RecordedCalls(run).items())
    lines = read_metrics(run / METRICS)
    for step, line in enumerate(lines):
        spans = [
            span
            for name, _ in batches.get(step).sessions
            for call in recorded[name]
            for span in call.weight_versions
        ]
        ages = [
            step - Version.parse(span.version).step
            for span in spans
            for _ in range(span.start, span.end)
        ]
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
    engine, run = counting_engine, tmp_path / "run"
    text = "[grpo]\nlearning_rate = 1e-2\n" + (
        '[lora]\nr = 4\ntarget_modules = "all-linear"\n' if publish == "lora" else ""
    )
    recipe = write_recipe(
        tmp_path, text, steps=1, sessions=4, publish=publish, model=str(engine.model_dir)
    )
    plan, port = plan_training(recipe, engine=engine.url), engine.url.rpartition(":")[2]
    rank = ["--lora-rank", "8"] if publish == "lora" else []
    served = ["rolltap", "serve", str(engine.model_dir), "--port", port, *rank]
    assert shlex.split(plan.lines[1]) == [*served, "--", "--max-num-seqs", "16"]
    assert plan.can_start
    try:
        arguments = ["train", str(recipe), "--engine", engine.url, "--out", str(run)]
        assert CliRunner().invoke(main.rolltap, arguments, catch_exceptions=False).exit_code == 0
    finally:
        restore(engine)

    described = json.loads((run / "run.json").read_text())
    assert (described["renderer"], described["tool_parser"], described["bridge_refusal"]) == (
        "qwen3.5",
        "qwen-xml",
        None,
    )
    (configuration,) = (each["configuration"] for each in described["engines"].values())
    assert "enable_prefix_caching=True" in configuration
    assert json.loads((run / TRAINING_FILE).read_text())["begun"]["dtype"] == "bfloat16"
    assert {session.status for session in load_sessions(run).values()} == {"completed"}
    calls = [call for calls in RecordedCalls(run).values() for call in calls]
    assert {call.kind for call in calls} <= {"root", "bridged"}
    assert all(call.parsed_reply["tool_calls"] for call in calls)
    (line,) = read_metrics(run / METRICS)
    assert line["tokens_trained"] + line["left_out/no_signal"] == sum(
        len(call.completion_ids) for call in calls
    )
    assert 0.9 < line.get("ratio/min", 1) <= line.get("ratio/max", 1) < 1.1
    finished, base = (
        load_file(folder / "model.safetensors") for folder in (run / FINISHED, engine.model_dir)
    )
    assert finished.keys() == base.keys()
    assert any(name.startswith("model.visual.") for name in finished)


# short, step/test_checkpoint has two processes, and engine/test_engines two engines
@pytest.mark.deep
@pytest.mark.engine
@pytest.mark.harness
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_two_processes_with_two_engines_train_what_one_process_does(
    engine, second_engine, tmp_path
):
    grpo = "[grpo]\nlearning_rate = 1e-3\ngradient_accumulation_steps = 2\n"
    lora = '[lora]\nr = 4\ntarget_modules = "all-linear"\n'
    tasks = str(write_task(tmp_path))
    recipe = write_recipe(
        tmp_path, grpo + lora, tasks=tasks, sessions=4, publish="lora", model=str(engine.model_dir)
    )
    engines = [engine, second_engine]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "rolltap",
    ]
    both = ["train", str(recipe), "--engine", ",".join(each.url for each in engines), "--out"]
    try:
        started = subprocess.run(
            [*launcher, *both, str(tmp_path / "two")], capture_output=True, text=True, timeout=500
        )
        assert started.returncode == 0, started.stderr
        run_name = json.loads((tmp_path / "two" / TRAINING_FILE).read_text())["run"]
        assert all(
            f"policy-{run_name}.2.0" in EngineAdmin(each.url).models().adapters for each in engines
        )
        left_out = shutil.ignore_patterns("checkpoints", FINISHED, METRICS)
        shutil.copytree(
            tmp_path / "two", tmp_path / "one", ignore=left_out
        )  # batches.jsonl names the same sessions
        assert (
            CliRunner()
            .invoke(main.rolltap, [*both, str(tmp_path / "one")], catch_exceptions=False)
            .exit_code
            == 0
        )
    finally:
        for each in engines:
            restore(each)
    assert "the base weights: a token that an engine samples differs" in started.stderr
    assert all(
        line["engine_difference"] < 1e-3 for line in read_metrics(tmp_path / "two" / METRICS)
    )
    one, two, base = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "one" / FINISHED, tmp_path / "two" / FINISHED, engine.model_dir)
    )
    assert largest_difference(one, base) > 1e-5
    assert apart(one, two, base) < 0.01
    for calls in RecordedCalls(tmp_path / "two").values():
        assert all(call.weight_versions for call in calls)
