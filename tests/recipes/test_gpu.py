import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import DEFAULT, Mock, patch

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from rolltap.addons.errors import RolltapError
from rolltap.trainer.cli.main import load
from rolltap.trainer.models.loading import LINEAR_ATTENTION
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.training.plan.plan import plan
from rolltap.trainer.training.recipe import load_recipe
from tests.conftest import ROOT, vllm_program
from tests.readme.blocks import blocks_of
from tests.readme.test_reference import section
from tests.trainer.training.step.small_models import configuration
from tests.trainer.training.test_loop import restore

GPU = ROOT / "recipes" / "gpu"
QWEN3 = ROOT / "tests" / "models" / "qwen3-4b"
"""A model without weights."""

with pytest.MonkeyPatch.context() as context:
    context.syspath_prepend(GPU)
    import check
    import engine_half
    import lines
    import machine
    import plans
    import trainer_half
    import trainings


def named(found):
    """Lines by what they say."""
    return {line.what: line for line in found}


def results(found):
    return [line.result for line in found]


def make_setting(folder, **fields):
    """Return a setting with a model that is not there: the small form, or the one with GPUs."""
    return plans.Setting(folder / "model", "vllm", not fields, folder, **fields)


@pytest.fixture
def setting(tmp_path):
    return make_setting(tmp_path)


@pytest.fixture
def on_gpu(tmp_path):
    return make_setting(tmp_path, gpus=["0"])


def write_program(file, text):
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o700)


