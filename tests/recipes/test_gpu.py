import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.training.recipe import load_recipe
from tests.conftest import ROOT
from tests.trainer.training.test_loop import restore

GPU = ROOT / "recipes" / "gpu"
TINY = ROOT / "tests" / "models" / "qwen3-4b"
"""A model without weights, which can be planned."""


def check(program, *arguments):
    command = [sys.executable, GPU / program, *arguments]
    environment = {**os.environ, "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_without_a_gpu_the_whole_check_says_that_there_is_none(tmp_path):
    ended = check("trainer_half.py", "--out", tmp_path / "check.json")
    assert ended.returncode == 1
    assert "--cpu" in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def half(monkeypatch):
    monkeypatch.syspath_prepend(GPU)
    import engine_half

    return engine_half


@pytest.mark.deep  # its parts are tested with a real engine in test_loop and test_publish
@pytest.mark.engine
@pytest.mark.harness
def test_the_engine_half_records_trains_and_publishes_in_two_ways_and_each_line_passes(half, engine, tmp_path):
    if shutil.which("mini") is None:
        pytest.skip("mini-swe-agent is not installed: tests/run.sh installs it")
    plans = {way: half.plan_of(engine.model_dir, way, True, tmp_path) for way in half.TRAININGS}
    try:
        lines = list(half.with_engine(engine.url, engine.model_dir, True, tmp_path, plans))
    finally:
        restore(engine)
    assert [line for line in lines if line.result == "failed"] == []
    skipped = {line.what for line in lines if line.result == "skipped"}
    assert skipped == {f"{way}: peak memory over the plan" for way in ("checkpoint", "lora")}
    passed = {line.what: line for line in lines if line.result == "passed"}
    assert passed.keys() >= {"record: sessions with a fault", "check: root prompts, nats", "verify: damage in lora"}
    for way in half.TRAININGS:
        assert passed[f"{way}: engine and trainer after the step, nats"].number < 1e-3
        assert passed[f"{way}: of what the steps changed"].number < 0.1


def test_a_recipe_shares_the_gpu_as_its_plan_says_and_every_second_session_gets_a_reward(half, tmp_path):
    for way in half.TRAININGS:
        recipe = load_recipe(half.write_recipe(tmp_path, TINY, way, False, memory_gib=20.5))
        assert (recipe.publish, recipe.machine.shared_gpu, recipe.grpo["memory_gib"]) == (way, True, 20.5)
        assert half.write_recipe(tmp_path, TINY, way, True).read_text().count("memory_gib") == 0
        [task] = load_tasks(recipe.tasks)
        assert [subprocess.run(task.evaluate).returncode for _ in range(4)] == [0, 1, 0, 1]


def test_an_engine_that_did_not_apply_the_step_fails(half):
    for sampled, change in ((0.02, 0.0), (0.02, 0.02), (float("nan"), 0.2)):
        assert half.applied("lora", sampled=sampled, change=change, note="").result == "failed"
    assert half.applied("lora", sampled=0.02, change=0.2, note="").result == "passed"
    line = half.applied("lora", sampled=0.02, change=0.0, note="")
    assert json.loads(json.dumps(line.to_json(), allow_nan=False))["number"] is None  # JSON lacks infinity


def test_an_error_is_a_failed_line_after_those_that_were_made_and_is_shown_as_it_is(half, capsys):
    import lines

    def made():
        yield half.measured("first", 0, 1)
        raise OSError("[Errno 28] no [/] space")

    first, second = half.guarded("second", made)
    assert first.result == "passed"
    assert (second.what, second.result, second.note) == ("second", "failed", "OSError: [Errno 28] no [/] space")
    Console(width=100).print(lines.table([second]))
    assert "[Errno 28] no [/] space" in capsys.readouterr().out


def test_without_a_harness_nothing_of_the_engine_half_passes(half, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = list(half.with_engine("http://127.0.0.1:9", TINY, True, tmp_path, {}))
    assert {line.result for line in lines} == {"skipped"}
    assert all("mini-swe-agent" in line.note for line in lines)


def test_an_engine_that_does_not_start_is_a_failed_line(half, tmp_path, monkeypatch):
    monkeypatch.setattr(half, "plan_of", lambda *_: {"can_start": True, "memory": {"engine": None}})
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    vllm = tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\necho no memory; exit 3\n")
    vllm.chmod(0o700)
    [line] = half.engine_half(TINY, str(vllm), True, tmp_path)
    assert (line.what, line.result) == ("serve", "failed")
    assert "no memory" in line.note


def test_the_engine_gets_the_share_that_both_plans_leave_it(half, tmp_path):
    plans = {
        "checkpoint": {"can_start": False, "memory": None},
        "lora": {"can_start": True, "memory": {"engine": {"utilization": 0.3}}},
        "other": {"can_start": True, "memory": {"engine": {"utilization": 0.2}}},
    }
    arguments = half.engine_arguments(plans, False)
    assert arguments[-2:] == ["--gpu-memory-utilization", "0.20"]
    assert "--gpu-memory-utilization" not in half.engine_arguments(plans, True)


def test_without_vllm_the_trainers_half_alone_runs_and_says_so(tmp_path):
    out = tmp_path / "made" / "check.json"
    ended = check("check.py", "--cpu", "--out", out, "--vllm", tmp_path / "none")
    assert ended.returncode == 0, ended.stderr
    assert "only the trainer's half is checked: there is no vLLM" in ended.stderr
    found = json.loads(out.read_text())
    *attention, qwen3, hybrid, engine = found["checks"]
    assert [(line["result"], line["number"] < 0.01) for line in attention] == [("passed", True)] * 3
    models = [qwen3, hybrid]
    assert [(line["result"], line["number"] < 1e-5) for line in models] == [("passed", True)] * 2
    assert [line["what"].rpartition(", ")[2] for line in models] == ["qwen3-tiny", "qwen3.5-tiny"]
    assert engine["result"] == "skipped"
    assert found["device"] == "CPU"


def test_a_model_without_room_on_the_gpu_is_a_failed_line_and_the_others_go_on(half, monkeypatch):
    import check as whole
    import trainer_half

    def full(*_):
        raise torch.OutOfMemoryError("no room")
        yield

    monkeypatch.setattr(trainer_half, "_memory", full)
    [result] = trainer_half._memory_or_none(TINY, trainer_half.LORA)
    assert (result.ok, result.model) == (False, "qwen3-4b, LoRA")
    line = whole._line({"check": result.check, "model": result.model, "value": None, "limit": result.limit})
    assert line.result == "failed"


def test_the_command_goes_on_when_vllm_cannot_be_installed_and_takes_one_gpu(tmp_path):
    python = tmp_path / "rolltap" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "GPU $CUDA_VISIBLE_DEVICES runs $*"\n')
    python.chmod(0o700)
    (tmp_path / "recipes" / "gpu").mkdir(parents=True)
    (tmp_path / "recipes" / "environments.sh").write_text(
        f"set -euo pipefail; VENVS={tmp_path}; GPU='GPU 0'\n"
        "say() { echo $*; }\nfail() { echo $*; exit 1; }\n"
        "environment_rolltap() { echo made rolltap; }\nenvironment_mini_swe_agent() { echo made mini; }\n"
        "environment_vllm() { fail no index; }\n"
    )
    copy = shutil.copy(GPU / "check.sh", tmp_path / "recipes" / "gpu")

    def script(*arguments, **environment):
        environment = {"PATH": os.environ["PATH"], **environment}
        ended = subprocess.run(["bash", copy, *arguments], capture_output=True, text=True, env=environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    called = f"recipes/gpu/check.py --vllm {tmp_path}/vllm/bin/vllm"
    *before, last = script("--model", "a b")
    assert before == ["made rolltap", "no index", "vLLM could not be installed (see above)", "made mini"]
    assert last == f"GPU 0 runs {called} --model a b"
    half = script("--trainer-only", CUDA_VISIBLE_DEVICES="3,4")
    assert half == ["made rolltap", f"GPU 3 runs {called} --trainer-only"]


def test_a_failed_line_is_exit_status_1_and_is_in_the_json(half, monkeypatch, tmp_path):
    import check as whole

    monkeypatch.setattr(whole, "trainer_half", lambda cpu: ([whole.failed("trainer half", "no room")], {}))
    out = tmp_path / "check.json"
    ended = CliRunner().invoke(whole.main, ["--cpu", "--trainer-only", "--out", str(out)])
    assert ended.exit_code == 1
    checks = json.loads(out.read_text())["checks"]
    assert [(line["what"], line["result"], line["note"]) for line in checks] == [
        ("trainer half", "failed", "no room"),
        ("engine half", "skipped", "--trainer-only"),
    ]