class TestMachine:
    @pytest.fixture(autouse=True)
    def program(self, tmp_path, monkeypatch):
        """Return a function that makes a program which prints a text. No other is on the PATH."""
        folder = tmp_path / "programs"
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder))
        for name in ("CC", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

        def program(name, printed=""):
            write_program(folder / name, f"/bin/cat <<'END'\n{printed}\nEND")

        return program

    def test_an_old_driver_fails_and_says_which_is_needed(self, program):
        program("gcc")
        program("nvidia-smi", "0, NVIDIA H100 80GB HBM3, 81559, 575.57.08")
        found = named(machine.machine_lines(False))
        driver = found["machine: driver"]
        assert (driver.result, driver.measured, driver.limit) == ("failed", 575, 580)
        assert "575.57.08" in driver.note
        assert "install the driver 580" in driver.note
        memory = found["machine: GiB of GPU 0"]
        assert (memory.result, memory.note) == ("passed", "NVIDIA H100 80GB HBM3")
        assert memory.measured == pytest.approx(79.6, abs=0.1)

    def test_a_machine_with_all_of_it_passes_and_nvcc_is_a_remark(self, program, monkeypatch):
        program("gcc")
        gpu = "NVIDIA H100, 81559, 580.65.06"
        program("nvidia-smi", f"0, {gpu}\n1, {gpu}")
        found = named(machine.machine_lines(False))
        assert set(results(found.values())) == {"passed"}
        assert found["machine: nvcc"].note.startswith("none")
        assert found["machine: GPUs that are used"].measured == 2
        for variable, names in (("1", ["1"]), ("", [])):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
            assert machine.visible(machine.gpus()) == names

    def test_what_is_missing_is_a_line_that_says_how_to_get_it(self, monkeypatch, tmp_path):
        monkeypatch.setattr(machine.sysconfig, "get_path", Mock(return_value=tmp_path))
        failed = {}
        for line in machine.machine_lines(False):
            if line.result == "failed":
                failed[line.what] = line.note
        assert [*failed] == ["machine: driver", "machine: C compiler", "machine: Python headers"]
        assert "580" in failed.pop("machine: driver")
        assert all("build-essential python3-dev" in note for note in failed.values())
        assert set(results(machine.machine_lines(True))) == {"passed"}

    @pytest.mark.parametrize(
        ("options", "status", "printed"),
        [(["--cpu"], 0, "machine: GPUs  passed  0"), ([], 1, "machine: driver  failed")],
    )
    def test_the_program_needs_nothing_but_python_and_ends_with_1_for_a_failed_line(
        self, options, status, printed
    ):
        command = [sys.executable, "-S", "-E", GPU / "machine.py", *options]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (status, "")
        assert printed in ended.stdout


class TestCommand:
    @pytest.fixture
    def script(self, tmp_path):
        """Return a function that runs check.sh in a copy of the checkout.

        Its environments are stand-ins, and so is the program that looks at the machine, which ends
        with `status`. The function returns the status of check.sh and the lines that it prints.
        """
        for environment in ("rolltap", "gpu"):
            folder = tmp_path / environment / "bin"
            folder.mkdir(parents=True)
            write_program(folder / "python", f'echo "{environment} runs $*"')
        folder = tmp_path / "recipes" / "gpu"
        folder.mkdir(parents=True)
        shutil.copy(GPU / "check.sh", folder)

        def script(*arguments, gpu="", status=0):
            (folder / "machine.py").write_text(f"raise SystemExit({status})")
            (tmp_path / "recipes" / "environments.sh").write_text(f"""
                set -euo pipefail
                cd {tmp_path}
                VENVS={tmp_path}
                GPU='{gpu}'
                say() {{ echo $*; }}
                fail() {{ echo $*; exit 1; }}
                environment_rolltap() {{ echo made rolltap; }}
                environment_gpu() {{ echo made gpu; }}
                environment_mini_swe_agent() {{ echo made mini; }}
                environment_vllm() {{ fail no index; }}
            """)
            command = ["bash", folder / "check.sh", *arguments]
            ended = subprocess.run(command, capture_output=True, text=True)
            return ended.returncode, ended.stdout.splitlines()

        return script

    def test_it_goes_on_when_vllm_cannot_be_installed(self, script, tmp_path):
        called = f"rolltap runs recipes/gpu/check.py --vllm {tmp_path}/vllm/bin/vllm --cpu"
        failure = ["no index", "vLLM could not be installed (see above)"]
        everything = ["made rolltap", *failure, "made mini", f"{called} --model a b"]
        assert script("--cpu", "--model", "a b") == (0, everything)
        half = ["made rolltap", f"{called} --trainer-only"]
        assert script("--cpu", "--trainer-only") == (0, half)

    def test_on_a_machine_with_a_gpu_it_installs_the_kernels(self, script):
        status, (made, runs) = script("--trainer-only", gpu="GPU 0: NVIDIA H100")
        assert (status, made) == (0, "made gpu")
        assert runs.startswith("gpu runs recipes/gpu/check.py")

    def test_it_installs_nothing_on_a_machine_that_lacks_something(self, script):
        status, (printed,) = script(status=1)
        assert status == 1
        assert printed.startswith("this machine lacks something")


@pytest.mark.parametrize("make", [lines.at_most, lines.at_least])
def test_what_is_not_a_number_fails_and_is_null_in_json(make):
    line = make("a", math.nan, 1)
    assert line.result == "failed"
    assert json.loads(json.dumps(line.to_json(), allow_nan=False))["measured"] is None
    assert make("a", 1, 1).result == "passed"


def test_the_table_shows_measured_planned_and_limit_and_text_as_it_is(capsys):
    row = lines.at_least("serve: cache", 17.3, 18.9, "no [/] space", planned=21)
    Console(width=120).print(check.table([row]))
    *_, shown, _ = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in shown.strip("│").split("│")]
    assert cells == ["serve: cache", "failed", "17.3", "21", ">= 18.9", "no [/] space"]


def test_the_stages_are_those_that_the_first_page_lists_as_not_run_on_cuda():
    listed = re.findall(r"^  - `(\w+)`", section("limits.md", "Limits"), re.MULTILINE)
    assert listed == [name for name in check.STAGES if name not in ("machine", "verify")]


class TestWalk:
    @pytest.fixture
    def stage(self, monkeypatch):
        """Let every stage pass. Return a function that lets one yield other lines."""

        def stage(name, *found, url="", error=None):
            def made(setting):
                setting.url = url
                yield from found
                if error is not None:
                    raise error

            monkeypatch.setitem(check.STAGES, name, made)

        for name in check.STAGES:
            stage(name, lines.fact(name), url="http://127.0.0.1:9")
        return stage

    def test_an_error_is_a_failed_line_after_others_and_the_stages_go_on(self, stage, setting):
        stage("record", lines.at_most("record: first", 0, 1), error=OSError("no space"))
        found = named(check.walk(setting, ""))
        assert found.keys() == {*check.STAGES, "record: first"}
        failed = found.pop("record")
        assert (failed.result, failed.note) == ("failed", "OSError: no space")
        assert set(results(found.values())) == {"passed"}

    def test_without_an_engine_its_stages_are_skipped_with_the_reason(self, stage, setting):
        found = named(check.walk(setting, "--trainer-only"))
        passed = [name for name, line in found.items() if line.result == "passed"]
        assert passed == ["machine", "kernels", "trainer"]
        assert found["lora"].note == "--trainer-only"
        stage("serve", lines.failed("serve", "no memory"))
        found = named(check.walk(setting, ""))
        assert found["serve"].note == "no memory"
        for name in ("record", "sharding", "verify"):
            assert found[name] == lines.skipped(name, "the engine did not start")

    def test_nothing_goes_on_without_the_machine(self, stage, setting):
        stage("machine", lines.failed("machine: driver", "575"), lines.fact("machine: nvcc"))
        driver, nvcc, *others = check.walk(setting, "")
        assert results([driver, nvcc]) == ["failed", "passed"]
        assert [line.what for line in others] == [*check.STAGES][1:]
        assert set(results(others)) == {"skipped"}

    def test_a_failed_line_is_exit_status_1_and_is_in_the_file_with_versions(self, stage, tmp_path):
        stage("trainer", lines.failed("trainer", "no room"))
        out = tmp_path / "made" / "check.json"
        command = ["--cpu", "--trainer-only", "--out", str(out)]
        ended = CliRunner().invoke(check.main, command)
        assert ended.exit_code == 1
        assert str(out) in ended.stdout.splitlines()[-1]
        found = json.loads(out.read_text())
        rows = {row["what"]: row for row in found["checks"]}
        assert (rows["trainer"]["result"], rows["trainer"]["note"]) == ("failed", "no room")
        assert rows["serve"]["note"] == "--trainer-only"
        assert found["trainer"]["torch"] == torch.__version__
        assert found["model"] == "the quickstart's"
        stage("trainer", lines.fact("trainer"))
        assert CliRunner().invoke(check.main, command).exit_code == 0


class TestTrainer:
    def test_the_small_form_compares_attention_and_the_gradients_of_both_models(self, setting):
        found = named(check.trainer(setting))
        assert set(results(found.values())) == {"passed"}
        for case in ("paths", "windows"):  # on a GPU, soft caps and sinks too
            line = found.pop(f"trainer: attention in bfloat16 against float32, {case}")
            assert line.measured < 0.01
        for model in ("qwen3-tiny", "qwen3.5-tiny"):
            for way in ("packed", "padded"):
                line = found.pop(f"trainer: gradients of {way} rows, float32, {model}")
                assert line.measured < 1e-5
            found.pop(f"trainer: probe of packed rows, float32, {model}")
        assert not found

    def test_gradients_that_differ_and_a_reason_of_the_probe_are_failed_lines(self, tmp_path):
        def untouched(model, forest, dtype):
            model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)

        def twice_in_training(model):
            return {"a": torch.ones(2) * (model.training + 1)}

        folder = trainer_half.tiny_model(tmp_path, "qwen3-4b")
        stand_ins = {
            "run": untouched,
            "gradients_of": twice_in_training,
            "plain_gradients": Mock(return_value={"a": torch.ones(2)}),
            "probe": Mock(return_value="a mixer leaks"),
        }
        with patch.multiple(trainer_half, **stand_ins):
            *gradients, probe = trainer_half.gradient_lines(folder, "cpu")
        assert [(line.result, line.measured) for line in gradients] == [("failed", 1.0)] * 2
        assert (probe.result, probe.note) == ("failed", "a mixer leaks")

    @pytest.mark.parametrize(("dynamic", "number"), [(False, 2), (True, 0)])
    def test_graphs_that_are_compiled_after_the_second_length_are_counted(self, dynamic, number):
        def double(x):
            return 2 * x

        compiled = torch.compile(double, backend="eager", dynamic=dynamic)

        def step(length):
            compiled(torch.ones(length))

        assert trainer_half.recompilations(step, (3, 4, 5, 6)) == number
        torch.compiler.reset()

    # of PEFT
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    def test_memory_is_held_against_the_plan_and_the_longest_row_is_the_planned_one(self, tmp_path):
        gib = trainer_half.GIB
        folder = trainer_half.tiny_model(tmp_path, "qwen3-4b")
        always, of_row = trainer_half.planned(folder, trainer_half.LORA)
        weights = always["weights"] + always["gradients"]
        peak = trainer_half.at(of_row.peak, 600)
        cuda = {
            "memory_allocated": Mock(side_effect=[0, weights, weights]),
            "max_memory_allocated": Mock(side_effect=[weights + peak, weights + 3 * gib]),
            "memory_reserved": Mock(return_value=weights),
            "mem_get_info": Mock(return_value=(trainer_half.at(of_row.peak, 900), 80 * gib)),
            "empty_cache": DEFAULT,
            "reset_peak_memory_stats": DEFAULT,
            "synchronize": DEFAULT,
        }
        offloading = Mock(return_value=contextlib.nullcontext())
        half = {"get_act_offloading_ctx_manager": offloading, "LENGTH": 600}
        with patch.multiple(torch.cuda, **cuda), patch.multiple(trainer_half, **half):
            found = named(trainer_half.size_lines(folder, trainer_half.LORA, "cpu"))
        name = "qwen3-tiny, LoRA"
        of_row = f"trainer: GiB of a row of 600 tokens, {name}"
        for what in (f"trainer: GiB of weights and gradients, {name}", of_row):
            assert (found[what].result, found[what].measured) == ("passed", found[what].planned)
        assert found[f"{of_row}, offloaded"].result == "failed"
        assert found[f"trainer: tokens a second, a row of 600 tokens, {name}"].measured > 0
        assert 800 < found[f"trainer: tokens of the longest row, {name}"].measured < 900

    def test_lines_before_a_crash_stay_and_its_end_is_one(self, setting, tmp_path):
        first = lines.fact("trainer: attention")
        (tmp_path / "trainer_half.py").write_text(
            "import sys\n"
            f"with open(sys.argv[2], 'w') as file: file.write({json.dumps(first.to_json())!r})\n"
            "raise RuntimeError('no kernel')\n"
        )
        with patch.object(check, "HERE", tmp_path):
            before, last = check.trainer(setting)
        assert before == first
        assert last.result == "failed"
        assert last.note.endswith("RuntimeError: no kernel")

    @pytest.mark.parametrize(
        ("model", "device", "limit"),
        [
            ("qwen3.5-4b", "cuda", 5e-3),
            ("qwen3.5-4b", "cpu", 1e-4),
            ("qwen3-4b", "cuda", 1e-4),
            ("qwen3-4b", "cpu", 1e-4),
        ],
    )
    def test_the_limit_of_float32_is_that_of_tf32_where_fla_runs(self, model, device, limit):
        def kernels(model_type):
            return {LINEAR_ATTENTION: True} if model_type.startswith("qwen3_5") else {}

        with patch.object(trainer_half, "kernels", kernels):
            assert trainer_half.float32_limit(QWEN3.with_name(model), device) == limit

    def test_a_model_without_room_on_the_gpu_is_a_failed_line(self):
        full = torch.OutOfMemoryError("no room")
        with patch.object(trainer_half, "size_lines", side_effect=full):
            [line] = trainer_half.guarded_sizes(QWEN3, trainer_half.LORA)
        assert (line.result, line.what) == ("failed", "trainer: memory, qwen3-4b, LoRA")

    @pytest.mark.parametrize(("importable", "result"), [(False, "failed"), (True, "passed")])
    def test_a_gpu_without_fla_is_a_failed_line(self, importable, result, on_gpu):
        found = {LINEAR_ATTENTION: importable, "causal-conv1d": False}
        with patch.object(check, "packages", return_value=found):
            [line] = check.linear_attention(on_gpu)
        assert line.result == result
        assert LINEAR_ATTENTION in line.note


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The plans of three trainings of a tiny model on a GPU of 80 GiB, as JSON."""
    folder = tmp_path_factory.mktemp("plans")
    config = configuration("qwen3")
    config.max_position_embeddings = plans.CONTEXT
    config.save_pretrained(folder / "model")
    setting = make_setting(folder, gpus=[])
    found = {}
    for name in ("checkpoint", "lora", "ahead"):
        recipe = load_recipe(plans.write_recipe(setting, name))
        sized = recipe.machine.model_copy(update={"gpu_gib": 80.0})
        found[name] = plan(recipe.model_copy(update={"machine": sized})).to_json()
    return json.dumps(found)


class TestPlans:
    @pytest.fixture
    def on_gpu(self, on_gpu, planned):
        """The setting, with the plans of three trainings."""
        on_gpu.plans = json.loads(planned)
        return on_gpu

    def test_a_recipe_shares_the_gpu_and_its_row_fits_by_the_plan(self, on_gpu):
        planned = on_gpu.plans["lora"]
        recipe = load_recipe(plans.write_recipe(on_gpu, "lora", planned))
        assert (recipe.publish, recipe.machine.shared_gpu) == ("lora", True)
        assert sum(planned["memory"]["row"].values()) < planned["memory"]["room"]

    @pytest.mark.parametrize(("room", "folder"), [(True, plans.SHARED_MEMORY), (False, None)])
    def test_a_recipe_publishes_in_memory_where_the_weights_fit(self, room, folder, on_gpu):
        with patch.object(plans, "has_room", return_value=room):
            recipe = load_recipe(plans.write_recipe(on_gpu, "lora", on_gpu.plans["lora"]))
        assert recipe.publish_folder == folder

    def test_more_sessions_run_ahead_than_in_the_other_trainings(self, setting):
        recipes = {name: load_recipe(plans.write_recipe(setting, name)) for name in plans.TRAININGS}
        ahead = recipes.pop("ahead")
        assert ahead.max_staleness == 1
        assert ahead.concurrency > max(recipe.concurrency for recipe in recipes.values())
        assert recipes["engines"].machine.engines == 2
        assert recipes["sharding"].grpo["sharding"] == "full"
        assert recipes["sharding"].machine.processes == 2
        moving = [name for name, recipe in recipes.items() if recipe.iterations == 2]
        assert moving == ["checkpoint", "lora"]
        grpo = recipes["lora"].grpo
        assert grpo["max_grad_norm"] * grpo["learning_rate"] == pytest.approx(plans.LENGTH)

    def test_a_training_and_its_plan_see_the_gpus_that_it_uses(self, on_gpu, setting, monkeypatch):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        on_gpu.gpus = ["3", "4"]
        for name in plans.TRAININGS:
            visible = plans.environment_of(on_gpu, name)["CUDA_VISIBLE_DEVICES"]
            assert visible == ("3,4" if name == "sharding" else "3")
            assert "CUDA_VISIBLE_DEVICES" not in plans.environment_of(setting, name)

    def test_every_second_session_of_a_task_gets_a_reward(self, setting):
        for task in load_tasks(plans.write_tasks(setting.folder, "record")):
            assert [subprocess.run(task.evaluate).returncode for _ in range(4)] == [0, 1, 0, 1]

    def test_the_engine_gets_the_share_and_the_calls_that_all_plans_leave_it(self, on_gpu, setting):
        shares = [each["memory"]["engine"] for each in on_gpu.plans.values()]
        least = min(share["utilization"] for share in shares)
        most = max(share["sequences"] for share in shares)
        expected = ["--gpu-memory-utilization", f"{least:.2f}", "--max-num-seqs", str(most)]
        assert engine_half.engine_arguments(on_gpu)[-4:] == expected
        on_gpu.plans["checkpoint"]["can_start"] = False
        assert len(engine_half.shares(on_gpu)) == len(shares) - 1
        assert engine_half.engine_arguments(setting) == ["--seed", "0"]

    def test_vllms_own_number_for_its_cache_is_held_against_the_plan(self, on_gpu, setting):
        of_log = "(EngineCore pid=9) INFO [gpu_worker.py:760] Available KV cache memory: {} GiB\n"
        least = min(engine_half.shares(on_gpu), key=lambda share: share["utilization"])
        planned = least["sizes"]["cache"] / 2**30
        for share, result in ((0.95, "passed"), (0.85, "failed")):
            log = of_log.format(f"{share * planned:.2f}")
            line = engine_half.cache_line(on_gpu, log)
            assert (line.result, line.planned) == (result, planned)
            assert line.measured == pytest.approx(share * planned, abs=0.01)
        assert engine_half.cache_line(on_gpu, "nothing").result == "skipped"
        assert engine_half.cache_line(setting, log).result == "skipped"

    def test_a_peak_is_held_against_the_weights_and_traces_of_the_plan(self, on_gpu, setting):
        memory = on_gpu.plans["lora"]["memory"]
        planned = trainings.planned_peak(memory)
        assert planned > memory["always"]["weights"] / 2**30
        for peak, result in ((planned, "passed"), (1.2 * planned, "failed")):
            steps = [{"peak_memory_gib": 0.0}, {"peak_memory_gib": peak}]
            line = trainings.peak(on_gpu, "lora", steps)
            assert (line.result, line.measured, line.planned) == (result, peak, planned)
        assert trainings.peak(setting, "lora", []).result == "skipped"

    def test_a_training_that_cannot_start_by_its_plan_is_refused_with_the_reasons(self, on_gpu):
        on_gpu.plans["lora"]["can_start"] = False
        on_gpu.plans["lora"]["findings"] = [{"level": "error", "text": "no room"}]
        with pytest.raises(RolltapError, match="the plan: no room"):
            list(trainings.lora(on_gpu))


def step(of, value):
    """Metrics of an optimizer step with two kinds of prompts, of which the second is rare."""
    return {f"{of}/root": value, "tokens/root": 90, f"{of}/bridged": value, "tokens/bridged": 10}


def steps(before, moved, after, grad_norm=0.1):
    """Metrics of two batches with two optimizer steps each."""
    first = step("difference", before) | {"grad_norm": grad_norm}
    second = step("off_policy", moved)
    return [first, second, step("difference", after), second]


class TestSteps:
    @pytest.mark.parametrize(
        ("metrics", "result", "note"),
        [
            (steps(0.01, 0.2, 0.02), "passed", ""),
            (steps(0.01, 0.2, 0.2), "failed", "0.2 nats"),
            (steps(0.01, 0.2, 0.11), "failed", "0.2 nats"),
            (steps(0.01, 0.2, math.nan), "failed", "0.2 nats"),
            (
                steps(0.011, 0.03, 0.012),
                "skipped",
                "by 0.03 nats, the base weights differ by 0.011",
            ),
            ([{}, {}, {}, {}], "skipped", ""),
            ([{}], "failed", ""),
            (steps(1e-8, 2e-7, 5e-7, grad_norm=1e-9), "skipped", "gradients cancel"),
        ],
        ids=[
            "applied",
            "not applied",
            "half applied",
            "not a number",
            "a step that does not show",
            "nothing measured",
            "too few steps",
            "gradients that cancel",
        ],
    )
    def test_an_engine_that_did_not_apply_the_step_fails(self, metrics, result, note):
        line = trainings.applied("lora", metrics)
        assert line.result == result
        assert note in line.note

    def test_kinds_of_prompts_count_by_their_tokens(self):
        metrics = step("difference", 0.1) | {"difference/bridged": 1.1}
        assert trainings.difference(metrics, "difference") == pytest.approx(0.2)
        assert trainings.difference(metrics, "off_policy") is None

    def test_every_publication_and_every_step_is_held_against_the_limit(self):
        metrics = steps(0.01, 0.2, 0.02)
        metrics[0]["engine_difference"] = 0.01
        metrics[2]["engine_difference"] = 0.3
        published, sampled = trainings.agreement("lora", metrics, 0.1)
        assert (published.result, published.measured) == ("failed", 0.3)
        assert (sampled.result, sampled.measured) == ("passed", 0.02)

    def test_of_recorded_runs_the_first_step_is_held_against_the_limit(self):
        metrics = [step("off_policy", 0.2), step("off_policy", 0.4)]
        [line] = trainings.agreement("sharding", metrics, 0.1)
        assert (line.result, line.measured) == ("failed", pytest.approx(0.2))

    def test_a_step_takes_its_rollouts_its_publication_and_its_trainer(self):
        first = {"seconds_rollout": 5.0, "seconds_publication": 0.5, "seconds_training": 2.0}
        second = {"seconds_rollout": 3.0, "seconds_publication": 1.5, "seconds_training": 0.0}
        seconds, tokens = trainings.speed("lora", [first | {"tokens_per_second": 50.0}, second])
        assert seconds.measured == pytest.approx(4 + 1 + 1)
        assert seconds.note == "of it rollout 4.0, publication 1.0, training 1.0"
        assert tokens.measured == 50.0


def test_with_one_gpu_the_lines_of_several_are_skipped_with_the_reason(on_gpu):
    for line in (*trainings.engines(on_gpu), *trainings.sharding(on_gpu)):
        assert (line.result, line.note) == ("skipped", "there is one GPU: it needs two")


def test_an_engine_that_does_not_start_is_a_failed_line(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    vllm = tmp_path / "vllm"
    write_program(vllm, "echo no memory; exit 3")
    setting = plans.Setting(QWEN3, str(vllm), True, tmp_path)
    with patch.object(engine_half, "SHARING", ()):  # nothing is planned
        [line] = check.guarded("serve", engine_half.serve, setting)
    assert (line.what, line.result) == ("serve", "failed")
    assert "no memory" in line.note


def first_day():
    """The commands of the page, in their order."""
    shown = "".join(block.text for block in blocks_of(GPU / "README.md"))
    return [line[2:] for line in shown.splitlines() if line.startswith("$ ")]


class TestFirstDay:
    @pytest.fixture
    def recipe(self, tmp_path, monkeypatch):
        """The recipe that the page's command makes, with its task, in a folder with the recipes and
        the model without its weights; the programs run there."""
        folder = tmp_path / "recipes" / "swe"
        shutil.copytree(ROOT / "recipes" / "swe", folder)
        shutil.copytree(QWEN3.with_name("qwen3.5-4b"), folder / "Qwen3.5-4B")
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        monkeypatch.chdir(tmp_path)
        subprocess.run(["bash", "-c", first_day()[6]], check=True, capture_output=True)
        return folder / "first-day.toml"

    def test_it_has_ten_commands_and_their_options_exist(self, recipe):
        commands = first_day()
        assert len(commands) == 10
        checked = []
        for command in commands:
            program, *arguments = shlex.split(command.partition(" > ")[0])
            main = check.main if program.endswith("check.sh") else None
            if program == "rolltap":
                program, *arguments = arguments
                main = load(program)
            if main is not None:
                checked.append(program)
                with main.make_context(program, arguments):
                    pass
        script = "recipes/gpu/check.sh"
        assert checked == [script, script, "train", "serve", "train"]

    def test_its_recipe_is_that_of_one_gpu_with_a_task_and_a_program_that_are_there(self, recipe):
        found = load_recipe(recipe)
        [task] = load_tasks(found.tasks)
        assert task.id == "example__spans-6"
        assert (found.harness, found.runtime) == ("mini-swe-agent", "sandbox")
        others = load_recipe(recipe.with_name("one-gpu-lora.toml"))
        changed = {"tasks", "runtime", "harness", "steps", "groups_per_step"}
        assert {key for key, value in found if value != getattr(others, key)} == changed

    @pytest.mark.deep  # half a minute; tests/recipes/test_swe.py compares the plans of the recipes
    def test_it_starts_the_engine_and_the_training_as_the_plan_says(self, recipe):
        made = plan(load_recipe(recipe), file=recipe, out=Path("runs/first-day"))
        assert made.can_start
        _, serve, train = made.lines
        *_, page_serve, page_train = first_day()
        page_serve = page_serve.partition(" > ")[0]
        assert page_serve.partition(" --port ")[2] == serve.partition(" --port ")[2]
        assert page_train.partition(" --engine ")[2] == train.partition(" --engine ")[2]


def require_mini():
    if shutil.which("mini") is None:
        pytest.skip("mini-swe-agent is not installed: tests/run.sh installs it")


# short, training/test_resume kills trainings, and test_loop resumes one with this engine
@pytest.mark.deep
@pytest.mark.engine
@pytest.mark.harness
def test_a_training_that_was_killed_ends_well_and_its_step_is_in_the_engine(engine, tmp_path):
    require_mini()
    setting = plans.Setting(engine.model_dir, "vllm", True, tmp_path, url=engine.url)
    plans.write_recipe(setting, "lora")
    setting.plans["lora"] = {"can_start": True}  # another process would make the plan
    try:
        found = named([*trainings.lora(setting), *trainings.verify(setting)])
    finally:
        restore(engine)
    assert [line for line in found.values() if line.result == "failed"] == []
    assert found["lora: kill -9"].result == "passed"
    assert found["lora: engine and trainer after a publication, nats"].measured < 1e-3
    moved = found["lora: of what the step moved"]
    assert moved.result == "skipped" or moved.measured < 0.1  # two sessions can be alike
    assert found["verify: damage in lora"].measured == 0
    metrics = trainings.read_metrics(tmp_path / "lora")
    assert [step["step"] for step in metrics] == [1, 2, 3, 4]


@pytest.mark.deep  # short, other tests train in these ways
@pytest.mark.engine
@pytest.mark.harness
def test_the_small_form_goes_through_all_stages_and_no_line_fails(tmp_path):
    require_mini()
    out = tmp_path / "check.json"
    command = [sys.executable, GPU / "check.py", "--cpu", "--vllm", vllm_program(), "--out", out]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())
    rows = found["checks"]
    assert {row["what"].partition(":")[0] for row in rows} == {*check.STAGES}
    skipped = {row["what"] for row in rows if row["result"] == "skipped"}
    without_gpu = {"serve: GiB of cache"}
    without_gpu |= {f"{name}: peak of memory, GiB" for name in plans.TRAININGS}
    alike = {f"{name}: of what the step moved" for name in ("checkpoint", "lora")}
    assert without_gpu <= skipped <= without_gpu | alike  # two sessions can be alike
    assert found["engine"]["vllm"]
